"""A save over a fake ticket: waits, errors and reports."""

from __future__ import annotations

import errno
import os
import time
from concurrent.futures import CancelledError
from typing import Any

import pytest
import stillframe
import torch
from stillframe import _core
from stillframe._save import completion
from stillframe._save.core_save import CoreSave
from stillframe._save.engine import core_of
from stillframe._save.handle import SaveHandle
from stillframe._tree import skeleton
from stillframe._watch import gate

FACTS = {
    "state": "durable",
    "code": 0,
    "note": "",
    "index": -1,
    "phase": "write",
    "nbytes": 4096,
    "captured_nbytes": 400,
    "deferred_nbytes": 0,
    "slot_wait_ns": 0,
    "block_wait_ns": 0,
    "staged_after_ns": 1_000_000,
    "ended_after_ns": 2_000_000,
    "peak_pool_bytes": 4096,
    "io_mode": "direct",
    "fallbacks": ("The file system refuses O_DIRECT.",),
    "over_slots": False,
}


class Ticket:
    """A fake ticket without a completion thread: its copy counts as staged once the test has given
    the verdict."""

    number = 1 << 60  # no real ticket has this number

    def __init__(self, **facts: Any) -> None:
        self.facts = {**FACTS, **facts}
        self.copied = self.confirmed = False

    def wait(self, what: int, timeout: float | None) -> bool:
        if what == _core.WAIT_COPIED:
            self.copied = True  # a waiting thread helps
        return self.copied if what == _core.WAIT_COPIED else self.confirmed

    def confirm(self, torn: int) -> None:
        assert self.copied
        self.confirmed = True

    def is_staged(self) -> bool:
        return self.confirmed

    def state(self) -> str:
        return "durable" if self.confirmed else "staging"

    def report(self) -> dict[str, Any]:
        return self.facts


def save_of(ticket: Ticket, *, late: bool = False, entered: float | None = None) -> CoreSave:
    tree = skeleton.build({"w": torch.zeros(9)})
    deferral = gate.Deferral()
    if late:
        deferral.indices = [0]
    now = time.perf_counter() if entered is None else entered
    return CoreSave(
        ticket,
        tree,
        deferral,
        path="a.pt",
        given="a.pt",
        on_durable=None,
        entered=now,
    )


@pytest.mark.parametrize("wait", [SaveHandle.wait_staged, SaveHandle.result])
def test_waiting_thread_helps_to_copy_and_gives_the_verdict(wait):
    """No other thread is needed: at the end of the process the completion thread has ended."""
    ticket = Ticket()
    wait(save_of(ticket, late=True), 60)
    assert ticket.copied and ticket.confirmed


@pytest.mark.parametrize("state", ["staging", "staged", "writing"])
def test_running_save_is_not_reported_as_ended(state):
    save = save_of(Ticket(state=state))
    with pytest.raises(AssertionError, match=state):
        save.settle()
    assert not save._outcome.settled


@pytest.mark.parametrize(
    ("facts", "kind", "words"),
    [
        ({"code": _core.ECANCELLED}, CancelledError, "the save of a.pt was cancelled"),
        (
            {"code": _core.EEXHAUSTED},
            stillframe.PoolExhaustedError,
            "the save of a.pt needs memory of the pool, and snapshots hold all of it",
        ),
        (
            {"code": -1003, "note": "device 0 has died"},
            stillframe.StillframeError,
            "the save of a.pt failed: device 0 has died",
        ),
    ],
)
def test_failure_with_a_cause_of_its_own_raises_its_own_error_class(facts, kind, words):
    error = save_of(Ticket())._error_of({**FACTS, **facts})
    assert type(error) is kind and str(error) == words


def test_system_error_has_phase_path_and_details():
    facts = {**FACTS, "code": -errno.EIO, "note": "the block at 4096", "phase": "sync"}
    error = save_of(Ticket())._error_of(facts)
    assert isinstance(error, stillframe.SaveError)
    assert (error.errno, error.filename, error.phase) == (errno.EIO, "a.pt", "sync")
    assert error.strerror == "Input/output error: the block at 4096"


def test_times_of_a_report_count_from_the_calls_entry():
    """Times do not count from the making of the ticket, which comes after the pickling."""
    save = save_of(Ticket(), entered=time.perf_counter() - 1000)
    report = save._report_of(FACTS)
    assert 1000 <= report.staged_after_s < report.durable_after_s


def test_blocked_s_ends_with_a_save_that_ends_within_its_call():
    save = save_of(Ticket(), entered=time.perf_counter() - 1000)
    assert 1000 <= save._report_of(FACTS).blocked_s < 2000
    save._call_time.end()
    assert save._report_of(FACTS).blocked_s == save._report_of(FACTS).blocked_s


def test_gate_wait_s_counts_a_step_that_waits_for_the_saves_end():
    """The thread that reports the end may get the interpreter lock first."""
    reports = []

    class Short(Ticket):
        def wait(self, what: int, timeout: float | None) -> bool:
            began = time.perf_counter()
            while time.perf_counter() == began:
                pass
            reports.append(save._report_of(FACTS))
            return super().wait(what, timeout)

    save = save_of(Short(), late=True)
    for _ in range(2):
        save.gate()
    reports += [save._report_of(FACTS) for _ in range(2)]
    during, again, after, later = (each.gate_wait_s for each in reports)
    assert 0 < during < again < after == later


def test_blocked_s_ends_with_an_interrupt_after_the_launch(monkeypatch):
    def submit(streams: Any) -> None:
        raise KeyboardInterrupt

    ticket = Ticket(launched_after_ns=5)
    monkeypatch.setattr(ticket, "submit", submit, raising=False)
    save = save_of(ticket)
    with pytest.raises(KeyboardInterrupt):
        save.launch()
    blocked_s = save._report_of(FACTS).blocked_s
    assert blocked_s == save._report_of(FACTS).blocked_s > 0
    completion.in_flight.pop(ticket.number)


def test_a_report_has_every_fallback():
    save = save_of(Ticket())
    save._fallbacks = ["One storage was copied to host memory."]
    assert save._report_of({**FACTS, "over_slots": True}).fallbacks == (
        "One storage was copied to host memory.",
        "The file system refuses O_DIRECT.",
        "The save was made inside another call of its thread and took a slot beyond max_in_flight.",
    )


def test_save_that_gets_no_slot_ends_as_cancelled(tmp_path):
    """A thread may wait for the save from before it is submitted."""
    with stillframe.Engine(pool_bytes="64MiB") as engine:
        core = core_of(engine)
        ticket = _core.Ticket(core, os.fsencode(tmp_path), b"a.pt", b"", bytearray(), 0)
        core.close(0)
        with pytest.raises(stillframe.StillframeError):
            ticket.submit()
        assert ticket.wait(_core.WAIT_ENDED, 10)
        assert ticket.state() == "cancelled"
