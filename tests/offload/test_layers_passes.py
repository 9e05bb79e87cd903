"""Successive passes: none uses a prefetch of an earlier one, and the host waits once for each."""

import copy
import functools

import pytest
import torch
from fix_offloading import WIDTH, agree, mlp, numbers, same, squares, state, train, twice
from stillframe.offload import offload_layers
from torch import nn
from torch.utils.checkpoint import checkpoint


def in_place(layer):
    for parameter in layer.parameters():
        parameter.mul_(2)


def sparsely_in_place(layer):
    """Write to an element that the fingerprint does not sample."""
    layer[0].weight.view(-1)[1] += 1


def through_data(layer):
    """Write through `.data`, which changes no version."""
    for parameter in layer.parameters():
        parameter.data.mul_(2)


def other_memory(layer):
    for parameter in layer.parameters():
        parameter.data = parameter.data * 2


def sparsely_other_memory(layer):
    memory = layer[0].weight.data.clone()
    memory.view(-1)[1] += 1
    layer[0].weight.data = memory


def other_parameters(layer):
    layer[0].weight = nn.Parameter(2 * layer[0].weight)


class Sparse(torch.optim.Optimizer):
    """A module that writes one element that the fingerprint and the version counter both miss."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.data.view(-1)[1] += 1


def in_a_step(layer):
    Sparse([layer[0].weight]).step()


WRITES = [
    in_place,
    sparsely_in_place,
    through_data,
    other_memory,
    sparsely_other_memory,
    other_parameters,
    in_a_step,
]


@pytest.mark.parametrize("write", WRITES)
@torch.no_grad()
def test_prefetch_of_an_interrupted_pass_is_not_used_by_the_next(either, write):
    model = mlp(depth=4)
    plain = copy.deepcopy(model)
    with offload_layers(model, device="cpu") as handle:
        for nth in range(3):
            model[: nth + 1](numbers(0))
            assert handle.resident() == [f"layers[{nth + 1}]"]  # it is being prefetched
            handle.wait()
            for each in (model, plain):
                write(each[nth + 1])
            assert torch.equal(model[nth + 1 :](numbers(1)), plain[nth + 1 :](numbers(1)))
            assert handle.stats()["groups_stale"] == nth + 1


@torch.no_grad()
def test_prefetch_is_used_if_nothing_was_written(either):
    model = mlp(depth=4)
    with offload_layers(model, device="cpu") as handle:
        model(numbers(0))
        assert handle.stats()["groups_prefetched"] == 3
        assert handle.stats()["groups_stale"] == 0


def test_prefetch_of_a_failed_layer_is_not_used(either):
    """The write hits one element that the fingerprint does not sample."""
    model = mlp(depth=3)
    plain = copy.deepcopy(model)

    def fail(module, args, output):
        raise ArithmeticError("in forward")

    with offload_layers(model, device="cpu"):
        hook = model[0][0].register_forward_hook(fail)
        with pytest.raises(ArithmeticError):
            model(numbers(0))
        hook.remove()
        for each in (model, plain):
            each[1][0].weight.data.view(-1)[1] += 1
        assert torch.equal(model[1:](numbers(1)), plain[1:](numbers(1)))


def test_layers_that_share_a_module_are_prefetched_in_order(either):
    """While one layer computes, the weights of the shared module are on the device."""
    shared = nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), shared) for _ in range(3)))
    for keep in (0, 3):
        assert agree(*twice(copy.deepcopy(model), parts=2, offloaded={"keep": keep}))
    with offload_layers(model, device="cpu") as handle:
        parameters = set(model.parameters())

        def inspect(module, args):
            assert {p for layer in handle._layers for p in layer.parameters()} == parameters

        for layer in model:
            layer[0].register_forward_pre_hook(inspect)
        squares(model, numbers(0)).backward()


# ---- the host -----------------------------------------------------------------------------


def reentrant(model, batch):
    x = batch.requires_grad_()
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=True)  # each checkpoint has its own backward
    return (x**2).mean()


def again(model, batch):
    x = batch.requires_grad_()
    for layer in model:
        # a checkpoint that stops when it has all that backward needs
        x = checkpoint(layer, x, use_reentrant=False)
    return (x**2).mean()


@pytest.mark.parametrize("loss", [squares, reentrant, again])
def test_host_waits_once_per_backward(fake, loss):
    model = mlp(depth=6)
    other = copy.deepcopy(model)
    # So many layers' gradients may be in flight.
    with offload_layers(other, device="cpu", keep=4) as handle:
        fake.delay(1_000_000)
        for step in range(2):
            value = loss(other, numbers(step))
            before = handle.stats()["host_waits"]
            value.backward()
            assert handle.stats()["host_waits"] == before + 1
            loss(model, numbers(step)).backward()
            # Gradients are read right after backward, without a wait.
            norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.01) for each in (model, other)]
            assert same(norms[:1], norms[1:])
    assert same(state(model), state(other))


def test_nested_backwards_add_gradients_as_without_offloading(either):
    plain, offloaded = twice(mlp(nn.BatchNorm1d(WIDTH), depth=5), loss=reentrant, parts=2)
    assert agree(plain, offloaded)


def test_failed_nested_backward_leaves_the_gradients_of_a_plain_one(either):
    class Fails(nn.Linear):
        fails = True

        def forward(self, x):
            y = super().forward(x)
            if self.fails and y.requires_grad:
                y.register_hook(functools.partial(fail, self))
            return y

    def fail(module, grad):
        raise ArithmeticError("in the middle")

    def steps(model):
        with pytest.raises(ArithmeticError):
            reentrant(model, numbers(0)).backward()
        seen = state(model)
        model[2].fails = False
        return [*seen, *(t for part in train(model, loss=reentrant) for t in part)]

    model = nn.Sequential(*mlp(depth=2), Fails(WIDTH, WIDTH), *mlp(depth=2))
    other = copy.deepcopy(model)
    with offload_layers(other, device="cpu"):
        assert same(steps(model), steps(other))
