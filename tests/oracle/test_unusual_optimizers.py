"""Our hooks around unusual optimizers: they never end a step, and failures never skip the gate."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import stillframe
import torch
from fix_gate import FakePending, deferred, give_gradients, param, run_steps
from fix_unusual import UNUSUAL, Plain, StateIsNoDict, train
from stillframe._watch import gate, ownership
from stillframe.testing import slow
from torch.optim import SGD, Adam


@pytest.fixture(autouse=True)
def nothing_logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ownership, "_logged", set())
    gate.wait()
    yield
    gate.wait()


by_class = pytest.mark.parametrize("cls", UNUSUAL, ids=lambda c: c.__name__)


@by_class
def test_unusual_optimizer_steps_as_without_stillframe(cls):
    p = param()
    opt = cls([p])
    for _ in range(5):
        before = p.detach().clone()
        train(opt, [p])
        assert not torch.equal(before, p)
    assert not ownership.active()


@by_class
def test_unusual_optimizer_waits_for_a_save(cls):
    p = param()
    opt = cls([p])
    train(opt, [p], 3)
    first = p.detach().clone()
    at_gate: list[bool] = []
    gate.track(FakePending(lambda: at_gate.append(torch.equal(p, first))))
    train(opt, [p])
    assert at_gate == [True]
    assert not torch.equal(p, first)


@by_class
def test_save_with_an_unusual_optimizer_holds_the_state_at_the_call(cls, tmp_path):
    p = param(1 << 16)
    opt = cls([p])
    train(opt, [p], 4)
    with slow("lane_copy", 0.02):
        for _ in range(2):
            wanted = p.detach().clone()
            handle = stillframe.async_save({"p": p.detach()}, tmp_path / "s.pt")
            train(opt, [p], 2)
            assert handle.result() is not None
            assert torch.equal(torch.load(tmp_path / "s.pt")["p"], wanted)


@by_class
def test_everything_is_captured_during_an_unusual_optimizers_step(cls):
    p, q = param(), param()
    watched = Adam([q])
    run_steps(watched, 4)
    opt = cls([p])
    seen: list[list[bool]] = []
    p.grad = torch.ones_like(p)
    opt.step(lambda: seen.append(deferred(q)))
    assert seen == [[False]]
    assert deferred(q) == [True]


def test_class_that_cannot_be_observed_is_logged_once(caplog):
    caplog.set_level(logging.INFO, "stillframe")
    cls = next(each for each in UNUSUAL if each.__name__ == "AttributesRaise")
    for _ in range(2):
        p = param()
        train(cls([p]), [p], 2)
    assert [record.message for record in caplog.records] == [
        f"stillframe: a {cls.__module__}.AttributesRaise cannot be watched (KeyError), so its"
        " parameters and state are copied during the call of each save"
    ]


@pytest.mark.parametrize("name", ["stepped", "enrol", "compare"])
def test_observer_that_runs_out_of_memory_makes_its_state_captured(name, monkeypatch):
    class Poor:
        def __init__(self, observer: Any) -> None:
            self.observer = observer

        def __getattr__(self, attribute: str) -> Any:
            if attribute == name:
                raise MemoryError
            return getattr(self.observer, attribute)

    p = param()
    opt = SGD([p], lr=0.1)
    run_steps(opt, 1)
    owner = ownership.find(opt)
    assert owner is not None
    owner.observer.forget()
    owner.observer = Poor(owner.observer)
    run_steps(opt, 4)
    assert deferred(p) == [False]
    assert not ownership.active()


def test_step_waits_for_saves_even_if_its_optimizer_cannot_be_observed(monkeypatch):
    def none(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(ownership._core, "Observer", none)
    pending = FakePending()
    gate.track(pending)
    p = param()
    opt = SGD([p], lr=0.1)
    run_steps(opt, 3)
    assert pending.waits == 1
    assert ownership.find(opt) is None and not ownership.active()


def test_failure_in_an_observer_does_not_fail_the_save():
    p, q = param(), param()
    failing, opt = SGD([p], lr=0.1), SGD([q], lr=0.1)
    run_steps(failing, 4)
    run_steps(opt, 4)
    failing.__class__ = StateIsNoDict
    del failing.param_groups
    assert deferred(p, q) == [False, True]


def test_failure_of_our_hooks_never_fails_load_state_dict():
    p = param()
    opt = SGD([p], lr=0.1)
    run_steps(opt, 4)
    owner = ownership.find(opt)
    assert owner is not None
    owner.observer = None
    opt.load_state_dict(opt.state_dict())
    assert owner.distrusted


def test_closure_is_passed_in_the_position_the_step_expects():
    class Odd(SGD):
        def step(self, scale: Any, closure: Any = None) -> Any:
            loss = None if closure is None else closure()
            super().step()
            return scale, loss

    stillframe.register_optimizer(Odd)
    p = param()
    opt = Odd([p], lr=0.1)
    order: list[str] = []
    scale = lambda: "scale"  # noqa: E731
    for args, kwargs in (
        ((scale, lambda: order.append("closure")), {}),
        ((scale,), {"closure": lambda: order.append("closure")}),
    ):
        gate.track(FakePending(lambda: order.append("gate")))
        give_gradients(opt)
        assert opt.step(*args, **kwargs)[0] is scale
    gate.track(FakePending(lambda: order.append("gate")))
    opt.step(scale)
    assert order == ["closure", "gate", "closure", "gate", "gate"]


class Late(Exception):
    """An exception that a signal handler raises, for instance to limit an epoch's time."""


