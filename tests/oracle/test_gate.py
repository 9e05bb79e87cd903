"""The gate: when a step waits for saves in flight, with hooks, closures, threads and fork."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fix_gate import FakePending, deferred, give_gradients, param, run_steps, skeleton_of
from stillframe._base import device as _device
from stillframe._watch import gate, ownership, step_hooks
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, AdamW
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


@pytest.fixture
def order() -> list[str]:
    return []


@pytest.fixture(autouse=True)
def pending(order: list[str]) -> Iterator[FakePending]:
    """Return a fake save in flight, which the first wait ends."""
    if ownership.active():
        gc.collect()
    assert not ownership.active()
    fake = FakePending(lambda: order.append("gate"))
    gate.track(fake)
    yield fake
    gate.untrack(fake)


def noted(order: list[str], word: str, value: Any = None) -> Callable[..., Any]:
    def note(*_: Any, **__: Any) -> Any:
        order.append(word)
        return value

    return note


def optimizer(order: list[str], cls: type[torch.optim.Optimizer] = SGD, **options: Any) -> Any:
    """Return an optimizer that records its update, which the gate must precede."""
    p = param()
    opt = cls([p], **{"lr": 0.1, **options})
    give_gradients(opt)
    before = p.detach().clone()

    def post(*_: Any) -> None:
        order.append("updated" if not torch.equal(before, p) else "unchanged")

    opt.register_step_post_hook(post)
    return opt


def test_step_without_a_closure_waits_at_once(order, pending):
    opt = optimizer(order)
    opt.step()
    assert order == ["gate", "updated"]
    opt.step(None)
    opt.step(closure=None)
    assert pending.waits == 1  # the first wait ended it


@pytest.mark.parametrize("as_keyword", [False, True])
def test_gate_comes_after_the_closure(order, as_keyword):
    opt = optimizer(order)
    closure = noted(order, "closure", "the loss")
    loss = opt.step(closure=closure) if as_keyword else opt.step(closure)
    assert loss == "the loss"
    assert order == ["closure", "gate", "updated"]


def test_update_comes_after_the_gate():
    opt = SGD([param()], lr=0.1)
    p = opt.param_groups[0]["params"][0]
    at_gate: list[Tensor] = []
    gate.wait()
    gate.track(FakePending(lambda: at_gate.append(p.detach().clone())))
    before = p.detach().clone()

    def closure() -> Tensor:
        give_gradients(opt)
        return p.sum()

    opt.step(closure)
    assert torch.equal(at_gate[0], before)
    assert not torch.equal(p, before)


CLASSES = [
    torch.optim.Adadelta,
    torch.optim.Adafactor,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.LBFGS,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_every_class_of_torch_calls_the_closure_before_it_writes(cls):
    gate.wait()
    p = nn.Parameter(torch.randn(64, 64))
    opt = cls([p], lr=0.1)
    for _ in range(3):
        before = [p.detach().clone(), *(t.clone() for t in tensors_of(opt))]
        at_gate: list[list[Tensor]] = []
        gate.track(
            FakePending(
                lambda at_gate=at_gate: at_gate.append(
                    [p.detach().clone(), *(t.clone() for t in tensors_of(opt))]
                )
            )
        )

        def closure() -> Tensor:
            opt.zero_grad()
            loss = (p**2).sum()
            loss.backward()
            return loss

        opt.step(closure)
        assert not torch.equal(p, before[0])
        assert len(at_gate) == 1
        for was, is_ in zip(before, at_gate[0], strict=True):
            assert torch.equal(was, is_)


def tensors_of(opt: torch.optim.Optimizer) -> list[Tensor]:
    return [v for state in opt.state.values() for v in state.values() if isinstance(v, Tensor)]


def test_every_call_of_lbfgs_waits_before_the_write_that_follows(order):
    p = param()
    opt = LBFGS([p], max_iter=5)
    written: list[bool] = []
    last = p.detach().clone()

    def note() -> None:
        nonlocal last
        written.append(not torch.equal(last, p))
        last = p.detach().clone()

    def closure() -> Tensor:
        gate.track(FakePending(note))  # as if a save had been made since the last write
        last.copy_(p.detach())
        opt.zero_grad()
        loss = ((p - 1) ** 4).sum()
        loss.backward()
        return loss

    opt.step(closure)
    assert len(written) > 3
    assert not any(written)


def test_a_step_through_a_grad_scaler_waits(order):
    opt = optimizer(order)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    p = opt.param_groups[0]["params"][0]
    scaler.scale((p * 1.0).sum()).backward()
    scaler.step(opt)
    scaler.update()
    assert order == ["gate", "updated"]


def test_lightnings_closures_wait_after_on_before_optimizer_step(order):
    opt = optimizer(order)
    torch.optim.lr_scheduler.StepLR(opt, 10)

    def training_step(model: str) -> float:
        assert model == "model"
        order.extend(["forward", "backward", "on_before_optimizer_step"])
        return 1.5

    assert opt.step(closure=functools.partial(training_step, "model")) == 1.5
    assert order == ["forward", "backward", "on_before_optimizer_step", "gate", "updated"]


def test_unregistered_class_waits_before_its_closure(order):
    class Sam(SGD):
        def step(self, closure: Any = None) -> Any:
            order.append("perturb")
            loss = closure()
            super().step()
            return loss

    opt = optimizer(order, Sam)
    opt.step(noted(order, "closure"))
    assert order[:3] == ["gate", "perturb", "closure"]


def test_registered_class_waits_after_its_closure(order):
    class Vouched(SGD):
        def step(self, closure: Any = None) -> Any:
            loss = closure()
            super().step()
            return loss

    gate.register_optimizer(Vouched)
    opt = optimizer(order, Vouched)
    opt.step(noted(order, "closure"))
    assert order[:2] == ["closure", "gate"]


def test_registered_class_that_writes_before_its_closure_tears_the_save(order, pending):
    class Liar(SGD):
        def step(self, closure: Any = None) -> Any:
            order.append("step")

    gate.register_optimizer(Liar)
    opt = optimizer(order, Liar)
    opt.step(noted(order, "closure"))
    owner = ownership.find(opt)
    assert owner is not None and owner.distrusted
    opt.step(noted(order, "closure"))
    assert order == ["step", "unchanged", "gate", "step", "unchanged"]


def test_gate_runs_before_other_pre_hooks(order):
    opt = optimizer(order)
    opt.register_step_pre_hook(noted(order, "instance hook"))
    opt.step(noted(order, "closure"))
    assert order == ["gate", "instance hook", "closure", "updated"]


def test_gate_runs_before_other_global_pre_hooks(order):
    opt = optimizer(order)
    handle = register_optimizer_step_pre_hook(noted(order, "global hook"))
    try:
        opt.step(noted(order, "closure"))
    finally:
        handle.remove()
    assert order == ["gate", "global hook", "closure", "updated"]


def test_gate_hook_moves_before_older_hooks():
    script = (
        "from torch.optim.optimizer import register_optimizer_step_pre_hook as r\n"
        "from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks\n"
        "r(lambda *a: None)\n"
        "from stillframe._watch import step_hooks\n"
        "assert next(iter(hooks.values())) is step_hooks._before_step, hooks\n"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", script]) == 0


def test_writes_of_foreign_post_hooks_are_observed():
    p, q = param(), param()
    opt = Adam([p, q])

    def shrink(*_: Any) -> None:
        p.data.mul_(0.9)

    handle = register_optimizer_step_post_hook(shrink)
    try:
        run_steps(opt, 5)
    finally:
        handle.remove()
    assert deferred(p, q) == [False, True]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's imports give it
def test_a_compiled_step_waits_every_time(order):
    gate.wait()
    order.clear()
    opt = AdamW([param()])
    give_gradients(opt)
    step = torch.compile(lambda: opt.step(), backend="eager")
    for _ in range(4):
        gate.track(FakePending(noted(order, "gate")))
        step()
    assert order == ["gate"] * 4


def test_an_optimizer_in_the_backward_waits(order):
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    made = {p: SGD([p], lr=0.1) for p in module.parameters()}
    first = {p: p.detach().clone() for p in made}
    at_gate: list[bool] = []
    gate.wait()
    gate.track(FakePending(lambda: at_gate.extend(torch.equal(first[p], p) for p in made)))
    for p in module.parameters():
        p.register_post_accumulate_grad_hook(lambda p: made[p].step())
    module(torch.randn(2, 8)).sum().backward()
    assert at_gate == [True] * 4
    assert not any(torch.equal(first[p], p) for p in made)


def test_gradient_accumulation_waits_only_at_the_step(order):
    opt = optimizer(order)
    p = opt.param_groups[0]["params"][0]
    for _ in range(4):
        (p * 0.1).sum().backward()
        order.append("backward")
    opt.step()
    assert order == ["backward"] * 4 + ["gate", "updated"]


def test_gate_waits_once_for_every_save(pending):
    others = [FakePending() for _ in range(3)]
    for other in others:
        gate.track(other)
    gate.wait()
    gate.wait()
    assert [f.waits for f in (pending, *others)] == [1, 1, 1, 1]


def test_untracked_save_is_not_waited_for(pending):
    gate.untrack(pending)
    gate.untrack(pending)
    gate.wait()
    assert pending.waits == 0


def test_interrupted_wait_continues_at_the_next_gate(order):
    gate.wait()

    class Interrupted(FakePending):
        def gate(self) -> None:
            super().gate()
            if self.waits == 1:
                raise KeyboardInterrupt

    fake = Interrupted()
    gate.track(fake)
    opt = optimizer(order)
    with pytest.raises(KeyboardInterrupt):
        opt.step()
    assert "updated" not in order
    opt.step()
    assert fake.waits == 2
    gate.wait()
    assert fake.waits == 2


def test_save_made_during_a_wait_is_waited_for(order):
    gate.wait()
    inner = FakePending()
    gate.track(FakePending(lambda: gate.track(inner)))
    optimizer(order).step()
    assert inner.waits == 1


def test_a_signal_handler_may_save_and_wait_inside_a_step(order):
    p = param()
    opt = Adam([p])
    run_steps(opt, 4)
    seen: list[bool] = []

    def handler(*_: Any) -> None:
        seen.extend(deferred(p))
        gate.wait()

    old = signal.signal(signal.SIGUSR1, handler)
    try:
        fake = FakePending(lambda: fake.waits == 1 and signal.raise_signal(signal.SIGUSR1))
        gate.track(fake)
        run_steps(opt, 1)
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert seen == [False, True]


# ---- threads ----------------------------------------------------------------------------------


def test_step_of_another_thread_waits_until_the_save_is_tracked(order):
    gate.wait()
    order.clear()
    p = param()
    opt = Adam([p])
    run_steps(opt, 4)
    deferral = gate.defer(skeleton_of([p]), overlap=True)
    assert deferral.indices == [0]
    stepped = threading.Event()

    def train() -> None:
        run_steps(opt, 1)
        stepped.set()

    thread = threading.Thread(target=train)
    thread.start()
    assert not stepped.wait(0.2)
    order.append("launched")
    gate.track(FakePending(noted(order, "gate")))
    assert stepped.wait(60)
    thread.join()
    assert order == ["launched", "gate"]
    assert deferral.overtaken is False


def test_failed_call_releases_waiting_threads():
    p = param()
    opt = Adam([p])
    run_steps(opt, 4)
    deferral = gate.defer(skeleton_of([p]), overlap=True)
    thread = threading.Thread(target=run_steps, args=(opt, 1))
    thread.start()
    time.sleep(0.05)
    assert thread.is_alive()
    ref = weakref.ref(deferral)
    del deferral  # the call raised, and its frame is gone
    thread.join(60)
    assert not thread.is_alive() and ref() is None


def test_step_stops_waiting_for_a_call_that_never_ends(monkeypatch):
    monkeypatch.setattr(gate, "_CALL_TIMEOUT_S", 0.05)
    p = param()
    opt = Adam([p], fused=True)  # the version does not change
    run_steps(opt, 4)
    deferral = gate.defer(skeleton_of([p]), overlap=True)
    thread = threading.Thread(target=run_steps, args=(opt, 1))
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert deferral.torn() == 0


def test_step_inside_the_save_call_tears_the_save():
    p = param()
    opt = Adam([p], fused=True)
    run_steps(opt, 4)
    deferral = gate.defer(skeleton_of([p]), overlap=True)
    run_steps(opt, 1)
    assert deferral.torn() == 0


def test_close_ends_a_deferral_without_a_save():
    p = param()
    opt = Adam([p])
    run_steps(opt, 4)
    gate.defer(skeleton_of([p]), overlap=True).close()
    assert not gate.unlaunched_calls
    gate.defer(skeleton_of([torch.zeros(4096)]), overlap=True)
    assert not gate.unlaunched_calls


# ---- fork -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_child_waits_for_nothing_and_keeps_observing(pending):
    p = param()
    opt = SGD([p], lr=0.1, momentum=0.9, foreach=False)
    gate.untrack(pending)
    run_steps(opt, 4)
    gate.track(pending)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            before = deferred(p)
            run_steps(opt, 1)
            code = 0 if pending.waits == 0 and before == [True] and deferred(p) == [True] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    gate.wait()
    assert pending.waits == 1


# ---- cost -------------------------------------------------------------------------------------


def test_optimizer_whose_storages_are_decided_costs_microseconds_a_step():
    gate.wait()
    p = param()
    opt = SGD([p], lr=0.1, momentum=0.9)
    run_steps(opt, 4)
    best = float("inf")
    for _ in range(20):
        start = time.thread_time()
        for _ in range(100):
            step_hooks._before_step(opt, (opt,), {})
            step_hooks._after_step(opt, (opt,), {})
        best = min(best, (time.thread_time() - start) / 100)
    assert best < 50e-6  # 4 us on an idle machine


def test_more_than_a_thousand_storages_are_deferred_together():
    params = [param(2048) for _ in range(400)]
    opt = AdamW(params, foreach=True)
    run_steps(opt, 20)  # the observer's budget is processor time, which the host's load increases
    tensors = [*params, *(t for s in opt.state.values() for t in s.values() if t.numel() > 1)]
    for _ in range(3):
        deferral = gate.defer(skeleton_of(tensors), overlap=True)
        deferral.close()
        assert len(deferral.indices) == 1200
        assert deferral.torn() == -1


@pytest.mark.parametrize("captured", [True, False])
def test_step_captured_by_torch_makes_its_optimizer_captured(captured, monkeypatch):
    """Replays write without running hooks, so nothing may be deferred from then on."""
    monkeypatch.setattr(_device, "_is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    opt = AdamW([param()], lr=0.1)
    give_gradients(opt)
    opt.step()
    owner = ownership.find(opt)
    assert owner is not None and owner.distrusted == captured
