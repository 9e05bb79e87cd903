"""Failed backwards whose end the engine tells late, as it does with a device: its thread lets go of
the pass after the caller has the error."""

import copy
import threading

import pytest
import torch
from fix_offloading import WIDTH, Bang, adam, agree, mlp, numbers, same, squares, state, train
from stillframe._offload import gradients, graph
from stillframe.errors import StillframeError
from stillframe.offload import offload_layers
from torch import nn
from torch.utils.checkpoint import checkpoint


class Failing(nn.Module):
    """Fails in the middle of its backward while `fails`."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.fails = False

    def forward(self, x):
        y = self.linear(torch.tanh(self.linear(x)))
        return Bang.apply(y) if self.fails else y


class Held(list):
    """Keeps the engine's callbacks, so that a pass is dropped when this is cleared."""


@pytest.fixture
def held(monkeypatch):
    kept, real = Held(), graph._AtEnd

    def make(*args):
        kept.append(real(*args))
        return kept[-1]

    monkeypatch.setattr(graph, "_AtEnd", make)
    return kept


@pytest.fixture
def landing(monkeypatch):
    """Gradients do not arrive before this event."""
    event, real = threading.Event(), gradients._land

    def land(*args):
        assert event.wait(60)
        real(*args)

    monkeypatch.setattr(gradients, "_land", land)
    yield event
    event.set()


def model_of():
    return nn.Sequential(*mlp(depth=2), Failing(), *mlp(depth=2))


def fail(model, batch):
    model[2].fails = True
    with pytest.raises(ArithmeticError):
        squares(model, batch).backward()
    model[2].fails = False


def grads(model):
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("accumulated", [False, True])
def test_gradients_that_arrive_after_the_error_are_not_added(either, held, landing, accumulated):
    model = model_of()
    landing.set()
    with offload_layers(model, device="cpu") as handle:
        parameters = list(model.parameters())
        if accumulated:
            squares(model, numbers(0)).backward()
        held.clear()
        landing.clear()
        fail(model, numbers(1))
        for parameter in parameters:
            parameter.grad = None
        landing.set()
        assert handle.resident() == []  # the next use of the layers
        handle._gradients.close()
        assert [p.grad for p in parameters] == [None] * len(parameters)


@pytest.mark.parametrize("when", ["before forward", "in forward", "in backward", "behind it"])
def test_late_drop_of_a_failed_pass_changes_nothing(either, held, when):
    model = model_of()
    other, now = copy.deepcopy(model), []

    def drop(*args):
        if now:
            now.clear()
            del held[:nr_failed]

    # The drop finds layers on the device, prefetched, and current in a backward.
    other[1].register_forward_hook(lambda *a: drop() if when == "in forward" else None)
    with offload_layers(other, device="cpu") as handle:
        if when == "in backward":
            next(iter(other[3].parameters())).register_hook(drop)
        optimizer = adam(other)  # before: the failed layer's module has the device's tensors
        fail(other, numbers(3))
        nr_failed = len(held)
        assert nr_failed
        now.append(True)
        if when == "before forward":
            drop()
        plain = train(model, steps=2)
        offloaded = train(other, steps=2, optimizer=lambda model: optimizer)
        drop()
        assert agree(plain, offloaded)
        assert handle.resident() == [] and handle.stats()["slots_in_use"] == 0
    assert same(state(model), state(other))


@pytest.mark.parametrize("use", ["forward", "wait", "stats", "resident", "state_dict", "remove"])
def test_next_use_takes_a_failed_layer_back_to_the_cpu(either, held, use):
    model = model_of()
    before = list(model.parameters())
    handle = offload_layers(model, device="cpu")
    uses = {"forward": lambda: model(numbers(0)), "state_dict": model.state_dict}
    fail(model, numbers(0))
    assert held
    assert any(a is not b for a, b in zip(before, model.parameters(), strict=True))
    uses.get(use, getattr(handle, use, None))()
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    handle.remove()


def test_failed_pass_that_is_still_held_is_not_taken_for_an_outer_one(either, held):
    """The second loss is there already, so no forward comes between the backwards."""
    model = model_of()
    other = copy.deepcopy(model)
    with offload_layers(other, device="cpu"):
        second = squares(other, numbers(1))
        fail(other, numbers(0))
        second.backward()
        squares(model, numbers(1)).backward()
        assert same(grads(model), grads(other))


def test_backward_called_in_a_node_of_another_adds_once(either):
    """The outer backward goes through the layers in other nodes only."""

    class Calls(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, inner):
            ctx.inner = inner
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            ctx.inner[0].backward()
            return grad, None

    def loss(model, batch):
        inner = (model[:1](batch) ** 2).mean()
        return (model[2:](Calls.apply(model[:2](batch), [inner])) ** 2).mean()

    model = mlp(depth=4)
    other = copy.deepcopy(model)
    plain = train(model, loss=loss)
    with offload_layers(other, device="cpu"):
        assert agree(plain, train(other, loss=loss))


def test_use_in_another_thread_does_not_fail_a_running_backward(either):
    model = mlp(depth=3)
    other, seen = copy.deepcopy(model), []

    def look(grad):
        thread = threading.Thread(target=lambda: seen.append(handle.resident()))
        thread.start()
        thread.join()

    with offload_layers(other, device="cpu") as handle:
        model[2][0].weight.register_hook(lambda grad: None)
        other[2][0].weight.register_hook(look)
        assert agree(train(model), train(other))
    assert seen


def test_forward_in_another_thread_fails_a_running_backward_with_a_reason(either):
    """Its gradients are not lost in silence."""
    model = mlp(depth=3)
    with offload_layers(model, device="cpu"):

        def forward(grad):
            thread = threading.Thread(target=model, args=(numbers(1),))
            thread.start()
            thread.join()

        model[1][0].weight.register_hook(forward)
        with pytest.raises(StillframeError, match="in another thread"):
            squares(model, numbers(0)).backward()
        assert not any(p.grad is not None for p in model[2].parameters())


def test_drop_does_not_wait_for_a_pass_that_ends(either, held, monkeypatch):
    """The garbage collector may drop a pass on the very thread that the end waits for."""
    model = mlp(depth=3)
    other = model_of()
    with offload_layers(model, device="cpu") as one, offload_layers(other, device="cpu") as two:
        fail(other, numbers(0))
        real, dropped = gradients._land, []

        def land(*args):
            if held:
                with two._passes._lock:  # the thread has it, and the drop comes on another
                    thread = threading.Thread(target=held.clear)
                    thread.start()
                    thread.join(60)
                    dropped.append(not thread.is_alive())
            real(*args)

        monkeypatch.setattr(gradients, "_land", land)
        callbacks = held[:]
        loss = squares(model, numbers(0))
        del callbacks
        loss.backward()
        assert dropped == [True]
        assert two.resident() == [] and one.resident() == []


def test_checkpoints_inside_a_failed_backward_add_nothing(either, held):
    def loss(model, batch):
        x = batch.requires_grad_()
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=True)
        return (x**2).mean()

    model = model_of()
    other = copy.deepcopy(model)
    with offload_layers(other, device="cpu"):
        optimizer = adam(other)
        other[2].fails = True
        with pytest.raises(ArithmeticError):
            loss(other, numbers(0)).backward()
        other[2].fails = False
        offloaded = train(other, loss=loss, optimizer=lambda model: optimizer)
        assert agree(train(model, loss=loss), offloaded)
