"""Directory changes as lists of steps, which the core carries out.

The core releases the interpreter lock once for a whole list. Python would release the lock for each
system call, and wait up to 5 ms to get it back while another thread computes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from stillframe import _core

# (one of `_core.STEP_...`, a path, the file's content or the new path)
Step = tuple[int, bytes, bytes]


def write(path: str, content: bytes, *, durable: bool) -> Step:
    """Return a step that creates a file, and syncs it if `durable`."""
    code = _core.STEP_WRITE_SYNCED if durable else _core.STEP_WRITE
    return code, os.fsencode(path), content


def sync(directory: str) -> Step:
    """Return a step that makes a directory's entries durable, if the file system can do so."""
    return _core.STEP_SYNC, os.fsencode(directory), b""


def rename(old: str, new: str) -> Step:
    return _core.STEP_RENAME, os.fsencode(old), os.fsencode(new)


def unlink(path: str) -> Step:
    """Return a step that removes a name; a missing one is no error."""
    return _core.STEP_UNLINK, os.fsencode(path), b""


def take(steps: Sequence[Step]) -> None:
    """Carry out the steps in order. Raise OSError at the first step that fails."""
    done, code = _core.take_steps(steps)
    if code:
        raise _error(code, steps[done])


def carry_out_all_steps(steps: Sequence[Step]) -> list[OSError]:
    """Carry out all steps, even after one that fails. Return the errors."""
    errors = []
    while steps:
        done, code = _core.take_steps(steps)  # how many succeeded; the errno of the next one, or 0
        if code:
            errors.append(_error(code, steps[done]))
        steps = steps[done + 1 :]
    return errors


def _error(code: int, step: Step) -> OSError:
    return OSError(code, os.strerror(code), os.fsdecode(step[1]))


def names(directory: str) -> list[str]:
    """Return the names in a directory. Raise OSError if it cannot be listed."""
    found, code = _core.names(os.fsencode(directory))
    if code:
        raise OSError(code, os.strerror(code), directory)
    return [os.fsdecode(name) for name in found.split(b"\0")[:-1]]
