"""How a save ended: its report or error, and the futures and callbacks to call then.

Each handle has an `Outcome`. The first thread that sees the save's end *settles* the outcome: it
records the report or the error. Then it notifies everyone who waits. If Ctrl-C interrupts the
notification, the next caller continues it.

An error is *collected* when somebody got it from the handle, from a future's result, or from
`wait_all`. An error that nobody collected is logged when its handle dies, or printed when the
process ends.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from typing import Any, NamedTuple, TypeVar

from stillframe._save import completion, ordered
from stillframe._save.options import OnDurable
from stillframe._save.report import SaveReport, measured

log = logging.getLogger("stillframe")

T = TypeVar("T")


class Failure:
    """The error of a save, and whether it was collected or logged."""

    __slots__ = ("collected", "error", "logged")

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.collected = False
        self.logged = False
        _failures.append(self)

    def collect(self) -> None:
        with contextlib.suppress(ValueError):  # the error was collected before
            _failures.remove(self)
        self.collected = True

    def log_if_uncollected(self, known_as: str) -> None:
        """Log the error, unless it was collected, or the exit will print it. `known_as` is the name
        for the save in the message."""
        if not (self.collected or self.logged or completion.thread.is_draining):
            self.logged = True
            log.error("stillframe: %s failed and nobody asked: %s", known_as, self.error)


# Errors that nobody has collected, in the order in which their saves ended.
_failures: list[Failure] = []


def take_uncollected_failures(*, first_only: bool) -> list[Failure]:
    """Collect the errors that nobody has collected, and return them, oldest first. With
    `first_only`, take only the oldest one."""
    taken: list[Failure] = []
    while _failures:
        failure = _failures.pop(0)
        failure.collected = True
        taken.append(failure)
        if first_only:
            break
    return taken


class CallbackThreadFuture(Future[Any]):
    """A future whose callbacks run on the callback thread, so that they do not delay the thread
    that resolves the future."""

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        if self.done():
            super().add_done_callback(fn)  # the save has ended: the callback is called at once
        else:
            super().add_done_callback(functools.partial(_call_on_callback_thread, fn))


class SaveFuture(CallbackThreadFuture):
    """A future of a handle. A call for its result collects the save's error.

    The future keeps its handle alive; the handle has only a weak reference to the future.

    Args:
        until_durable: The future is done when the save is durable. Otherwise it is done when the
            save is staged.
    """

    def __init__(self, handle: object, outcome: Outcome, until_durable: bool) -> None:
        super().__init__()
        self._handle = handle
        self._outcome = outcome
        self._until_durable = until_durable

    def _refuse_in_external_work(self) -> None:
        """Raise StillframeError if a wait for the future would wait for the calling thread's own
        external work. Staging does not wait for the log."""
        if self._until_durable and not self.done():
            ordered.refuse_in_external_work()

    def result(self, timeout: float | None = None) -> Any:
        self._refuse_in_external_work()
        try:
            return super().result(timeout)
        finally:
            if self.done():
                self._outcome.collect()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._refuse_in_external_work()
        error = super().exception(timeout)
        self._outcome.collect()
        return error


class _WeakFutures:
    """Weak references to a handle's futures for one event, its staging or its upload."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[SaveFuture]] = []

    def alive(self) -> list[SaveFuture]:
        """Return the futures that somebody still holds: one, or more if threads raced."""
        futures = [reference() for reference in list(self._references)]
        return [future for future in futures if future is not None]

    def first(self) -> SaveFuture | None:
        alive = self.alive()
        return alive[0] if alive else None

    def add(self, future: SaveFuture) -> SaveFuture:
        """Add a future. Return the first one alive, so that all threads get the same."""
        for reference in list(self._references):
            if reference() is None:
                with contextlib.suppress(ValueError):  # another thread has removed it
                    self._references.remove(reference)
        self._references.append(weakref.ref(future))
        return self.alive()[0]


class _SaveEnd(NamedTuple):
    """The end of a save. `value` is the result of the upload's future, usually the report."""

    report: SaveReport | None
    error: BaseException | None
    value: object


_NOT_ENDED = _SaveEnd(None, None, None)


