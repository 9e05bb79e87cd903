"""A save that another CheckpointIO makes, seen from outside: the same handle, another way to it."""

from __future__ import annotations

import threading
import time
from typing import Any

from stillframe import _core
from stillframe._save import completion, ordered
from stillframe._save.handle import Deadline, SaveHandle, State
from stillframe._save.options import OnDurable
from stillframe._save.report import Interval, IoMode, SaveReport
from stillframe._snapshot.snapshot import Snapshot, is_copied


class WrappedSave(SaveHandle):
    """
    Args:
        path: To be shown.
        given: For the other CheckpointIO, and for `on_durable`.
        taken: What is saved; None where it is saved as it is, during the call.
        slot: Among the engine's saves under way; given back at the end. None where it has none.
        fallbacks: Sentences for the report.
        entered: `time.perf_counter()` at the call's entry.
        waited_s: Of the call, the wait for a slot.
    """

    def __init__(
        self,
        path: str,
        given: Any,
        on_durable: OnDurable | None,
        taken: Snapshot[Any] | None,
        *,
        slot: _core.Slot | None = None,
        fallbacks: list[str],
        entered: float,
        waited_s: float,
    ) -> None:
        super().__init__(path, given, on_durable)
        self.number = next(completion.numbers)
        self.given = given
        self._taken = taken
        self._slot = slot
        self._over = threading.Event()
        self._nbytes = 0 if taken is None else taken.nbytes
        self._num_tensors = 0 if taken is None else taken.num_tensors
        self._fallbacks = tuple(fallbacks)
        self._entered = entered
        self._waited_s = waited_s
        self._staged_s = 0.0
        self._call = Interval(entered)

    # ---- what users call ----

    @property
    def state(self) -> State:
        self._birth.refuse_child()
        if not self._outcome.settled:
            return "writing"
        return "durable" if self._outcome.error is None else "failed"

    def progress(self) -> tuple[int, int]:
        """Nobody counts what another CheckpointIO has written: all of it or nothing."""
        return (self._nbytes if self._outcome.settled else 0), self._nbytes

    def _is_staged(self) -> bool:
        taken = self._taken
        return taken is not None and is_copied(taken)

    def _wait_until_staged(self, deadline: Deadline) -> bool:
        taken = self._taken
        if taken is not None and not self._outcome.settled:
            try:
                taken.wait(deadline.left())
            except TimeoutError:
                raise self._late(deadline, "staged") from None
        return self._outcome.error is None

    def _wait_until_ended(self, deadline: Deadline) -> None:
        self._birth.refuse_child()
        if not self._outcome.settled:
            ordered.refuse_inside()
            if not self._over.wait(deadline.left()):
                raise self._late(deadline, "durable")
        self._settle()

    # ---- what those who make it call ----

    def take(self) -> Snapshot[Any] | None:
        return self._taken

    def launched(self) -> None:
        """It is in the log, and ends by itself."""
        if self._slot is not None:
            self._slot.launched()

    def was_not_launched(self) -> None:
        """There is no such save."""
        self._give_back_slot()
        completion.in_flight.pop(self.number, None)

    def call_is_over(self) -> None:
        """The call that asked for the save returns now."""
        self._call.end()

    def copied(self) -> None:
        """The state is out of training's way; the other CheckpointIO begins."""
        self._staged_s = time.perf_counter() - self._entered
        if self._taken is not None:
            self._outcome.notify_staged()

    def end_well(self, nbytes: int, io_mode: IoMode) -> None:
        report = SaveReport(
            path=self._path,
            nbytes=nbytes,
            num_tensors=self._num_tensors,
            captured_nbytes=self._nbytes,
            deferred_nbytes=0,
            blocked_s=self._call.seconds,
            gate_wait_s=0.0,
            backpressure_s=self._waited_s,
            staged_after_s=self._staged_s,
            durable_after_s=time.perf_counter() - self._entered,
            peak_pool_bytes=self._nbytes,
            io_mode=io_mode,
            fallbacks=self._fallbacks,
        )
        self._end(report, None)

    def fail(self, error: BaseException) -> None:
        self._end(None, error)

    def _give_back_slot(self) -> None:
        if self._slot is not None:
            self._slot.give_back()

    def _end(self, report: SaveReport | None, error: BaseException | None) -> None:
        self._give_back_slot()
        self._outcome.settle(report, error)
        self._taken = None
        completion.in_flight.pop(self.number, None)
        self._over.set()
        self._outcome.notify()
