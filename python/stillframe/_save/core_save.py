"""Implements `CoreSave`: the handle of a save that the core makes, over the core's ticket.

The ticket holds all changing state. This module adds the verdict on tensor versions (`verdict.py`),
and turns the core's report into a `SaveReport` or an error.

If Ctrl-C interrupts the call after the launch, the save goes on and settles. If Ctrl-C comes before
the launch, the core abandons the save at once, so that its slot and blocks are free for other
saves.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import CancelledError
from typing import Any, cast

from stillframe import _core
from stillframe._base import device
from stillframe._base.calls import inside_call
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
    """A save with a ticket of the core.

    Args:
        ticket: The save's ticket, laid out and not yet submitted.
        skeleton: The saved object. The handle drops the storages once they are copied, and the
            skeleton at the end.
        deferral: Which storages are copied after the call.
        path: The path for messages and the report.
        given: The path as the user gave it, for `on_durable`.
        entered: `time.perf_counter()` at the call's entry.
        ordered: The save has an entry in the log.
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
        ordered: bool = True,
    ) -> None:
        super().__init__(path, given, on_durable)
        self.entered = entered
        self._ordered = ordered
        self._ticket = ticket
        self._skeleton: Skeleton | None = skeleton
        self._verdict = Verdict(deferral)
        self._devices = skeleton.devices
        self._num_tensors = skeleton.num_tensors
        self._fallbacks = [*skeleton.fallbacks, *deferral.fallbacks]
        self._verdict_given = False  # to the core
        # Times in the core's report count from the ticket, times in a `SaveReport` from the call.
        self._entered_to_ticket_s = time.perf_counter() - entered
        self._call_time = Interval(entered)  # until the call returns
        self._step_waits: list[Interval] = []  # the waits of optimizer steps

    # ---- the call ----

    def launch(self) -> None:
        """Take a slot, capture what is not deferred, and leave the rest to the core's threads.

        Raises:
            BusyError, PoolExhaustedError, StillframeError: The save is refused.
        """
        number = self._ticket.number
        completion.in_flight[number] = self
        try:
            if self._mirror is not None:
                self._mirror.begin()
            self._ticket.submit(device.streams(self._devices))
        except BaseException:
            was_launched = self._ticket.report()["launched_after_ns"] >= 0
            if was_launched:  # Ctrl-C came just after the launch: the save goes on
                self._make_steps_wait_after_call()
            else:
                completion.in_flight.pop(number, None)
                self._verdict.end(self)
                self._tell_mirror_outcome(succeeded=False)
            raise
        self._make_steps_wait_after_call()

    def abandon(self) -> None:
        """End the save, because its call raises before the launch."""
        self._ticket.abandon()

    def _make_steps_wait_after_call(self) -> None:
        """Make optimizer steps wait until the deferred sources are copied. Drop the sources if all
        of them were copied in the call."""
        self._verdict.make_steps_wait(self)
        are_copied_later = self._verdict.is_needed or self._devices
        if not are_copied_later:
            self._release_sources()
        self._call_time.end()

    # ---- what the completion thread and the gate call ----

    def on_copy_ended(self) -> None:
        """Give the verdict and drop the sources, because the last byte is copied."""
        self._report_version_check()
        self._release_sources()
        if self._is_staged():
            self._outcome.notify_staged()

    def settle(self) -> None:
        self._settle()

    def gate(self) -> bool:
        """Wait until every byte in host memory is copied, or the save has ended. Have the calling
        thread's current streams wait for the bytes in device memory.

        Return False if copies from a device still run. The next step then calls this again.
        """
        if self._outcome.settled:
            return True
        began = _core.trace_begin()
        wait = Interval(time.perf_counter())
        self._step_waits.append(wait)
        try:
            with inside_call():
                if self._devices:
                    copied = self._ticket.gate(device.streams(self._devices))
                else:
                    copied = self._ticket.wait(_core.WAIT_COPIED, None)
                self._report_version_check(copied)
        finally:
            wait.end()
        _core.trace_end(_core.TRACE_GATE, began, self._ticket.number, 0)
        return copied

    def _report_version_check(self, copied: bool = True) -> None:
        """Give the core the verdict, once.

        Args:
            copied: All bytes are copied, so no step waits for this save any more.
        """
        if self._verdict.is_needed and not self._verdict_given:
            self._ticket.confirm(self._verdict.judge())  # gives the verdict to the core
            self._verdict_given = True
        if copied:
            self._verdict.let_steps_go(self)

    def _release_sources(self) -> None:
        skeleton = self._skeleton
        if skeleton is not None:
            skeleton.storages = []  # `data` stays: an error reads the tensors' names from it
        self._verdict.release()

    # ---- what users call ----

    @property
    def state(self) -> State:
        self._birth.refuse_forked_child()
        return cast(State, self._ticket.state())

    def cancel(self) -> bool:
        self._birth.refuse_forked_child()
        return self._ticket.cancel()

    def progress(self) -> tuple[int, int]:
        self._birth.refuse_forked_child()
        return self._ticket.progress()

    def _has_ended(self) -> bool:
        return self._outcome.settled or self._ticket.wait(_core.WAIT_ENDED, 0)

    def _is_staged(self) -> bool:
        return self._ticket.is_staged()

    def _wait_until_staged(self, deadline: Deadline) -> bool:
        self._birth.refuse_forked_child()
        if self._outcome.settled:
            return self._outcome.error is None
        self._wait(_core.WAIT_COPIED, deadline, "staged")
        self._report_version_check()
        self._wait(_core.WAIT_STAGED, deadline, "staged")
        return self._ticket.is_staged()

    def _wait_until_ended(self, deadline: Deadline) -> None:
        self._birth.refuse_forked_child()
        if not self._outcome.settled:
            self._wait(_core.WAIT_COPIED, deadline, "durable")
            self._report_version_check()
            if self._ordered and not self._has_ended():  # the commit waits for earlier entries
                ordered.refuse_in_external_work()
            self._wait(_core.WAIT_ENDED, deadline, "durable")
        self._settle()

    def _wait(self, event: int, deadline: Deadline, awaited_state: str) -> None:
        """Wait for one of the events `_core.WAIT_*`. Raise TimeoutError after the deadline, with
        `awaited_state` in the message."""
        if not self._ticket.wait(event, deadline.left()):
            raise self._timeout_error(deadline, awaited_state)

    # ---- the end ----

    def _settle(self) -> None:
        if not self._outcome.settled:
            facts = self._ticket.report()
            # The result is not there before the save has ended.
            assert facts["state"] in ("durable", "failed", "cancelled"), facts["state"]
            self._tell_mirror_outcome(succeeded=not facts["code"])
            if facts["code"]:
                self._outcome.settle(None, self._error_of(facts))
            else:
                self._outcome.settle(self._report_of(facts), None)
        self._verdict.end(self)
        self._skeleton = None
        completion.in_flight.pop(self._ticket.number, None)
        self._outcome.notify()

    def _report_of(self, facts: dict[str, Any]) -> SaveReport:
        """Return the report of a durable save; `facts` is the core's report."""
        # The core's times count from the making of the ticket.
        call_to_ticket_s = self._entered_to_ticket_s
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
            blocked_s=self._call_time.seconds,
            gate_wait_s=sum((wait.seconds for wait in list(self._step_waits)), 0.0),
            backpressure_s=(facts["slot_wait_ns"] + facts["block_wait_ns"]) / 1e9,
            staged_after_s=facts["staged_after_ns"] / 1e9 + call_to_ticket_s,
            durable_after_s=facts["ended_after_ns"] / 1e9 + call_to_ticket_s,
            peak_pool_bytes=facts["peak_pool_bytes"],
            io_mode=facts["io_mode"],
            fallbacks=tuple(fallbacks),
        )

    def _error_of(self, facts: dict[str, Any]) -> BaseException:
        """Return the error of a save that failed or was cancelled; `facts` is the core's report."""
        code = facts["code"]
        if code == _core.ECANCELLED:
            return CancelledError(f"the save of {self._path} was cancelled")
        if code == _core.ETORN:
            return self._torn_error(facts["index"])
        if code == _core.EEXHAUSTED:
            return PoolExhaustedError(
                f"the save of {self._path} needs memory of the pool, and snapshots hold all of it"
            )
        return error_of_step(self._path, code, facts["phase"], facts["note"])

    def _torn_error(self, index: int) -> TornSnapshotError:
        """Return the error about a torn storage. Have later saves copy the state of its optimizer
        during the call."""
        skeleton = self._skeleton  # read once, because another thread may settle the save
        names = skeleton.names(index) if skeleton is not None else []
        what = self._verdict.stop_deferring_storage_owner(index, names)
        return TornSnapshotError(
            f"{self._path}: {what} changed outside the optimizer's step while it was still being"
            " copied. The old file is untouched. Call handle.wait_staged() before such a change, or"
            " save with overlap=False. This optimizer's state is copied during the call from now"
            " on.",
            names,
        )


def error_of_step(path: str, code: int, phase: str, note: str) -> StillframeError:
    """Return the error of a save in which the operating system or the core refused a step.

    Args:
        code: A negative errno, or one of the core's own codes, which are -1000 and below.
        phase: See `SaveError`.
        note: One more fact for the message, or "".
    """
    if code <= -1000:
        return StillframeError(f"the save of {path} failed: {note or code}")
    text = os.strerror(-code)
    return SaveError(-code, f"{text}: {note}" if note else text, path, phase)
