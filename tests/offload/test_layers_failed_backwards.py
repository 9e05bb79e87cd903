"""A failed backward has ended when its caller gets the error: nothing of it happens later.

That holds even if autograd's engine releases the pass later, as it does on a device."""

import contextlib
import copy
import threading
import time

import pytest
import torch
from fix_offloading import WIDTH, Bang, mlp, numbers, same, squares, train
from stillframe._offload import gradients
from stillframe.errors import StillframeError
from stillframe.offload import offload_layers
from torch import nn

HELD_S = 0.3  # the time for which the engine keeps a callback


class Holding(torch._C._ImperativeEngine):
    """An autograd engine that drops a pass's callbacks late, on another thread."""

    def __init__(self):
        self.dropping = []

    def queue_callback(self, callback):
        held = [callback]
        self.dropping.append(threading.Timer(HELD_S, held.clear))
        self.dropping[-1].start()
        return super().queue_callback(callback)


@pytest.fixture
def holding(monkeypatch):
    engine = Holding()
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", engine)
    yield engine
    for each in engine.dropping:
        each.join()


class Failing(nn.Module):
    """An operation that raises in the middle of its backward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fails = False

    def forward(self, x):
        x = self.first(x)
        return self.second(Bang.apply(x) if self.fails else x)


@contextlib.contextmanager
def slow_additions(monkeypatch):
    real = gradients._add

    def add(parameter, total):
        time.sleep(0.05)
        real(parameter, total)

    with monkeypatch.context() as patch:
        patch.setattr(gradients, "_add", add)
        yield


@pytest.mark.parametrize("nth", range(3))
def test_a_failed_backward_adds_nothing_after_its_error(either, holding, nth, monkeypatch):
    model = nn.Sequential(*(Failing() for _ in range(3)))
    parameters = list(model.parameters())
    with offload_layers(model, device="cpu") as handle:
        squares(model, numbers(0)).backward()
        model[nth].fails = True
        loss = squares(model, numbers(1))
        with slow_additions(monkeypatch), pytest.raises(ArithmeticError):
            loss.backward()
        assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
        model.zero_grad()
        assert all(p.grad is None for p in parameters)
        time.sleep(2 * HELD_S)
        assert all(p.grad is None for p in parameters)
        assert handle.resident() == [] and handle.stats()["slots_in_use"] == 0


def test_training_can_go_on_right_after_a_failed_backward(either, holding):
    model = nn.Sequential(*(Failing() for _ in range(3)))
    plain = copy.deepcopy(model)
    with offload_layers(model, device="cpu"):
        for nth in range(3):
            for each in (plain, model):
                each.zero_grad()
                each[nth].fails = True
                with pytest.raises(ArithmeticError):
                    squares(each, numbers(nth)).backward()
                each[nth].fails = False
            # Layers that finished before the error have added their gradients, as without
            # offloading.
            grads = [[p.grad for p in each[nth + 1 :].parameters()] for each in (plain, model)]
            assert same(*grads)
            assert all(same(a, b) for a, b in zip(train(plain), train(model), strict=True))


class Catching(torch.autograd.Function):
    """An operation that runs another backward inside its own and catches its error."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            inner = ctx.layer(numbers(5).requires_grad_())
            with pytest.raises(ArithmeticError):
                Bang.apply(inner).sum().backward()
            ctx.layer(numbers(6).requires_grad_()).sum().backward()
        return grad, None


def test_a_backward_inside_another_one_may_fail_alone(either, holding):
    model, inner = mlp(depth=3), mlp(depth=1)
    plain, plain_inner = copy.deepcopy(model), copy.deepcopy(inner)
    with offload_layers(model, device="cpu"), offload_layers(inner, device="cpu"):
        for net, other in ((plain, plain_inner), (model, inner)):
            x = Catching.apply(net[:1](numbers(0)), other)
            net[1:](x).square().mean().backward()
        for one, two in ((plain, model), (plain_inner, inner)):
            assert same([p.grad for p in one.parameters()], [p.grad for p in two.parameters()])


def test_failed_backward_of_one_thread_does_not_affect_another(either):
    models = [nn.Sequential(*(Failing() for _ in range(3))) for _ in range(2)]
    models[0][1].fails = True
    plain = copy.deepcopy(models[1])
    squares(plain, numbers(0)).backward()
    wanted = [p.grad for p in plain.parameters()]
    wrong = []

    def fail():
        for _ in range(20):
            with contextlib.suppress(ArithmeticError):
                squares(models[0], numbers(0)).backward()
                wrong.append("no error")
            models[0].zero_grad()
            wrong.extend(p for p in models[0].parameters() if p.grad is not None)

    def succeed():
        for _ in range(20):
            models[1].zero_grad()
            squares(models[1], numbers(0)).backward()
            if not same([p.grad for p in models[1].parameters()], wanted):
                wrong.append("other gradients")

    with contextlib.ExitStack() as stack:
        for model in models:
            stack.enter_context(offload_layers(model, device="cpu"))
        threads = [threading.Thread(target=each) for each in (fail, succeed)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert not wrong


def test_removing_the_last_handle_restores_autograds_engine():
    before = torch.autograd.Variable._execution_engine
    first, second = (offload_layers(mlp(depth=1), device="cpu") for _ in range(2))
    first.remove()
    assert torch.autograd.Variable._execution_engine is not before
    second.remove()
    second.remove()
    assert torch.autograd.Variable._execution_engine is before


def test_backward_not_called_through_torch_autograd_is_refused():
    model = mlp(depth=2)
    engine = torch.autograd.Variable._execution_engine
    with offload_layers(model, device="cpu"):
        loss = squares(model, numbers(0))
        with pytest.raises(StillframeError, match="not called through torch"):
            engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, True)
        assert all(p.grad is None for p in model.parameters())
