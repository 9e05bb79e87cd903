"""The verdict on a copy that is made after its call, requested by several threads."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from stillframe._save.verdict import Verdict
from stillframe._watch import gate


class Deferral(gate.Deferral):
    """A fake deferral that gives prepared answers in order."""

    def __init__(self, *answers: int) -> None:
        super().__init__()
        self.indices, self.answers = [0], list(answers)
        self.distrusted: list[int] = []

    def torn(self) -> int:
        return self.answers.pop(0)

    def distrust(self, index: int) -> None:
        self.distrusted.append(index)


class Pending:
    def gate(self) -> bool:
        return True


def is_waited_for(pending: Pending) -> bool:
    return id(pending) in gate._pendings


def test_second_verdict_repeats_the_first_without_another_comparison():
    verdict = Verdict(Deferral(-1, 0))
    assert [verdict.judge(), verdict.judge()] == [-1, -1]


def test_first_verdict_counts_if_a_signal_handler_asks_meanwhile(monkeypatch):
    deferral = Deferral(-1, 0)
    verdict = Verdict(deferral)
    answer, inner = deferral.torn, []

    def torn() -> int:
        if not inner:
            inner.append(None)
            inner.append(verdict.judge())
        return answer()

    monkeypatch.setattr(deferral, "torn", torn, raising=False)
    assert verdict.judge() == -1 and inner == [None, -1]


def test_step_waits_from_the_launch_until_the_copy_is_over():
    pending, verdict = Pending(), Verdict(Deferral(-1))
    assert not is_waited_for(pending)
    verdict.make_steps_wait(pending)
    assert is_waited_for(pending)
    verdict.let_steps_go(pending)
    verdict.let_steps_go(pending)
    assert not is_waited_for(pending)


def test_no_step_waits_for_a_copy_that_is_over_before_its_launch():
    pending, verdict = Pending(), Verdict(Deferral(-1))
    verdict.let_steps_go(pending)
    verdict.make_steps_wait(pending)
    assert not is_waited_for(pending)


def test_no_step_waits_for_a_copy_that_is_over_while_it_is_launched(monkeypatch):
    pending, verdict, track = Pending(), Verdict(Deferral(-1)), gate.track

    def late(*given: Any) -> None:
        verdict.let_steps_go(pending)  # as the completion thread calls it
        track(*given)

    monkeypatch.setattr(gate, "track", late)
    verdict.make_steps_wait(pending)
    assert not is_waited_for(pending)


def test_storage_without_names_is_called_by_its_number_and_its_owner_is_distrusted():
    deferral = Deferral()
    verdict = Verdict(deferral)
    assert verdict.stop_deferring_storage_owner(3, []) == "storage 3"
    assert verdict.stop_deferring_storage_owner(4, ["a", "b"]) == "a, b"
    assert deferral.distrusted == [3, 4]


def test_ended_verdict_keeps_no_objects_alive():
    deferral = Deferral(-1)
    gone, verdict = weakref.ref(deferral), Verdict(deferral)
    verdict.end(Pending())
    del deferral
    gc.collect()
    assert gone() is None and not verdict.is_needed
