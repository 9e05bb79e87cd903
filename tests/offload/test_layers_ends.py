"""Failures at the end of a backward: other steps still run, and the caller gets the first error.

No error is raised where no caller could catch it."""

import contextlib
import copy
import itertools
import logging
import time

import pytest
import stillframe
import torch
from fix_offloading import WIDTH, mlp, numbers, same, squares, train
from fix_waits import leased
from stillframe._offload import gradients
from stillframe._offload.run_all import run_all
from stillframe.offload import Offloader, offload_layers
from torch import nn
from torch.utils.checkpoint import checkpoint

BLOCK = 1 << 12


class Checkpointed(nn.Sequential):
    """A model with checkpoints, in which backward changes the norms' statistics too."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


@contextlib.contextmanager
def full(engine):
    """Fill the pool until the block ends."""
    with Offloader("cpu", engine=engine) as other:
        tickets = []
        with contextlib.suppress(stillframe.PoolExhaustedError):
            while True:
                tickets.append(other.offload([torch.zeros(BLOCK // 4)]))
        with contextlib.suppress(stillframe.PoolExhaustedError):
            while True:
                tickets.append(other.offload([torch.zeros(1)]))
        yield
        for ticket in tickets:
            ticket.release()


@pytest.fixture
def engine():
    with stillframe.Engine(pool_bytes=128 * BLOCK, block_bytes=BLOCK) as made:
        yield made


def errors(caplog):
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]


def works(model):
    """Return whether the model still trains like an untouched one."""
    model.zero_grad()
    with torch.no_grad():  # the statistics are those of the last forward that has ended
        plain = copy.deepcopy(model)
    return all(same(a, b) for a, b in zip(train(plain), train(model), strict=True))


def test_backward_with_a_full_pool_cleans_up_and_raises_once(either, engine, caplog):
    """The gradients do not fit into the pool, nor do the norm's statistics at the end."""
    model = nn.Sequential(
        *(Checkpointed(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(3))
    )
    with offload_layers(model, device="cpu", engine=engine) as handle:
        loss = squares(model, numbers(0).requires_grad_())
        handle.wait()
        before = [p.detach().clone() for p in model.parameters()]
        model.state_dict()  # waits until the changes of the forward are copied
        with full(engine), pytest.raises(stillframe.PoolExhaustedError):
            loss.backward()
        assert len(errors(caplog)) == 1
        assert "a backward has failed, and so has its end" in errors(caplog)[0]
        assert handle.resident() == [] and handle.stats()["slots_in_use"] == 0
        assert same(before, list(model.parameters()))
        del loss
        assert works(model)


def test_an_error_at_the_end_of_a_backward_reaches_the_caller(either, engine, monkeypatch, caplog):
    """Frozen layers have no gradients, so only the norm's statistics fail to fit."""
    model = Checkpointed(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).requires_grad_(False)
    with offload_layers([model], device="cpu", engine=engine) as handle:
        loss = squares(model, numbers(0).requires_grad_())
        model.state_dict()
        waits = []
        real = handle._offloader.wait_read
        monkeypatch.setattr(handle._offloader, "wait_read", lambda: waits.append(real()))
        with full(engine), pytest.raises(stillframe.PoolExhaustedError):
            loss.backward()
        assert waits and not errors(caplog)
        assert handle.resident() == [] and handle.stats()["slots_in_use"] == 0
        squares(model, numbers(0).requires_grad_()).backward()


@pytest.mark.parametrize("nth", range(3))
def test_forward_whose_buffers_cannot_leave_releases_its_memory(either, nth, monkeypatch):
    """It must release the only slot and its pool memory, which other forwards need."""
    model, other = (mlp(nn.BatchNorm1d(WIDTH), depth=3) for _ in range(2))
    with (
        stillframe.Engine(pool_bytes=64 * BLOCK, block_bytes=BLOCK) as engine,
        offload_layers(other, device="cpu", engine=engine),
        offload_layers(model, device="cpu", engine=engine) as handle,
    ):
        handle._offloader._max_slots = handle._residents._slots = 1
        count, real, before = itertools.count(), handle._offloader.offload, leased(engine)

        def offload(tensors):
            if next(count) == nth:
                raise stillframe.PoolExhaustedError("no room")
            return real(tensors)

        with monkeypatch.context() as patch, pytest.raises(stillframe.PoolExhaustedError):
            patch.setattr(handle._offloader, "offload", offload)
            model(numbers(0))
        assert handle.resident() == [] and handle.stats()["slots_in_use"] == 0
        assert leased(engine) == before
        assert works(other) and works(model)


@pytest.mark.parametrize("nth", range(3))
def test_failure_to_add_one_gradient_loses_no_other(either, nth, monkeypatch):
    """Gradients of other layers and of the next backward are complete, without partial sums."""
    model = mlp(depth=3)
    real, broken = gradients._add, model[nth][0].weight
    with offload_layers(model, device="cpu") as handle:
        handle._gradients._max_in_flight = 8  # no gradient is waited for before the end

        def add(parameter, total):
            if parameter is broken:
                raise ArithmeticError("no room")
            time.sleep(0.02)  # a backward that does not wait for the gradient misses it
            real(parameter, total)

        monkeypatch.setattr(gradients, "_add", add)
        with pytest.raises(ArithmeticError):
            squares(model, numbers(0)).backward()
        monkeypatch.undo()
        others = [layer for i, layer in enumerate(model) if i != nth]
        assert all(p.grad is not None for layer in others for p in layer.parameters())
        assert not handle._gradients._additions and not handle._gradients._sums
        assert works(model)


def test_remove_completes_even_after_errors(either):
    engine = stillframe.Engine(pool_bytes=1 << 20, block_bytes=BLOCK)
    model = mlp(depth=3)
    before = copy.deepcopy(model.state_dict())
    handle = offload_layers(model, device="cpu", engine=engine)
    model[:1](numbers(0))  # the second layer is being prefetched
    engine.close()
    with pytest.raises(stillframe.StillframeError, match="closed"):
        handle.remove()
    handle.remove()
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert works(model)
    model.to(torch.float64)
    offload_layers(model, device="cpu").remove()


def test_run_all_takes_every_step_and_raises_the_first_error():
    taken = []

    def step(number):
        def take():
            taken.append(number)
            if number % 2:
                raise ValueError(f"step {number // 4}")

        return take

    with pytest.raises(ValueError, match="step 0") as caught:
        run_all(step(number) for number in range(8))
    assert taken == list(range(8))
    assert caught.value.__notes__ == ["and then: ValueError('step 1')"]
