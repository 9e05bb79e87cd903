"""Threads that the system may refuse, and the error that says so: the core's too (errors.c)."""

from __future__ import annotations

import errno
import threading

from stillframe._base.cpus import spread_thread


def refused() -> OSError:
    """For a process that is given no thread more."""
    return OSError(
        errno.EAGAIN,
        "the system refused to start another thread: raise the limit on processes (ulimit -u, or"
        " the container's limit on pids), or run fewer threads and processes beside it",
    )


def start(thread: threading.Thread) -> None:
    """
    Raises:
        OSError: The system has no thread to give.
        RuntimeError: The thread was started before, or the interpreter's exit has begun: Python
            3.12 and later start none then.
    """
    try:
        thread.start()
        spread_thread(thread)
    except RuntimeError:
        if thread.ident is None and threading.main_thread().is_alive():
            raise refused() from None
        raise
