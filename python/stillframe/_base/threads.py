"""Starting threads, and the error when the system refuses one; errors.c raises it too."""

from __future__ import annotations

import errno
import sys
import threading

from stillframe._base.cpus import spread_thread
from stillframe.errors import StillframeError


def refused() -> OSError:
    """Return the error for a thread that the system refused to start."""
    return OSError(
        errno.EAGAIN,
        "the system refused to start another thread: raise the limit on processes (ulimit -u, or"
        " the container's limit on pids), or run fewer threads and processes",
    )


def refuse_greenlets() -> None:
    """Refuse to work where threads are greenlets.

    A greenlet that waits in the core would stop all others forever.

    Raises:
        StillframeError: gevent or eventlet has replaced threads by greenlets.
    """
    gevent = sys.modules.get("gevent.monkey")
    if gevent is not None and gevent.is_module_patched("threading"):
        raise StillframeError(
            "gevent has replaced Python's threads by greenlets, and stillframe needs real ones:"
            " call gevent.monkey.patch_all(thread=False, queue=False)"
        )
    eventlet = sys.modules.get("eventlet.patcher")
    if eventlet is not None and eventlet.is_monkey_patched("thread"):
        raise StillframeError(
            "eventlet has replaced Python's threads by greenlets, and stillframe needs real ones:"
            " call eventlet.monkey_patch(thread=False)"
        )


def start(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        OSError: The system refused to start it.
        StillframeError: It would be a greenlet.
        RuntimeError: The thread was started before, or the interpreter is exiting: Python 3.12 and
            later then start no threads.
    """
    refuse_greenlets()
    try:
        thread.start()
        spread_thread(thread)
    except RuntimeError:
        if thread.ident is None and threading.main_thread().is_alive():
            raise refused() from None
        raise
