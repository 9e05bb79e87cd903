"""Starting threads, and the error when the system refuses one; errors.c raises it too."""

from __future__ import annotations

import errno
import threading

from stillframe._base.cpus import spread_thread


def refused() -> OSError:
    """Return the error for a thread that the system refused to start."""
    return OSError(
        errno.EAGAIN,
        "the system refused to start another thread: raise the limit on processes (ulimit -u, or"
        " the container's limit on pids), or run fewer threads and processes beside it",
    )


def start(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        OSError: The system refused to start it.
        RuntimeError: The thread was started before, or the interpreter is exiting: Python 3.12 and
            later then start no threads.
    """
    try:
        thread.start()
        spread_thread(thread)
    except RuntimeError:
        if thread.ident is None and threading.main_thread().is_alive():
            raise refused() from None
        raise
