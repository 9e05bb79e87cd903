"""Threads that the system may refuse, and the error that says so: the core's too (errors.c)."""

from __future__ import annotations

import errno
import sys
import threading

from stillframe._base.cpus import spread_thread
from stillframe.errors import StillframeError


def refused() -> OSError:
    """For a process that is given no thread more."""
    return OSError(
        errno.EAGAIN,
        "the system gives this process no thread more: raise the limit on processes (ulimit -u, or"
        " the container's limit on pids), or run fewer threads and processes beside it",
    )


def refuse_greenlets() -> None:
    """
    Raises:
        StillframeError: gevent or eventlet has put greenlets in the place of threads. One that
            waits in the core would stop all others, for ever.
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
    """
    Raises:
        OSError: The system has no thread to give.
        StillframeError: It would be a greenlet.
        RuntimeError: The thread was started before, or the interpreter's exit has begun: Python
            3.12 and later start none then.
    """
    refuse_greenlets()
    try:
        thread.start()
        spread_thread(thread)
    except RuntimeError:
        if thread.ident is None and threading.main_thread().is_alive():
            raise refused() from None
        raise
