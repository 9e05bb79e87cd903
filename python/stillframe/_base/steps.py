"""Changes of directories as lists of steps, which the core takes with the interpreter lock let go
of once: beside a thread that computes, each call of the system costs 5 ms from here."""

from __future__ import annotations

import os
from collections.abc import Sequence

from stillframe import _core

Step = tuple[int, bytes, bytes]


def write(path: str, content: bytes, *, durable: bool) -> Step:
    """A new file, synced where it is to be durable."""
    return _core.STEP_WRITE_SYNCED if durable else _core.STEP_WRITE, os.fsencode(path), content


def sync(directory: str) -> Step:
    """Makes the entries of a directory durable, where its file system knows how."""
    return _core.STEP_SYNC, os.fsencode(directory), b""


def rename(old: str, new: str) -> Step:
    return _core.STEP_RENAME, os.fsencode(old), os.fsencode(new)


def unlink(path: str) -> Step:
    """A missing name is no error."""
    return _core.STEP_UNLINK, os.fsencode(path), b""


def take(steps: Sequence[Step]) -> None:
    """Takes them in their order.

    Raises:
        OSError: Of the first that fails; those behind it are not taken.
    """
    done, code = _core.take_steps(steps)
    if code:
        raise _error(code, steps[done])


def take_each(steps: Sequence[Step]) -> list[OSError]:
    """Takes them all, also those behind one that fails. Returns the errors."""
    errors = []
    while steps:
        done, code = _core.take_steps(steps)
        if code:
            errors.append(_error(code, steps[done]))
        steps = steps[done + 1 :]
    return errors


def _error(code: int, step: Step) -> OSError:
    return OSError(code, os.strerror(code), os.fsdecode(step[1]))


def names(directory: str) -> list[str]:
    """What stands in a directory.

    Raises:
        OSError: It cannot be listed.
    """
    found, code = _core.names(os.fsencode(directory))
    if code:
        raise OSError(code, os.strerror(code), directory)
    return [os.fsdecode(name) for name in found.split(b"\0")[:-1]]