class Outcome:
    """How one save ended, with the futures and callbacks to call then.

    There is no lock, because a signal handler may interrupt any method and use the outcome too.
    Instead, values that are set once are lists whose first element counts: `append` and `pop` are
    atomic.

    Args:
        given: The path as it was given, for `on_durable`.
        known_as: The name for the save in the log message about an error that nobody collected.

    Attributes:
        cancellable: Users can cancel the futures. That does not cancel the save.
    """

    cancellable = True

    def __init__(self, given: Any, on_durable: OnDurable | None, known_as: str = "a save") -> None:
        self._known_as = known_as
        self._given = given
        self._ends: list[_SaveEnd] = []
        self._failures: list[Failure] = []
        # The error of the copy, or None if it succeeded; empty before the copy has ended.
        self._copy_errors: list[BaseException | None] = []
        self._notified = False
        self._on_durable = [] if on_durable is None else [on_durable]  # `notify` pops it
        self._wakers: list[Callable[[], object]] = []  # to be called on the settling thread
        self._callbacks: list[Callable[[], object]] = []  # to be called on the callback thread
        self._staging, self._upload = _WeakFutures(), _WeakFutures()

    def __del__(self) -> None:
        failure = getattr(self, "_failure", None)  # missing if `__init__` was interrupted
        if failure is not None:
            failure.log_if_uncollected(self._known_as)

    @property
    def settled(self) -> bool:
        """Whether the save has ended; `report` and `error` say how."""
        return bool(self._ends)

    @property
    def report(self) -> SaveReport | None:
        """The report; None if the save failed or was skipped."""
        return self._end.report

    @property
    def error(self) -> BaseException | None:
        """The error; None if the save did not fail."""
        return self._end.error

    @property
    def _end(self) -> _SaveEnd:
        return self._ends[0] if self._ends else _NOT_ENDED

    @property
    def _failure(self) -> Failure | None:
        return self._failures[0] if self._failures else None

    def settle(
        self,
        report: SaveReport | None,
        error: BaseException | None,
        *,
        value: object = None,
        is_known: bool = False,
    ) -> None:
        """Record that the save has ended; the first call counts.

        Args:
            report: None after an error, and for a skipped save.
            error: None if the save did not fail.
            value: The result of the upload's future; None stands for the report.
            is_known: The caller has the error already, so the error counts as collected.
        """
        if self.settled:
            return
        is_known = is_known or isinstance(error, CancelledError)  # known to the code that cancelled
        if error is not None and not is_known and not self._failures:
            self._failures.append(Failure(error))
            # Another thread may have appended its own. Only the first one stays uncollected.
            for duplicate in self._failures[1:]:
                duplicate.collect()
            if completion.thread.drain_is_over:  # the exit no longer prints errors, so log it now
                self._failures[0].log_if_uncollected("a save")
        end = _SaveEnd(report, error, report if value is None else value)
        self._ends.append(end)
        if report is not None and self._ends[0] is end:  # no other thread was first
            measured.append((report.nbytes, report.durable_after_s))

    def notify(self) -> None:
        """Resolve the futures, wake the threads that wait for the end and run the callbacks. May be
        called again."""
        if self._notified:
            return
        end = self._end
        for futures, value in ((self._staging, None), (self._upload, end.value)):
            for future in futures.alive():
                _resolve(future, end.error, value)
        report, on_durable = end.report, _pop_first(self._on_durable)  # only one thread gets it
        if on_durable is not None and report is not None:
            completion.callbacks.put(lambda: on_durable(self._given, report))
        while (waker := _pop_first(self._wakers)) is not None:
            waker()
        while (function := _pop_first(self._callbacks)) is not None:
            completion.callbacks.put(function)
        self._notified = True

    def notify_staged(self, error: BaseException | None = None) -> None:
        """Resolve the futures of staging, because the copy has ended. The first call counts."""
        if not self._copy_errors:
            self._copy_errors.append(error)
        for future in self._staging.alive():
            _resolve(future, self._copy_errors[0], None)

    def call_at_end(self, function: Callable[[], object]) -> bool:
        """Have `function()` called on the callback thread. Return False if the save has ended."""
        return self._add(self._callbacks, function)

    def call_directly_at_end(self, function: Callable[[], object]) -> bool:
        """Have `function()` called on the settling thread. Return False if the save has ended. The
        function must not wait or raise."""
        return self._add(self._wakers, function)

    def _add(self, functions: list[Callable[[], object]], function: Callable[[], object]) -> bool:
        """Append a function that `notify` will call. Return False if the save has ended already:
        then nobody calls it."""
        functions.append(function)
        # The check comes after the append: either it sees that a thread has settled the save, or
        # `notify` finds the function.
        if not self.settled:
            return True
        try:
            functions.remove(function)
        except ValueError:  # `notify` has taken the function and calls it
            return True
        return False

    def cancel_direct_call(self, function: Callable[[], object]) -> None:
        with contextlib.suppress(ValueError):  # the function was called already
            self._wakers.remove(function)

    def staging_future(self, handle: object, is_staged: Callable[[], bool]) -> SaveFuture:
        """Return the future of staging, always the same while somebody holds it."""
        existing = self._staging.first()
        if existing is not None:
            return existing
        future = self._staging.add(self._new_future(handle, until_durable=False))
        if self._copy_errors:
            _resolve(future, self._copy_errors[0], None)
        elif self.settled or is_staged():
            _resolve(future, self.error, None)
        return future

    def upload_future(self, handle: object) -> SaveFuture:
        """Return the future of the report, always the same while somebody holds it."""
        existing = self._upload.first()
        if existing is not None:
            return existing
        future = self._upload.add(self._new_future(handle, until_durable=True))
        if self.settled:
            _resolve(future, self.error, self._end.value)
        return future

    def _new_future(self, handle: object, *, until_durable: bool) -> SaveFuture:
        future = SaveFuture(handle, self, until_durable)
        if not self.cancellable:
            future.set_running_or_notify_cancel()  # a running future refuses `cancel`
        return future

    def take_uncollected(self) -> BaseException | None:
        """Return the error if nobody has collected it, and collect it."""
        failure = self._failure
        if failure is None or failure.collected:
            return None
        failure.collect()
        return failure.error

    def collect(self) -> None:
        if self._failure is not None:
            self._failure.collect()

    def is_error_collected(self) -> bool:
        return self._failure is not None and self._failure.collected


def _call_on_callback_thread(
    function: Callable[[Future[Any]], object], future: Future[Any]
) -> None:
    """Have `function(future)` called on the callback thread."""
    completion.callbacks.put(functools.partial(function, future))


def _pop_first(functions: list[T]) -> T | None:
    """Remove and return the first function, in one atomic operation; None if there is none."""
    try:
        return functions.pop(0)
    except IndexError:
        return None


def _resolve(future: SaveFuture, error: BaseException | None, value: object) -> None:
    with contextlib.suppress(InvalidStateError):  # resolved already, or cancelled by its user
        if isinstance(error, CancelledError):
            future.cancel()
        elif error is None:
            future.set_result(value)
        else:
            future.set_exception(error)


def _reset_in_forked_child() -> None:
    for failure in _failures:
        failure.collected = True  # the parent process reports it
    _failures.clear()


os.register_at_fork(after_in_child=_reset_in_forked_child)
