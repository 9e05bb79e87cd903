"""A save that stillframe makes: the Python side of a ticket of the core.

The ticket knows everything that changes; here is only what Python has to add: the verdict on tensor
versions (`verdict.py`), and the sentences of a report or an error.

After Ctrl-C in the call, a save that was launched goes on in the hands of its handle. One that
was not is given up there and then, and not when the traceback goes, since whoever handles the
interrupt may save and stands behind it in the log.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import CancelledError
from typing import Any, cast

from stillframe import _core
from stillframe._base import device
from stillframe._base.calls import inside
from stillframe._save import completion, ordered
from stillframe._save.handle import Deadline, SaveHandle, State
from stillframe._save.options import OnDurable
from stillframe._save.report import Interval, SaveReport
from stillframe._save.verdict import Verdict
from stillframe._tree.skeleton import Skeleton
from stillframe._watch import gate
from stillframe.errors import (
    PoolExhaustedError,
    SaveError,
    StillframeError,
    TornSnapshotError,
)


class CoreSave(SaveHandle):
    """
    Args:
        ticket: Of the save, laid out and not yet submitted.
        skeleton: What is saved. It is let go of at the end, its storages once they are copied.
        deferral: Which of them are copied after the call.
        path: To be shown.
        given: For `on_durable`.
        entered: `time.perf_counter()` at the call's entry.
    """

    def __init__(
        self,
        ticket: _core.Ticket,
        skeleton: Skeleton,
        deferral: gate.Deferral,
        *,
        path: str,
        given: Any,
        on_durable: OnDurable | None,
        entered: float,
    ) -> None:
        super().__init__(path, given, on_durable)
        self._ticket = ticket
        self._skeleton: Skeleton | None = skeleton
        self._verdict = Verdict(deferral)
        self._devices = skeleton.devices
        self._num_tensors = skeleton.num_tensors
        self._fallbacks = [*skeleton.fallbacks, *deferral.fallbacks]
        self._confirmed = False
        self._entered_to_ticket_s = time.perf_counter() - entered
        self._call = Interval(entered)
        self._gates: list[Interval] = []

    # ---- the call ----

    def launch(self) -> None:
        """Takes a slot, captures, and hands the rest over.

        Raises:
            BusyError, PoolExhaustedError, StillframeError: The save is refused.
        """
        number = self._ticket.number
        completion.in_flight[number] = self
        try:
            self._ticket.submit(device.streams(self._devices))
        except BaseException:
            if self._ticket.report()["launched_after_ns"] >= 0:
                # Ctrl-C came just after. The save goes on; its verdict and its sources are its
                # own business, and later saves stand behind it.
                self._go_on()
            else:
                completion.in_flight.pop(number, None)
                self._verdict.end(self)
            raise
        self._go_on()

    def _go_on(self) -> None:
        """Steps wait for what is still to be copied; what is not is let go of. The call ends."""
        self._verdict.launched(self)
        if not self._verdict.is_needed and not self._devices:  # those are still being copied
            self._release_sources()
        self._call.end()

    # ---- what the completion thread and the gate call ----

    def after_copy(self) -> None:
        """The verdict; then the sources are nobody's business any more."""
        self._confirm()
        self._release_sources()
        if self._is_staged():
            self._outcome.notify_staged()

    def settle(self) -> None:
        """The save has ended."""
        self._settle()

    def gate(self) -> bool:
        """Returns when every byte of host memory is copied, and the calling thread's current
        streams wait for those of devices, or when the save has ended. See
        `stillframe._watch.gate.Pending`."""
        if self._outcome.settled:
            return True
        began, wait = _core.trace_begin(), Interval(time.perf_counter())  # the trace has all of it
        self._gates.append(wait)
        try:
            with inside():
                if self._devices:
                    copied = self._ticket.gate(device.streams(self._devices))
                else:
                    copied = self._ticket.wait(_core.WAIT_COPIED, None)
                self._confirm(copied)
        finally:
            wait.end()
        _core.trace_end(_core.TRACE_GATE, began, self._ticket.number, 0)
        return copied

    def _confirm(self, copied: bool = True) -> None:
        """Gives the core the verdict. `copied`: no step needs to wait for this save any more."""
        if self._verdict.is_needed and not self._confirmed:
            self._ticket.confirm(self._verdict.look())
            self._confirmed = True
        if copied:
            self._verdict.over(self)

    def _release_sources(self) -> None:
        skeleton = self._skeleton
        if skeleton is not None:
            skeleton.storages = []  # `data` stays: names for an error are read from it
        self._verdict.release()

    # ---- what users call ----

    @property
    def state(self) -> State:
        self._birth.refuse_child()
        return cast(State, self._ticket.state())

    def cancel(self) -> bool:
        self._birth.refuse_child()
        return self._ticket.cancel()

    def progress(self) -> tuple[int, int]:
        self._birth.refuse_child()
        return self._ticket.progress()

    def _has_ended(self) -> bool:
        return self._outcome.settled or self._ticket.wait(_core.WAIT_ENDED, 0)

    def _is_staged(self) -> bool:
        return self._ticket.is_staged()

    def _wait_until_staged(self, deadline: Deadline) -> bool:
        self._birth.refuse_child()
        if self._outcome.settled:
            return self._outcome.error is None
        self._wait(_core.WAIT_COPIED, deadline, "staged")
        self._confirm()
        self._wait(_core.WAIT_STAGED, deadline, "staged")
        return self._ticket.is_staged()

    def _wait_until_ended(self, deadline: Deadline) -> None:
        self._birth.refuse_child()
        if not self._outcome.settled:
            self._wait(_core.WAIT_COPIED, deadline, "durable")
            self._confirm()
            if not self._has_ended():
                ordered.refuse_inside()  # what has not ended stands behind that work in the log
            self._wait(_core.WAIT_ENDED, deadline, "durable")
        self._settle()

    def _wait(self, what: int, deadline: Deadline, wanted: str) -> None:
        if not self._ticket.wait(what, deadline.left()):
            raise self._late(deadline, wanted)

    # ---- the end ----

    def _settle(self) -> None:
        with self._outcome.lock:
            if not self._outcome.settled:
                facts = self._ticket.report()
                # Who settles has waited for the end: of a save that goes on nothing is known yet.
                assert facts["state"] in ("durable", "failed", "cancelled"), facts["state"]
                if facts["code"]:
                    self._outcome.settle(None, self._error_of(facts))
                else:
                    self._outcome.settle(self._report_of(facts), None)
        self._verdict.end(self)
        self._skeleton = None
        completion.in_flight.pop(self._ticket.number, None)
        self._outcome.notify()

    def _report_of(self, facts: dict[str, Any]) -> SaveReport:
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
            blocked_s=self._call.seconds,
            gate_wait_s=sum((each.seconds for each in list(self._gates)), 0.0),
            backpressure_s=(facts["slot_wait_ns"] + facts["block_wait_ns"]) / 1e9,
            staged_after_s=facts["staged_after_ns"] / 1e9 + offset,
            durable_after_s=facts["ended_after_ns"] / 1e9 + offset,
            peak_pool_bytes=facts["peak_pool_bytes"],
            io_mode=facts["io_mode"],
            fallbacks=tuple(fallbacks),
        )

    def _error_of(self, facts: dict[str, Any]) -> BaseException:
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
        what = self._verdict.blame(index, names)
        return TornSnapshotError(
            f"{self._path}: {what} changed outside the optimizer's step while it was still being"
            " copied. The old file is untouched. Call handle.wait_staged() before such a change, or"
            " save with overlap=False. This optimizer's state is copied during the call from now"
            " on.",
            names,
        )
