"""Optimizers wait for the layers of their own parameters, and for no others."""

import os

import pytest
import stillframe
import torch
from fix_gate import FakePending
from fix_offloading import adam, mlp, numbers, squares
from stillframe._watch import gate
from stillframe.offload import offload_layers
from torch import nn

LOST = 719  # CUDA_ERROR_LAUNCH_FAILED: the device is dead


def trained(model):
    """Return the model's optimizer after a backward."""
    squares(model, numbers(0)).backward()
    return adam(model)


@pytest.fixture
def on_its_way(fake):
    """Return a model whose second layer's copy takes long, and a counter of host waits."""
    model = mlp(depth=2)
    with offload_layers(model, device="cpu") as handle:
        optimizer = trained(model)
        fake.delay(200_000_000)
        model[0](numbers(1))
        before = handle.stats()["host_waits"]
        yield model, optimizer, lambda: handle.stats()["host_waits"] - before
        fake.delay(0)


def test_optimizer_step_waits_for_copies_that_read_its_weights(on_its_way):
    """A forward without a backward still computes with the weights of its call."""
    _, optimizer, waits = on_its_way
    optimizer.step()
    assert waits() == 1


def test_optimizer_over_views_of_the_weights_waits(on_its_way):
    model, _, waits = on_its_way
    alias = nn.Parameter(model[1][0].weight.detach())
    alias.grad = torch.ones_like(alias)
    torch.optim.SGD([alias], lr=0.1).step()
    assert waits() == 1


@pytest.mark.parametrize("captured", [False, True])
def test_optimizer_of_another_model_does_not_wait(fake, on_its_way, captured):
    """Nor does it drop prefetched layers."""
    model, _, waits = on_its_way
    own = trained(mlp())
    fake.capture(captured)
    own.step()
    fake.capture(False)
    assert waits() == 0
    model[1](numbers(2))
    assert waits() == 0


def test_optimizer_of_idle_layers_does_not_wait_for_others(on_its_way):
    other = mlp(depth=2)
    with offload_layers(other, device="cpu"):
        trained(other).step()
    assert on_its_way[2]() == 0


def test_prefetched_layer_survives_steps_of_other_optimizers(either):
    model, own = mlp(depth=2), trained(mlp())
    with offload_layers(model, device="cpu") as handle, torch.no_grad():
        x = model[0](numbers(0))
        own.step()
        model[1](x)
        assert (handle.stats()["groups_prefetched"], handle.stats()["groups_stale"]) == (1, 0)


@pytest.mark.parametrize("how", ["the device has died", "its engine is closed"])
def test_step_does_not_raise_errors_of_another_models_layers(fake, how, monkeypatch):
    model, resident = mlp(depth=2), mlp()
    own, before = trained(resident), resident[0][0].weight.detach().clone()
    engine = stillframe.Engine(pool_bytes=1 << 22, block_bytes=1 << 16)
    handle = offload_layers(model, device="cpu", engine=engine)
    prefetch = handle._prefetch
    monkeypatch.setattr(
        handle, "_prefetch", lambda *which, **how: fake.hold(True) or prefetch(*which, **how)
    )
    with torch.no_grad():
        model[0](numbers(0))
    if how == "the device has died":
        fake.fail_copy(1, LOST)
        fake.hold(False)
    else:
        fake.hold(False)
        engine.close()
    own.step()
    assert not torch.equal(before, resident[0][0].weight)
    with pytest.raises(stillframe.StillframeError):
        handle.wait()  # before this wait, nothing may query the device
        model[1](numbers(0))
    try:
        handle.remove()
    except stillframe.StillframeError:
        handle.remove()
    engine.close()


def test_step_with_a_closure_waits_after_the_closure(monkeypatch):
    model, order = mlp(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure():
        loss = squares(model, numbers(1))
        loss.backward()
        order.append("closure")
        with torch.no_grad():
            model[0](numbers(2))  # the next layer is being prefetched
        return loss

    with offload_layers(model, device="cpu") as layers:
        optimizer.step(closure)  # the first step registers the optimizer
        monkeypatch.setattr(layers._residents, "wait", lambda: order.append("wait"))
        gate.track(FakePending(lambda: order.append("gate")))
        optimizer.step(closure)
    assert order == ["closure", "closure", "gate", "wait"]


def test_step_in_a_forked_child_does_not_wait_for_the_parents_layers(monkeypatch):
    model, other = mlp(), nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    # only one parameter has a gradient
    optimizer = torch.optim.SGD([*model.parameters(), other], lr=0.1)
    with offload_layers(model, device="cpu") as layers, torch.no_grad():
        model[0](numbers(1))
        monkeypatch.setattr(layers._residents, "wait", lambda: os._exit(3))
        child = os.fork()
        if child == 0:
            try:
                optimizer.step()
            finally:
                os._exit(4 if other[0] > 0.95 else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
