"""The two threads of the package that run Python: completion and callbacks.

The core's threads never call the interpreter. They post notices for the completion thread:
- The last byte of a save is copied: the thread gives the verdict on tensor versions and drops the
  sources.
- A save has ended: the thread *settles* the handle, which means that it records the result.

Users' callbacks run on a second thread, so a callback that hangs delays only other callbacks. Both
are daemon threads. They start with the first save of a process, and again in a forked child that
saves. The exit of the interpreter begins with the *drain*, in which `exit.py` waits until all saves
and removes have ended.

    running ──exit begins──▶ draining ──the threads have ended──▶ over

During the drain, only the callback thread and the thread that runs the exit handlers may save.
After the drain, exit handlers may still save. Such a call waits for its save's end and runs its
callbacks itself. If an exit handler makes the first save of a process, the state may be "over" from
the start: from Python 3.12 on, no thread can start then.

In a child of multiprocessing, other threads of the program still run during the drain. Their saves
wait until the drain is over, and then run as those of exit handlers do.
"""

from __future__ import annotations

import contextlib
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

_MEMORY_PAUSE_S = 0.01  # the pause after a MemoryError, before the next try
_DRAIN_POLL_S = 0.01  # between two checks whether the drain is over


class InFlightHandle(Protocol):
    """The interface of the handles in `in_flight`."""

    @property
    def path(self) -> str: ...
    @property
    def state(self) -> str: ...
    def done(self) -> bool: ...
    def cancel(self) -> bool: ...
    def progress(self) -> tuple[int, int]: ...


# Saves that have not ended, by the number of the ticket. A save without a ticket has a number from
# `numbers`. The package keeps no other strong reference to a handle.
in_flight: dict[int, InFlightHandle] = {}


class SaveWithTicket(Protocol):
    """A save that has a ticket: the core posts notices about it."""

    def on_copy_ended(self) -> None: ...

    def settle(self) -> None: ...


class Copying(Protocol):
    """A snapshot whose deferred bytes are still being copied."""

    def on_copy_ended(self) -> None: ...


# Numbers for saves without a ticket. They are negative, and a ticket's number never is.
numbers = itertools.count(-1, -1)

# Snapshots that are still being copied, by the number that the core gave them.
copying: dict[int, Copying] = {}


class _CallbackThread:
    """The thread on which callbacks run one after the other. `put` takes no lock, because a signal
    handler may interrupt it."""

    def __init__(self) -> None:
        # None in the queue ends the thread.
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threads.RunOnceThread(self._run, "sf-callbacks")
        self._finished = False  # the thread has ended

    def put(self, function: Callable[[], object]) -> None:
        """Have the thread call a function. Call it here if the thread has ended."""
        self._queue.put(function)
        if not self._finished:
            try:
                self._thread.start()  # starts none at exit; then `finish` calls the function
            except OSError as error:
                log.warning("stillframe: callbacks wait for a thread: %s", error)
        if self._finished:
            self._run_queued_functions()

    def _run(self) -> None:
        while (function := self._queue.get()) is not None:
            self._call(function, BaseException)
            del function  # frees its save before the next function comes

    def _run_queued_functions(self) -> None:
        """Run on this thread the functions that are left in the queue."""
        with contextlib.suppress(queue.Empty):
            while True:
                function = self._queue.get_nowait()
                if function is not None:
                    self._call(function, Exception)

    def _call(self, function: Callable[[], object], caught: type[BaseException]) -> None:
        """Call a function, and log an exception of the type `caught`. On the callback thread this
        is BaseException, because sys.exit() in a callback would end the thread."""
        try:
            function()
        except caught:
            log.exception("stillframe: a callback failed")

    def is_current(self) -> bool:
        return self._thread.is_current()

    def finish(self) -> None:
        """Wait until all queued functions have run, and end the thread. If the thread never
        started, run the functions here. May be called again after an interrupt."""
        has_begun = not self._thread.prevent()
        if has_begun:
            self._queue.put(None)
            self._thread.join()
        self._finished = True
        self._run_queued_functions()