def raise_late(*_: Any) -> None:
    raise Late


class Handler:
    def on_signal(self, *_: Any) -> None:
        raise Late

    __call__ = on_signal


@pytest.mark.parametrize(
    "handler", [raise_late, Handler().on_signal, Handler()], ids=["function", "method", "object"]
)
def test_exception_of_a_signal_handler_in_our_hooks_is_not_swallowed(handler):
    class Slow(Plain):
        signals = 0

        def __getattribute__(self, name: str) -> Any:
            if name == "_optimizer_load_state_dict_post_hooks" and Slow.signals:
                Slow.signals -= 1
                signal.raise_signal(signal.SIGUSR1)
            return super().__getattribute__(name)

    p = param()
    opt = Slow([p])
    Slow.signals = 1
    old = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(Late):
            train(opt, [p])
    finally:
        signal.signal(signal.SIGUSR1, old)
    train(opt, [p], 2)


def test_hook_error_of_another_thread_is_not_taken_for_a_handlers():
    p = param()
    opt = next(each for each in UNUSUAL if each.__name__ == "AttributesRaise")([p])
    errors: list[BaseException] = []

    def run() -> None:
        try:
            train(opt, [p], 3)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert errors == []


def test_ctrl_c_in_a_wait_ends_the_step():
    def interrupt() -> None:
        raise KeyboardInterrupt

    p = param()
    opt = Plain([p])
    train(opt, [p])
    before = p.detach().clone()
    gate.track(FakePending(interrupt))
    with pytest.raises(KeyboardInterrupt):
        train(opt, [p])
    assert torch.equal(p, before)
    for pending in list(gate._pendings.values()):
        gate.untrack(pending)
    train(opt, [p])


def test_report_says_why_an_unusual_optimizers_state_was_captured(tmp_path):
    p = param()
    opt = Plain([p])
    train(opt, [p], 3)
    report = stillframe.async_save({"p": p.detach()}, tmp_path / "s.pt").result()
    assert report is not None
    assert len(report.fallbacks) == 1
    assert "Plain was copied during the call, since its step is not known" in report.fallbacks[0]
    assert "stillframe.register_optimizer(Plain)" in report.fallbacks[0]
