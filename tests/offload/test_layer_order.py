"""Layers are prefetched in backward too if checkpoints run parts of forward again."""

import copy

import pytest
import torch
from fix_offloading import WIDTH, agree, mlp, numbers, state, train
from stillframe.offload import offload_layers
from torch import nn
from torch.utils.checkpoint import checkpoint

DEPTH = 6


def chunked(size, use_reentrant):
    """Return a loss computed through checkpoints that contain a given number of layers each."""

    def loss(model, batch):
        x = batch.requires_grad_()
        for start in range(0, len(model), size):
            x = checkpoint(model[start : start + size], x, use_reentrant=use_reentrant)
        return (x**2).mean()

    return loss


def copies(handle, step):
    """Count the groups that a step onloaded, prefetched, and prefetched needlessly."""
    before = handle.stats()
    step()
    after = handle.stats()
    return [
        after[name] - before[name]
        for name in ("groups_onloaded", "groups_prefetched", "groups_stale")
    ]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers_are_prefetched_in_forward_and_backward(fake, use_reentrant):
    model = mlp(depth=DEPTH)
    loss = chunked(1, use_reentrant)
    with offload_layers(model, device="cpu") as handle:
        fake.delay(100_000)
        for step in range(2):
            value = loss(model, numbers(step))
            assert copies(handle, value.backward) == [DEPTH, DEPTH - 1, 0]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_backward_prefetches_in_the_order_of_the_last_one(fake, size, use_reentrant):
    """In backward, a checkpoint around several layers runs them forward and then backward."""
    model = mlp(depth=DEPTH)
    loss = chunked(size, use_reentrant)
    with offload_layers(model, device="cpu") as handle:
        loss(model, numbers(0)).backward()
        value = loss(model, numbers(1))
        onloaded, ahead, stale = copies(handle, value.backward)
        # only the first layer of the backward is not prefetched
        assert onloaded - ahead == 1 and stale == 0
        assert onloaded <= DEPTH + (size - 2) * (DEPTH // size) * 2


def test_backward_in_a_new_order_is_still_correct(either):
    class Turns(nn.Sequential):
        """A model in which every second forward uses another order and other checkpoints."""

        turn = 0

        def forward(self, x):
            self.turn += 1
            x = x.requires_grad_()
            order = list(self)[:: 1 if self.turn % 2 else -1]
            for layer in order:
                if self.turn % 3:
                    x = checkpoint(layer, x, use_reentrant=self.turn % 3 == 1)
                else:
                    x = layer(x)
            return x

    torch.manual_seed(1)
    model = Turns(*mlp(nn.BatchNorm1d(WIDTH), depth=4))
    other = copy.deepcopy(model)
    with offload_layers(other, device="cpu", keep=1) as handle:
        assert agree(train(model, steps=7), train(other, steps=7))
        assert handle.stats()["bytes_lingering"] == 0


def test_layer_rerun_by_a_checkpoint_is_on_the_device_once(fake):
    """That includes checkpoints that stop as soon as backward has what it needs."""
    model = mlp(nn.BatchNorm1d(WIDTH), depth=DEPTH)
    other = copy.deepcopy(model)
    with offload_layers(other, device="cpu") as handle:
        for use_reentrant in (False, True):
            loss = chunked(2, use_reentrant)
            for step in range(2):
                loss(model, numbers(step)).backward()
                loss(other, numbers(step)).backward()
                assert handle.resident() == []
                assert handle.stats()["slots_in_use"] == 0
        assert all(map(torch.equal, state(model), state(other)))
