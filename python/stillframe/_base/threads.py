"""Starting threads, and the error when the system refuses to start a thread."""

from __future__ import annotations

import errno
import sys
import threading
import time
from collections.abc import Callable

from stillframe._base.cpus import spread_thread
from stillframe._base.event import Event
from stillframe.errors import StillframeError


def refused() -> OSError:
    """Return the error for a thread that the system refused to start. errors.c raises the same one
    for the core's threads."""
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
        StillframeError: The thread would be a greenlet.
        RuntimeError: The thread was started before, or the interpreter is exiting: Python 3.12 and
            later then start no threads.
    """
    refuse_greenlets()
    try:
        thread.start()
        spread_thread(thread)
    except RuntimeError:
        # The thread was not started, although the interpreter is not exiting: the system refused.
        if thread.ident is None and threading.main_thread().is_alive():
            raise refused() from None
        raise


class SingleThread:
    """A daemon thread that runs a function once, however many callers start it at the same time.

    `Thread.start` does not allow that: two callers at the same time can start one `Thread` object
    twice. A lock does not help, because a signal handler may interrupt the thread that holds the
    lock, and wait for another thread that wants it. So every caller starts a thread, unless one
    runs the function already. The first of these threads becomes the *owner* and runs the function,
    and the others end at once.

    Args:
        target: The function.
        name: The name of the thread.

    Attributes:
        is_started: The system has started a thread, which may not have called the function yet.
    """

    def __init__(self, target: Callable[[], object], name: str) -> None:
        self._target = target
        self._name = name
        # Under "owner", the thread that runs `target`, or None if no thread ever will. A dict,
        # because `dict.setdefault` is atomic.
        self._owner: dict[str, threading.Thread | None] = {}
        self._has_owner = Event()
        self.is_started = False

    def start(self) -> bool:
        """Start the thread, unless it was started or prevented.

        Returns:
            False when the interpreter's exit has begun: Python 3.12 and later start no thread then.

        Raises:
            OSError, StillframeError: As the function `start`.
        """
        if not self._owner:
            try:
                start(threading.Thread(target=self._run, name=self._name, daemon=True))
            except RuntimeError:
                return bool(self._owner)  # another caller may have started the thread meanwhile
            self.is_started = True
        return True

    def _run(self) -> None:
        thread = threading.current_thread()
        if self._owner.setdefault("owner", thread) is thread:
            self._has_owner.set()
            self._target()

    def is_current(self) -> bool:
        """Return whether the caller runs on this thread."""
        return self._owner.get("owner") is threading.current_thread()

    def prevent(self) -> bool:
        """Prevent the function from running. Return False if it has begun to run."""
        return self._owner.setdefault("owner", None) is None

    def is_alive(self) -> bool:
        """Return whether the thread was started, and has not ended."""
        thread = self._owner.get("owner")
        if thread is not None:
            return thread.is_alive()
        return self.is_started and not self._owner  # it has not called the function yet

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended, at most `timeout` seconds. Call this only if the thread
        was started and not prevented."""
        begin_s = time.monotonic()
        if self._has_owner.wait(timeout) and (thread := self._owner["owner"]) is not None:
            spent_s = time.monotonic() - begin_s
            thread.join(None if timeout is None else max(0.0, timeout - spent_s))
