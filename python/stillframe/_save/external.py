"""Implements `ExternalSave`: a save that the core does not write as one file.

It ends as external work in the order of the log (`ordered.py`). Each subclass writes the bytes in
another way:
- `_snapshot/save.py`: another CheckpointIO, or all ranks together, write a snapshot.
- `remote.py`: a thread sends the bytes to a store.
- `directory.py`: each file of a directory has a save of its own.

    made ──begin──▶ under way ──end──▶ durable, failed or cancelled
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

from stillframe import _core
from stillframe._base.event import Event
from stillframe._save import completion, ordered
from stillframe._save.handle import Deadline, SaveHandle, State
from stillframe._save.options import OnDurable
from stillframe._save.ordered import LogEntry
from stillframe._save.report import Interval, SaveReport

_CANCELLED, _COMMITTED = "cancelled", "committed"


class ExternalSave(SaveHandle):
    """The handle of a save that the core does not write as one file.

    Args:
        path: The path to show.
        given: The path as given, for `on_durable`.
        entered: `time.perf_counter()` at the entry of the user's call.
        slot: The save's slot, which is given back at the end; None if the save takes no slot.
        known_as: The name for the save in the log message about an error that nobody collected.

    Attributes:
        error_is_known: The caller learns of the error in another way, so it is not logged.
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
        self._entered = entered
        self._slot_wait_s = 0.0  # how long the call waited for a slot
        self._call_time = Interval(entered)  # until the call returns
        self._ended = Event()  # the save has ended
        self._unclaimed_end = [True]  # `claim_end` takes the element, in one atomic operation
        self._decisions: list[str] = []  # each _CANCELLED or _COMMITTED; the first one counts

    # ---- for users ----

    @property
    def state(self) -> State:
        self._birth.refuse_forked_child()
        if not self._has_ended():
            return self._state_under_way()
        if isinstance(self._outcome.error, CancelledError):
            return "cancelled"
        return "durable" if self._outcome.error is None else "failed"

    def _has_ended(self) -> bool:
        # A slot is over when it was given back or its engine was closed.
        return self._outcome.settled and (self._slot is None or self._slot.is_over())

    def _wait_until_ended(self, deadline: Deadline) -> None:
        self._birth.refuse_forked_child()
        if not self._has_ended():
            ordered.refuse_in_external_work()
            if not self._ended.wait(deadline.left()):
                raise self._timeout_error(deadline, "durable")
        self._settle()

    # ---- for subclasses to override ----

    def _state_under_way(self) -> State:
        return "writing"

    def _drop_references(self) -> None:
        """Drop the objects that only a save under way needs."""

    # ---- for the code that makes the save ----

    def record_slot_wait(self) -> None:
        """Record that the call has waited for a slot until now."""
        self._slot_wait_s = time.perf_counter() - self._entered

    def submit(self, key: bytes, kind: int, work: Callable[[], bool]) -> None:
        """Put the save into the log, with its external work.

        If this raises, the save was not made and `work` is not called, unless `work` had begun
        before a Ctrl-C.

        Args:
            key: The path's name in the log, see `paths.key`.
            kind: See `ordered.submit`.
            work: Called when the save's entry is at the head of the log. It must call `end` and
                return whether the save succeeded.
        """

        def work_unless_ended(_previous_succeeded: bool) -> bool:
            return self.claim_end() and work()

        try:
            self.begin()
            ordered.submit(key, kind, work_unless_ended)
            self.record_launch()
        except BaseException:
            if self.claim_end():
                self.undo_begin()
            raise

    def claim_end(self) -> bool:
        """Return True to the first caller only, which must end the save."""
        try:
            return self._unclaimed_end.pop()
        except IndexError:
            return False

    def begin(self) -> None:
        """Keep the save alive until its end, and begin its upload to a mirror."""
        if self._mirror is not None:
            self._mirror.begin()
        completion.in_flight[self._number] = self

    def record_launch(self) -> None:
        """Record that the save goes on even if the call raises."""
        if self._slot is not None:
            self._slot.launched()

    def undo_begin(self) -> None:
        """Undo `begin`, for a call that raises before the launch."""
        self._tell_mirror_outcome(succeeded=False)
        self._give_back_slot()
        completion.in_flight.pop(self._number, None)

    def _decide_to_cancel(self) -> bool:
        """Decide that the save is cancelled; return False if it is being committed already."""
        self._decisions.append(_CANCELLED)
        return self._is_cancelled()

    def _decide_to_commit(self) -> None:
        """Decide that the save can no longer be cancelled, or raise CancelledError."""
        self._decisions.append(_COMMITTED)
        self._refuse_cancelled()

    def _is_cancelled(self) -> bool:
        return self._decisions[:1] == [_CANCELLED]  # [:1]: there may be no decision yet

    def _is_committing(self) -> bool:
        return self._decisions[:1] == [_COMMITTED]

    def _refuse_cancelled(self) -> None:
        if self._is_cancelled():
            raise CancelledError(f"the save of {self._path} was cancelled")

    def record_call_end(self) -> None:
        """Record that the user's call returns now."""
        self._call_time.end()

    def end(
        self,
        report: SaveReport | None,
        error: BaseException | None,
        *,
        value: object = None,
        entry: LogEntry | None = None,
    ) -> None:
        """End the save: record its outcome, and wake everyone who waits for it.

        Args:
            report, error: The outcome; one of them is None.
            value: The result of the future `upload_completion`; None stands for the report.
            entry: The save's entry in the log, which this call ends too: after it has recorded the
                outcome, because later entries read the error, and before it wakes waiting users.
        """
        self._tell_mirror_outcome(succeeded=error is None)
        self._outcome.settle(report, error, value=value, is_known=self.error_is_known)
        self._give_back_slot()
        if entry is not None:
            entry.end(error is None)
        self._drop_references()
        completion.in_flight.pop(self._number, None)
        self._ended.set()
        self._outcome.notify()

    def _give_back_slot(self) -> None:
        if self._slot is not None:
            self._slot.give_back()
