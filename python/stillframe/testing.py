"""Helpers for tests: make the system calls under a save fail, fall short, or take their time.

The C core makes every call for files, memory, threads and time through one table. Inside a
``with fault(...)`` or ``with slow(...)`` block, wrappers in that table count the calls and do to
them what the block says; outside they pass everything on.

    with fault("fdatasync", err=errno.EIO) as injected:
        with pytest.raises(stillframe.SaveError):
            stillframe.save(state, path)
    assert injected.hits == 1

Calls are named as in ``csrc/core/sys.h``: "open", "close", "pread", "pwrite", "fdatasync", "fsync",
"fallocate", "flock", "set_flags", "fstat", "lstat", "rename", "unlink", "rmdir", "opendir", "mmap",
"munmap", "mprotect", "madvise", "malloc", "calloc", "realloc", "thread_create", "set_nice", and
"*" for any of these. "readdir", "closedir", "free", "thread_join", "clock_gettime" and the copies
of tensor bytes, "capture_copy" (inside the call) and "lane_copy" (after it), can only be slow.

Faults belong to the process, not to a thread. Blocks nest; up to 16 faults act at a time. Enter
the first one while no save is in flight: it exchanges the table.
"""

import errno as _errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from stillframe import _core

__all__ = ["Injected", "fault", "slow"]

_LIMITS = {"half": -2, "all but one": -3}
_lock = threading.Lock()
_depth = 0


class Injected:
    """What has happened since the outermost block was entered."""

    @property
    def hits(self) -> int:
        """How often a fault, of any block, has acted."""
        return _core.inject_hits()

    def calls(self, call: str = "*") -> int:
        """How often a call was made, failed ones included; "*" counts all that can fail.

        An unknown name counts 0.
        """
        return _core.inject_calls(call)


@contextmanager
def _injected(
    call: str, nth: int, sticky: bool, err: int, limit: int, delay_ns: int
) -> Iterator[Injected]:
    global _depth
    with _lock:
        _core.inject_install()
        if _depth == 0:
            _core.inject_clear()
        _core.inject_set(call, nth, sticky, err, limit, delay_ns)
        _depth += 1
    try:
        yield Injected()
    finally:
        with _lock:
            _core.inject_drop(call, nth, sticky, err, limit, delay_ns)
            _depth -= 1


@contextmanager
def fault(
    call: str,
    *,
    nth: int = 1,
    sticky: bool = False,
    err: int = _errno.EIO,
    limit: int | str | None = None,
) -> Iterator[Injected]:
    """Inside the block, makes the `nth` call (counted from 1 at its entry) fail with `err`.

    Args:
        call: which call, see the module.
        nth: which of its calls from now on.
        sticky: also every later one.
        err: the errno it fails with. A failed call has done nothing, but for "close".
        limit: instead of failing, "pread" and "pwrite" transfer at most that many bytes, or
            "half", or "all but one" of those asked for; `err` is then not used. 0 transfers none
            and reports no error.

    Raises:
        ValueError: an unknown call, one that cannot fail, `nth` below 1 or a `limit` that is none.
        RuntimeError: more than 16 faults at a time.
    """
    if nth < 1:
        raise ValueError(f"nth counts from 1, got {nth}")
    if isinstance(limit, str):
        if limit not in _LIMITS:
            raise ValueError(f"limit is a number of bytes, 'half' or 'all but one', got {limit!r}")
        nr_bytes = _LIMITS[limit]
    elif limit is None:
        if err <= 0:
            raise ValueError(f"err is an errno, got {err}")
        nr_bytes = -1
    else:
        if limit < 0:
            raise ValueError(f"limit is a number of bytes, got {limit}")
        nr_bytes = limit
    if limit is not None and call not in ("pread", "pwrite"):
        raise ValueError(f"only 'pread' and 'pwrite' can fall short, not {call!r}")
    with _injected(call, nth, sticky, 0 if limit is not None else err, nr_bytes, 0) as injected:
        yield injected


@contextmanager
def slow(call: str, seconds: float, *, nth: int = 1, sticky: bool = True) -> Iterator[Injected]:
    """Inside the block, the `nth` call and (with `sticky`) every later one sleeps first.

    Args:
        call: which call, see the module; here all of them will do.
        seconds: how long each sleeps. Leaving the block does not cut short a sleep that has begun.
        nth: which of its calls from now on, counted from 1.
        sticky: also every later one.

    Raises:
        ValueError: an unknown call, `nth` below 1, or `seconds` below 0.
        RuntimeError: more than 16 faults at a time.
    """
    if nth < 1:
        raise ValueError(f"nth counts from 1, got {nth}")
    if seconds < 0:
        raise ValueError(f"seconds must not be negative, got {seconds}")
    with _injected(call, nth, sticky, 0, -1, round(seconds * 1e9)) as injected:
        yield injected