class _CompletionThread:
    """The completion thread: it takes notices of the core and settles saves.

    Attributes:
        drain_is_over: The exit has waited for all saves (the drain), or the thread could not start
            because the interpreter was exiting. Each later call waits for its own save.
    """

    def __init__(self) -> None:
        self._thread = threads.RunOnceThread(_process_notices, "sf-completion")
        self._exit_thread: threading.Thread | None = None  # the thread that runs the drain
        self._threads_go_on = False  # other threads may save after the drain; see `begin_exit`
        self.drain_is_over = False

    def start(self, *, under_way: bool = False) -> None:
        """Start the thread unless it runs. Every save and remove calls this first.

        Args:
            under_way: The caller is part of a save that had begun before the exit. So it may save
                during the drain, in which the exit waits for saves.

        Raises:
            StillframeError: The interpreter is exiting, and this thread may not save any more.
            OSError: The system refused to start another thread.
        """
        is_exit_thread = self._exit_thread is threading.current_thread()
        may_save_during_drain = is_exit_thread or callbacks.is_current() or under_way
        if self._exit_thread is not None and not may_save_during_drain:
            if not self._threads_go_on:
                raise StillframeError("the interpreter is exiting: no more saves and removes")
            while not self.drain_is_over:  # wait for the end of the drain
                time.sleep(_DRAIN_POLL_S)
        if self.drain_is_over:
            return
        if not self._thread.start():  # the exiting interpreter starts no thread
            self.drain_is_over = True  # so the caller waits for its own save

    @property
    def is_exiting(self) -> bool:
        return self._exit_thread is not None or self.drain_is_over

    @property
    def is_draining(self) -> bool:
        """Return whether the exit waits for saves now. It prints uncollected errors later."""
        return self._exit_thread is not None and not self.drain_is_over

    def begin_exit(self, *, threads_go_on: bool = False) -> None:
        """Begin the drain, in which the exit waits for saves. If `threads_go_on`, other threads
        may save after it."""
        self._threads_go_on = threads_go_on
        self._exit_thread = threading.current_thread()

    def stop(self) -> None:
        """End the drain: settle the saves that have ended, and end the thread for good."""
        self.drain_is_over = True
        _core.notice_stop()
        never_ran = self._thread.prevent()
        if never_ran:
            _process_notices()  # here, in place of the thread
        else:
            self._thread.join()


def _process_notices() -> None:
    while True:
        try:
            try:
                if not _process_next_notice():
                    return
            except Exception:
                log.exception("stillframe: settling a save failed")
        except MemoryError:
            pass  # logging had no memory; the thread must go on


def _next_notice() -> tuple[int, int, str]:
    """Wait for a notice. Return its kind, the number of its save or snapshot, and its text."""
    while True:
        try:
            return _core.notice_wait()
        except MemoryError:  # the core keeps the notice
            time.sleep(_MEMORY_PAUSE_S)


def _process_next_notice() -> bool:
    """Wait for a notice and act on it; return False when there will be no more."""
    kind, number, text = _next_notice()
    if kind == _core.NOTICE_STOP:
        return False
    if kind == _core.NOTICE_TEXT:
        log.warning("stillframe: %s", text)
    elif kind == _core.NOTICE_SNAPSHOT:
        snapshot = copying.pop(number, None)
        if snapshot is not None:
            snapshot.on_copy_ended()
    else:  # the other kinds come from tickets
        handle = cast(SaveWithTicket | None, in_flight.get(number))
        if handle is None:
            pass  # the call raised before the launch, and removed the handle
        elif kind == _core.NOTICE_COPIED:
            handle.on_copy_ended()
        else:  # the save has ended
            handle.settle()  # also removes the save from `in_flight`
    return True


thread = _CompletionThread()
callbacks = _CallbackThread()


def _reset_in_forked_child() -> None:
    global thread, callbacks
    thread = _CompletionThread()
    callbacks = _CallbackThread()
    in_flight.clear()
    copying.clear()


os.register_at_fork(after_in_child=_reset_in_forked_child)
