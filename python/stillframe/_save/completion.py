"""The two threads of the package that run Python: completion and callbacks.

The core's lane, writers and log never touch the interpreter. What they have to say comes as
notices, which the completion thread takes: it gives the verdict on tensor versions once the last
byte is copied, lets go of the sources, and settles the handle when a save has ended. Users'
callbacks run on a second thread, so that one that saves, waits or hangs holds up nobody but other
callbacks.

Both are daemon threads, started with the first save of a process and again in a forked child that
saves. They end with the interpreter:

    running ──exit begins──▶ draining ──the threads have ended──▶ over

While it drains, only the thread that runs the exit handlers and the callback thread may save. When
it is over, exit handlers may still: nobody would settle such a save later, so it is waited for in
the call, and its callbacks run there and then. It is over from the start where an exit handler
makes the first save of a process under Python 3.12 or later, which starts no thread by then.

A child of multiprocessing drains while other threads of the program still run: Python joins them
later. Their saves wait until the drain is over, and then run like those of exit handlers.

A save without deferred bytes needs no verdict of Python's: it is staged when its call returns,
and this thread is not woken for it.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol, cast

from stillframe import _core
from stillframe._base import threads
from stillframe.errors import StillframeError

log = logging.getLogger("stillframe")

_MEMORY_S = 0.01  # until it is asked for once more
_DRAIN_POLL_S = 0.01


class InFlight(Protocol):
    """A handle, as those see it who look at all saves that have not ended."""

    @property
    def path(self) -> str: ...
    @property
    def state(self) -> str: ...
    def done(self) -> bool: ...
    def cancel(self) -> bool: ...


# Saves that have not ended, by their ticket's number: the only strong reference the package keeps
# to a handle.
in_flight: dict[int, InFlight] = {}


class Noticed(Protocol):
    """A save that has a ticket."""

    def after_copy(self) -> None: ...

    def settle(self) -> None: ...


class Copying(Protocol):
    """A snapshot whose lane has not ended."""

    def after_copy(self) -> None: ...


# Numbers of those without a ticket: below zero, where no ticket's is.
numbers = itertools.count(-1, -1)

# Those, by their core snapshot's number.
copying: dict[int, Copying] = {}


def start_once(thread: threading.Thread) -> bool:
    """Starts `thread` unless that was done. A signal handler that saves may find one that the call
    it interrupted was about to start, and needs it.

    Returns:
        False when the interpreter's exit has begun: Python 3.12 and later start no thread then.

    Raises:
        OSError: The system has no thread to give.
    """
    if thread.ident is None:
        try:
            threads.start(thread)
        except RuntimeError:
            return thread.ident is not None  # the handler was first
    return True


class _Callbacks:
    """Runs functions one after the other on a thread of their own."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()
        self._over = False

    def put(self, function: Callable[[], object]) -> None:
        with self._lock:
            if not self._over:
                self._queue.put(function)
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, args=(BaseException,), name="sf-callbacks", daemon=True
                    )
                try:
                    start_once(self._thread)  # where it is too late, finish() does the work
                except OSError as error:
                    log.warning("stillframe: callbacks wait for a thread: %s", error)
                return
        self._call(function, Exception)

    def _run(self, caught: type[BaseException]) -> None:
        while (function := self._queue.get()) is not None:
            self._call(function, caught)

    def _call(self, function: Callable[[], object], caught: type[BaseException]) -> None:
        """`caught`: on the thread everything, since sys.exit() would end it, without a word, and
        with it all later callbacks."""
        try:
            function()
        except caught:
            log.exception("stillframe: a callback failed")

    def is_current(self) -> bool:
        return self._thread is threading.current_thread()

    def finish(self) -> None:
        """Runs what is queued, here if it has no thread, and ends the thread; what is put later
        runs where it is put. May be called again when it was interrupted."""
        with self._lock:
            if not self._over:
                self._over = True
                self._queue.put(None)
        if self._thread is None:
            return
        if self._thread.ident is None:
            self._run(Exception)
        else:
            self._thread.join()


class _Completion:
    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()
        self._exiting: threading.Thread | None = None
        self._threads_go_on = False  # others may save when the drain is over
        self.over = False

    def start(self, *, under_way: bool = False) -> None:
        """Before every save and remove.

        Args:
            under_way: It is a part of a save that the exit waits for.

        Raises:
            StillframeError: The interpreter is exiting, and this thread is none that may save now.
            OSError: The system has no thread to give.
        """
        mine = self._exiting is threading.current_thread() or callbacks.is_current()
        if self._exiting is not None and not (mine or under_way):
            if not self._threads_go_on:
                raise StillframeError("the interpreter is exiting: no more saves and removes")
            while not self.over:
                time.sleep(_DRAIN_POLL_S)
        if self.over:
            return
        if self._thread is not None and self._thread.ident is not None:
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_take_notices, name="sf-completion", daemon=True
                )
            if not start_once(self._thread):
                self._thread = None
                self.over = True

    @property
    def exiting(self) -> bool:
        return self._exiting is not None or self.over

    @property
    def draining(self) -> bool:
        """The exit has begun, and has yet to say what failed."""
        return self._exiting is not None and not self.over

    def begin_exit(self, *, threads_go_on: bool = False) -> None:
        """
        Args:
            threads_go_on: Threads of the program run on behind this, and may save.
        """
        self._threads_go_on = threads_go_on
        self._exiting = threading.current_thread()

    def stop(self) -> None:
        """Settles what has ended and ends the thread for good."""
        self.over = True
        if self._thread is not None and self._thread.ident is not None:
            _core.notice_stop()
            self._thread.join()


def _take_notices() -> None:
    while True:
        try:
            try:
                if not _take_notice():
                    return
            except Exception:
                log.exception("stillframe: settling a save failed")
        except MemoryError:
            pass  # the log had none either: this thread outlives that


def _next_notice() -> tuple[int, int, str]:
    while True:
        try:
            return _core.notice_wait()
        except MemoryError:  # it keeps what it had to say
            time.sleep(_MEMORY_S)


def _take_notice() -> bool:
    """False when there will be no more."""
    what, number, sentence = _next_notice()
    if what == _core.NOTICE_STOP:
        return False
    if what == _core.NOTICE_TEXT:
        log.warning("stillframe: %s", sentence)
    elif what == _core.NOTICE_SNAPSHOT:
        snapshot = copying.pop(number, None)
        if snapshot is not None:
            snapshot.after_copy()
    else:  # only tickets have such notices
        handle = cast(Noticed | None, in_flight.get(number))
        if handle is None:
            pass  # given up in the call
        elif what == _core.NOTICE_COPIED:
            handle.after_copy()
        else:
            handle.settle()  # and only then it leaves in_flight: wait_all looks there
    return True


completion = _Completion()
callbacks = _Callbacks()


def _forked() -> None:
    """In the child: the threads do not exist here and the saves are the parent's."""
    global completion, callbacks
    completion = _Completion()
    callbacks = _Callbacks()
    in_flight.clear()
    copying.clear()


os.register_at_fork(after_in_child=_forked)
