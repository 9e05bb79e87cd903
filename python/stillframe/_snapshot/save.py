"""Implements `SnapshotSave`: a save that Python writes from a snapshot, or from the state itself.

Another CheckpointIO writes such a save on the thread of the log (`_lightning/wrapped.py`), and all
ranks together write one through torch.distributed.checkpoint (`_dcp/rounds.py`). Users get the same
kind of handle for both.

    made ──begin──▶ under way ──copied──▶ staged ──end──▶ durable or failed
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from stillframe import _core
from stillframe._save import completion, ordered
from stillframe._save.handle import Deadline, SaveHandle, State
from stillframe._save.options import OnDurable
from stillframe._save.ordered import Turn
from stillframe._save.report import Interval, IoMode, SaveReport
from stillframe._snapshot.snapshot import Snapshot, copy_error, gate_wait_s, is_copied
from stillframe.errors import StillframeError


class SnapshotSave(SaveHandle):
    """The handle of a save that Python writes.

    Args:
        path: The path to show.
        given: The path as given, for `on_durable`.
        entered: `time.perf_counter()` at the call's entry.
        slot: The save's slot in the engine, which is given back at the end; None without one.
        known_as: The name for the save in the log message about an error that was not collected.

    Attributes:
        error_is_known: The caller knows the save's error already, so it is not reported again.
    """

    def __init__(
        self,
        path: str,
        given: Any,
        on_durable: OnDurable | None,
        *,
        entered: float,
        slot: _core.Slot | None = None,
        known_as: str = "a save",
    ) -> None:
        super().__init__(path, given, on_durable, known_as=known_as)
        self._outcome.cancellable = False
        self.error_is_known = False
        self._number = next(completion.numbers)
        self._slot = slot
        self._taken: Snapshot[Any] | None = None
        self._nbytes = self._deferred_nbytes = self._num_tensors = 0
        self._entered = entered
        self._waited_s = 0.0
        self._copied_s: float | None = None
        self._call = Interval(entered)
        self._over = threading.Event()

    # ---- for users ----

    @property
    def state(self) -> State:
        self._birth.refuse_child()
        if not self._outcome.settled:
            return "writing"
        return "durable" if self._outcome.error is None else "failed"

    def progress(self) -> tuple[int, int]:
        """Return all or nothing, because bytes written by other code are not counted."""
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
                raise self._timeout_error(deadline, "staged") from None
            except StillframeError:  # an error of the copy, with which the save fails soon
                return False
        return self._outcome.error is None

    def _wait_until_ended(self, deadline: Deadline) -> None:
        self._birth.refuse_child()
        if not self._outcome.settled:
            ordered.refuse_inside()
            if not self._over.wait(deadline.left()):
                raise self._timeout_error(deadline, "durable")
        self._settle()

    # ---- for the code that makes the save ----

    def waited(self) -> None:
        """Record that the call has waited for other saves until now."""
        self._waited_s = time.perf_counter() - self._entered

    def copies(self, taken: Snapshot[Any]) -> None:
        """Set the snapshot to save; without one, the state itself is saved."""
        self._taken = taken
        self._nbytes, self._num_tensors = taken.nbytes, taken.num_tensors
        self._deferred_nbytes = taken.deferred_nbytes

    def snapshot(self) -> Snapshot[Any] | None:
        return self._taken

    def begin(self) -> None:
        """Keep the save alive from here on, until it ends."""
        completion.in_flight[self._number] = self

    def launched(self) -> None:
        """Record that the save now ends by itself, whatever becomes of the call."""
        if self._slot is not None:
            self._slot.launched()

    def was_not_launched(self) -> None:
        """Undo `begin`: the save was not made."""
        self._give_back_slot()
        completion.in_flight.pop(self._number, None)

    def call_is_over(self) -> None:
        """Record that the call that asked for the save returns now."""
        self._call.end()

    def copied(self) -> None:
        """Record the end of the copy, successful or not. May be called again."""
        if self._copied_s is None:
            self._copied_s = time.perf_counter() - self._entered
        taken = self._taken
        if taken is not None:
            self._outcome.notify_staged(copy_error(taken))

    def report(
        self,
        nbytes: int,
        io_mode: IoMode,
        *,
        fallbacks: Sequence[str] = (),
        more_pool_bytes: int = 0,
    ) -> SaveReport:
        """Make the report of a successful save.

        Args:
            nbytes: Bytes that were written.
            more_pool_bytes: Memory of the pool that writing has taken, beside the snapshot.
        """
        self.copied()
        assert self._copied_s is not None
        taken = self._taken
        durable_after_s = time.perf_counter() - self._entered
        return SaveReport(
            path=self._path,
            nbytes=nbytes,
            num_tensors=self._num_tensors,
            captured_nbytes=self._nbytes - self._deferred_nbytes,
            deferred_nbytes=self._deferred_nbytes,
            blocked_s=min(self._call.seconds, durable_after_s),  # the call may not have returned
            gate_wait_s=0.0 if taken is None else gate_wait_s(taken),
            backpressure_s=self._waited_s,
            staged_after_s=self._copied_s,
            durable_after_s=durable_after_s,
            peak_pool_bytes=self._nbytes + more_pool_bytes,
            io_mode=io_mode,
            fallbacks=tuple(dict.fromkeys(fallbacks)),
        )

    def end(
        self,
        report: SaveReport | None,
        error: BaseException | None,
        *,
        value: object = None,
        turn: Turn | None = None,
    ) -> None:
        """Settle the save.

        Args:
            value: The result of `upload_completion`, if that is not the report.
            turn: The save's entry in the log. Later entries learn of the end before the save's
                users do, but not before its error can be read.
        """
        self._give_back_slot()
        self._outcome.settle(report, error, value=value, is_known=self.error_is_known)
        if turn is not None:
            turn.end(error is None)
        self._taken = None
        completion.in_flight.pop(self._number, None)
        self._over.set()
        self._outcome.notify()

    def _give_back_slot(self) -> None:
        if self._slot is not None:
            self._slot.give_back()
