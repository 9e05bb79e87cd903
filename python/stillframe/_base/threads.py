"""Starts threads, also at most once for many callers (`RunOnceThread`)."""

from __future__ import annotations

import errno
import sys
import threading
import time
from collections.abc import Callable

from stillframe._base.cpus import spread_thread
from stillframe._base.event import Event
from stillframe.errors import StillframeError


def thread_refused_error() -> OSError:
    """Return the error for a thread that the system refused to start, also for the core's threads
    (csrc/python/errors.c)."""
    return OSError(
        errno.EAGAIN,
        "the system refused to start another thread: raise the limit on processes (ulimit -u, or"
        " the container's limit on pids), or run fewer threads and processes",
    )


def refuse_greenlets() -> None:
    """Raise StillframeError if gevent or eventlet has replaced threads by greenlets. A greenlet
    that waits in the core would stop all other greenlets forever."""
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
        StillframeError: The thread would be a greenlet.
        RuntimeError: The thread was started before, or the interpreter is exiting (Python 3.12 and
            later).
    """
    refuse_greenlets()
    try:
        thread.start()
        spread_thread(thread)
    except RuntimeError:
        was_not_started = thread.ident is None
        is_exiting = not threading.main_thread().is_alive()
        if was_not_started and not is_exiting:
            raise thread_refused_error() from None
        raise


class RunOnceThread:
    """A daemon thread that runs a function once, however many callers start it at the same time.

    Two callers may start a thread each. The first of these threads becomes the *owner* and runs the
    function; the other ends at once. A lock could not prevent that: a signal handler may interrupt
    the thread that holds the lock, and wait for a thread that wants the lock.
    """

    def __init__(self, target: Callable[[], object], name: str) -> None:
        self._target = target
        self._name = name
        # {"owner": the thread that runs `target`}, or {"owner": None} after `prevent`. A dict,
        # because `dict.setdefault` is atomic.
        self._owner: dict[str, threading.Thread | None] = {}
        self._has_owner = Event()
        self.is_started = False  # a thread was started, which may not have called `target` yet

    def start(self) -> bool:
        """Start the thread, unless it was started or prevented. Return False if the exiting
        interpreter starts no threads. Errors are those of the function `start`."""
        if not self._owner:  # no thread is the owner, and `prevent` was not called
            try:
                start(threading.Thread(target=self._run, name=self._name, daemon=True))
            except RuntimeError:
                return bool(self._owner)  # True if another caller's thread is the owner now
            self.is_started = True
        return True

    def _run(self) -> None:
        """Run the function, unless another thread is the owner."""
        thread = threading.current_thread()
        if self._owner.setdefault("owner", thread) is thread:
            self._has_owner.set()
            self._target()

    def is_current(self) -> bool:
        """Return whether the caller runs on this thread."""
        return self._owner.get("owner") is threading.current_thread()

    def prevent(self) -> bool:
        """Prevent the function from running. Return False if it has begun to run."""
        owner = self._owner.setdefault("owner", None)  # None: no thread can be the owner any more
        return owner is None

    def is_alive(self) -> bool:
        """Return whether the thread was started and has not ended."""
        thread = self._owner.get("owner")
        if thread is not None:
            return thread.is_alive()
        return self.is_started and not self._owner  # started, but not the owner yet

    def join(self, timeout: float | None = None) -> None:
        """Wait at most `timeout` seconds until the thread has ended. Call this only if the thread
        was started and not prevented."""
        begin_s = time.monotonic()
        if not self._has_owner.wait(timeout):
            return
        thread = self._owner["owner"]
        if thread is not None:
            spent_s = time.monotonic() - begin_s
            thread.join(None if timeout is None else max(0.0, timeout - spent_s))
