"""`SaveHandle`, what `async_save` returns, and `SaveReport`, what its `result()` returns.

A handle looks at its ticket in the core for everything that changes; it keeps only what Python has
to add: the verdict on tensor versions, futures, callbacks, and whether somebody has seen its error.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

from stillframe import _core
from stillframe._base import device as _device
from stillframe._base.calls import inside
from stillframe._save import completion, gate, ordered
from stillframe._tree.skeleton import Skeleton
from stillframe.errors import (
    PoolExhaustedError,
    SaveError,
    StillframeError,
    TornSnapshotError,
)

log = logging.getLogger("stillframe")

_FINAL = ("durable", "failed", "cancelled")


@dataclass(frozen=True)
class SaveReport:
    """What a save did. Times are seconds from the call's entry, sizes are bytes.

    Attributes:
        path: The path as it was given.
        nbytes: Length of the file.
        num_tensors: Distinct tensor objects in the saved tree.
        captured_nbytes: Bytes copied inside the call, the pickled skeleton included.
        deferred_nbytes: Bytes copied after the call returned, held still by the gate.
        blocked_s: How long the call took.
        gate_wait_s: How long optimizer steps waited for this save's copies.
        backpressure_s: Of `blocked_s`, the wait for a slot (`max_in_flight`) or for blocks of the
            pool.
        staged_after_s: When every byte was copied and both detectors had passed.
        durable_after_s: When the file was durable (with `durable=False`: in place).
        peak_pool_bytes: Most pool memory the save held at one time.
        io_mode: "direct" (O_DIRECT), "buffered", or "fsspec".
        fallbacks: One sentence for each thing that did not go the best way.
    """

    path: str
    nbytes: int
    num_tensors: int
    captured_nbytes: int
    deferred_nbytes: int
    blocked_s: float
    gate_wait_s: float
    backpressure_s: float
    staged_after_s: float
    durable_after_s: float
    peak_pool_bytes: int
    io_mode: str
    fallbacks: tuple[str, ...] = ()


class _Failure:
    """An error of a save, until somebody has seen it."""

    __slots__ = ("collected", "error", "path")

    def __init__(self, path: str, error: BaseException) -> None:
        self.path = path
        self.error = error
        self.collected = False


# Errors nobody has collected, in the order in which their saves ended.
_failures: list[_Failure] = []


def note_failure(path: str, error: BaseException) -> _Failure:
    """A save of `path` has failed, and nobody knows yet."""
    failure = _Failure(path, error)
    _failures.append(failure)
    return failure


def take_failures(first_only: bool = True) -> list[BaseException]:
    """Errors that nobody has collected, oldest first; they count as collected from now on."""
    taken: list[BaseException] = []
    while _failures and not (taken and first_only):
        failure = _failures.pop(0)
        if not failure.collected:
            failure.collected = True
            taken.append(failure.error)
    return taken


class _SaveFuture(Future[Any]):
    """A future whose result counts as having seen the save's error. It keeps its handle, not the
    other way round."""

    def __init__(self, handle: SaveHandle, upload: bool) -> None:
        super().__init__()
        self._handle = handle
        self._upload = upload

    def _refuse_inside(self) -> None:
        """Staging waits for nothing of the log."""
        if self._upload and not self.done():
            ordered.refuse_inside()

    def result(self, timeout: float | None = None) -> Any:
        self._refuse_inside()
        try:
            return super().result(timeout)
        finally:
            if self.done():
                self._handle._collect()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._refuse_inside()
        error = super().exception(timeout)
        self._handle._collect()
        return error


def _alive(reference: weakref.ref[_SaveFuture] | None) -> _SaveFuture | None:
    return None if reference is None else reference()


def _resolve(future: Future[Any], error: BaseException | None, value: object) -> None:
    """Settles a future that may be settled already, or cancelled by its user."""
    if future.done():
        return
    if isinstance(error, CancelledError):
        future.cancel()
    elif future.set_running_or_notify_cancel():
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)


class SaveHandle:
    """One save. Made by `async_save`; every method may be called from any thread, any number of
    times."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._ticket: _core.Ticket | None = None
        self._skeleton: Skeleton | None = None
        self._deferral: gate.Deferral | None = None
        self._on_durable: Callable[[Any, SaveReport], object] | None = None
        self._given_path: Any = path
        # Re-entrant: a signal handler may use a handle in the middle of another use of it.
        self._lock = threading.RLock()
        self._settled = False
        self._confirmed = False
        self._copied = False
        self._devices: tuple[int, ...] = ()
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._failure: _Failure | None = None
        self._callbacks: list[Callable[[SaveHandle], object]] = []
        self._staging: weakref.ref[_SaveFuture] | None = None
        self._upload: weakref.ref[_SaveFuture] | None = None
        self._entered_to_ticket_s = 0.0
        self._blocked_s = 0.0
        self._gate_wait_s = 0.0
        self._num_tensors = 0
        self._fallbacks: list[str] = []

    def __repr__(self) -> str:
        return f"<SaveHandle {self._path!r} {self.state}>"

    def __del__(self) -> None:
        failure = getattr(self, "_failure", None)
        if failure is not None and not failure.collected:
            log.error("stillframe: a save failed and nobody asked: %s", failure.error)

    # ---- what users see ----

    @property
    def path(self) -> str:
        """The path as it was given."""
        return self._path

    @property
    def state(self) -> str:
        """ "staging", "staged", "writing", "durable", "failed", "cancelled" or "skipped"."""
        return "skipped" if self._ticket is None else self._ticket.state()

    def done(self) -> bool:
        """Whether the save has ended: durable, failed, cancelled or skipped."""
        if self._settled:
            self._look()
            return True
        if self._ticket is not None and self._ticket.wait(_core.WAIT_ENDED, 0):
            self._settle()
        return self._settled

    def wait_staged(self, timeout: float | None = None) -> None:
        """Waits until every byte is copied: from then on the saved tensors may change in any way.

        Raises:
            TornSnapshotError, SaveError: The save failed.
            concurrent.futures.CancelledError: The save was cancelled.
            TimeoutError: `timeout` seconds passed.
        """
        with inside():
            deadline = _deadline(timeout)
            if self._ticket is not None and not self._settled:
                self._wait(_core.WAIT_COPIED, deadline)
                self._verdict()
                self._wait(_core.WAIT_STAGED, deadline)
            if self.state not in ("failed", "cancelled") and not self._ending():
                self._look()
                return
            self._finish(deadline)
            self._raise()

    def result(self, timeout: float | None = None) -> SaveReport | None:
        """Waits until the save is durable and returns its report; None when it was skipped.

        Raises:
            TornSnapshotError, SaveError: The save failed; the old file is untouched.
            concurrent.futures.CancelledError: The save was cancelled.
            TimeoutError: `timeout` seconds passed; the save goes on.
        """
        with inside():
            self._finish(_deadline(timeout))
            self._raise()
            return self._report

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits for the save's end and returns its error, None when there is none.

        Raises:
            concurrent.futures.CancelledError: The save was cancelled.
            TimeoutError: `timeout` seconds passed; the save goes on.
        """
        with inside():
            self._finish(_deadline(timeout))
            self._collect()
            if isinstance(self._error, CancelledError):
                raise self._error
            return self._error

    def cancel(self) -> bool:
        """Gives the save up, leaving the old file. False when it is too late or has ended
        otherwise."""
        return self._ticket is not None and self._ticket.cancel()

    def add_done_callback(self, function: Callable[[SaveHandle], object]) -> None:
        """Calls `function(handle)` when the save has ended: on the callback thread, or here and now
        if it has already."""
        with self._lock:
            if not self._settled:
                self._callbacks.append(function)
                return
        try:
            function(self)
        except Exception:
            log.exception("stillframe: a callback failed")

    def progress(self) -> tuple[int, int]:
        """(bytes written so far, bytes of the file)."""
        return (0, 0) if self._ticket is None else self._ticket.progress()

    @property
    def staging_completion(self) -> Future[None]:
        """Done when the save is staged, as `torch.distributed.checkpoint.async_save` names it."""
        with self._lock:
            future = _alive(self._staging)
            if future is None:
                future = _SaveFuture(self, upload=False)
                self._staging = weakref.ref(future)
                self._resolve_staging(future)
            return future

    @property
    def upload_completion(self) -> Future[SaveReport | None]:
        """Done with the report when the save is durable, as
        `torch.distributed.checkpoint.async_save` names it."""
        with self._lock:
            future = _alive(self._upload)
            if future is None:
                future = _SaveFuture(self, upload=True)
                self._upload = weakref.ref(future)
                if self._settled or self._ticket is None:
                    _resolve(future, self._error, self._report)
            return future

    # ---- what the package calls ----

    def gate(self) -> bool:
        """Returns when every byte of host memory is copied, and the calling thread's current
        streams wait for those of devices, or when the save has ended. The gate's side of
        `stillframe._save.gate.Pending`."""
        if self._ticket is None or self._settled:
            return True
        entered, began = time.perf_counter(), _core.trace_begin()
        with inside():
            if self._devices:
                copied = self._ticket.gate(_device.streams(self._devices))
            else:
                copied = self._ticket.wait(_core.WAIT_COPIED, None)
            self._verdict(copied)
        self._gate_wait_s += time.perf_counter() - entered
        _core.trace_end(_core.TRACE_GATE, began, self._ticket.number, 0)
        return copied

    def settle_here(self) -> None:
        """Waits for the end where no completion thread will come."""
        with inside():
            self._finish(None)

    def _after_copy(self) -> None:
        """On the completion thread: verdict, then the sources are nobody's business any more."""
        self._verdict()
        self._release_sources()
        with self._lock:
            future = _alive(self._staging)
            if future is not None:
                self._resolve_staging(future)

    def _verdict(self, copied: bool = True) -> None:
        """The version detector. Whoever comes first decides: the core ignores every later
        verdict. `copied`: no step needs to wait for this save any more."""
        deferral, ticket = self._deferral, self._ticket
        if deferral is not None and ticket is not None and not self._confirmed:
            ticket.confirm(deferral.torn())
            self._confirmed = True
        if copied and not self._copied:
            self._copied = True
            gate.untrack(self)

    def _release_sources(self) -> None:
        skeleton, deferral = self._skeleton, self._deferral
        if skeleton is not None:
            skeleton.storages = []  # `data` stays: names for an error are read from it
        if deferral is not None:
            deferral.release()

    def _ending(self) -> bool:
        return (
            self._ticket is not None and not self._settled and bool(self._ticket.report()["code"])
        )

    def _resolve_staging(self, future: Future[Any]) -> None:
        if self._settled or self._ticket is None:
            _resolve(future, self._error, None)
        elif self._ticket.state() in ("staged", "writing") and not self._ending():
            _resolve(future, None, None)

    def _settle(self) -> None:
        """Once the ticket has ended: report, error, futures, then callbacks. May be called
        again."""
        with self._lock:
            if self._settled or self._ticket is None:
                return
            facts = self._ticket.report()
            if facts["state"] not in _FINAL:
                return
            if facts["code"]:
                self._error = self._build_error(facts)
                if not isinstance(self._error, CancelledError) and self._failure is None:
                    self._failure = note_failure(self._path, self._error)
            else:
                self._report = self._build_report(facts)
            self._settled = True
            gate.untrack(self)
            self._skeleton = None
            self._deferral = None
            completion.in_flight.pop(self._ticket.number, None)
            for reference, value in ((self._staging, None), (self._upload, self._report)):
                future = _alive(reference)
                if future is not None:
                    _resolve(future, self._error, value)
            waiting, self._callbacks = self._callbacks, []
            on_durable, self._on_durable = self._on_durable, None
        report = self._report
        if on_durable is not None and report is not None:
            completion.callbacks.put(lambda: on_durable(self._given_path, report))
        for function in waiting:
            completion.callbacks.put(lambda function=function: function(self))  # type: ignore[misc]

    def _build_report(self, facts: dict[str, Any]) -> SaveReport:
        offset = self._entered_to_ticket_s
        fallbacks = [*self._fallbacks, *facts["fallbacks"]]
        if facts["over_slots"]:
            fallbacks.append(
                "The save was made inside another call of its thread and took a slot beyond"
                " max_in_flight."
            )
        return SaveReport(
            path=self._path,
            nbytes=facts["nbytes"],
            num_tensors=self._num_tensors,
            captured_nbytes=facts["captured_nbytes"],
            deferred_nbytes=facts["deferred_nbytes"],
            blocked_s=self._blocked_s,
            gate_wait_s=self._gate_wait_s,
            backpressure_s=(facts["slot_wait_ns"] + facts["block_wait_ns"]) / 1e9,
            staged_after_s=facts["staged_after_ns"] / 1e9 + offset,
            durable_after_s=facts["ended_after_ns"] / 1e9 + offset,
            peak_pool_bytes=facts["peak_pool_bytes"],
            io_mode=facts["io_mode"],
            fallbacks=tuple(fallbacks),
        )

    def _build_error(self, facts: dict[str, Any]) -> BaseException:
        code = facts["code"]
        if code == _core.ECANCELLED:
            return CancelledError(f"the save of {self._path} was cancelled")
        if code == _core.ETORN:
            return self._torn_error(facts["index"])
        if code == _core.EEXHAUSTED:
            return PoolExhaustedError(
                f"the save of {self._path} needs memory of the pool, and snapshots hold all of it"
            )
        if code <= -1000:
            return StillframeError(f"the save of {self._path} failed: {facts['note'] or code}")
        text = os.strerror(-code)
        if facts["note"]:
            text = f"{text}: {facts['note']}"
        return SaveError(-code, text, self._path, facts["phase"])

    def _torn_error(self, index: int) -> TornSnapshotError:
        names = self._skeleton.names(index) if self._skeleton is not None else []
        if self._deferral is not None:
            self._deferral.distrust(index)
        what = ", ".join(names) if names else f"storage {index}"
        return TornSnapshotError(
            f"{self._path}: {what} changed outside the optimizer's step while it was still being"
            " copied. The old file is untouched. Call handle.wait_staged() before such a change, or"
            " save with overlap=False. This optimizer's state is copied inside the call from now"
            " on.",
            names,
        )

    # ---- waiting ----

    def _wait(self, what: int, deadline: float | None) -> None:
        assert self._ticket is not None
        if not self._ticket.wait(what, _left(deadline)):
            raise TimeoutError(f"the save of {self._path} is not that far yet ({self.state})")

    def _finish(self, deadline: float | None) -> None:
        self._look()
        if self._ticket is None or self._settled:
            return
        self._wait(_core.WAIT_COPIED, deadline)
        self._verdict()
        if not self._ticket.wait(_core.WAIT_ENDED, 0):
            # What has not ended by then stands behind that work in the log.
            ordered.refuse_inside()
        self._wait(_core.WAIT_ENDED, deadline)
        self._settle()

    def _look(self) -> None:
        """Raises ForkError in a child: a handle made before the fork says nothing there."""
        if self._ticket is not None:
            self._ticket.state()

    def _collect(self) -> None:
        failure = self._failure
        if failure is not None and not failure.collected:
            failure.collected = True
            with contextlib.suppress(ValueError):  # taken by wait_all in the meantime
                _failures.remove(failure)

    def _raise(self) -> None:
        self._collect()
        if self._error is not None:
            raise self._error


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _forked() -> None:
    """In the child: what failed in the parent is the parent's to report."""
    for failure in _failures:
        failure.collected = True
    _failures.clear()


os.register_at_fork(after_in_child=_forked)
