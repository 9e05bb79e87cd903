"""Modules whose forward writes or replaces tensors: backward behaves as in plain training."""

import copy

import pytest
import torch
from fix_offloading import WIDTH, agree, next_token, numbers, same, squares, state, tokens, train
from stillframe.offload import offload_layers
from torch import nn


class Writes(nn.Module):
    """A module with a buffer that backward needs. `when` says where forward writes to it."""

    def __init__(self, when):
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.when = when

    def forward(self, x):
        if self.when == "before":
            self.scale.mul_(0.9)
        y = self.linear(x) * self.scale
        if self.when == "after":
            self.scale.mul_(0.9)
        elif self.when == "by another, after":
            self.scale = self.scale * 0.9
        return y if self.when != "between" else self.twice(y)

    def twice(self, y):
        y = y * self.scale.mul_(0.9)
        return y.tanh()


def stack(when):
    torch.manual_seed(3)
    return nn.Sequential(*(Writes(when) for _ in range(3)))


def trained(model):
    """Train, and return the result or the error."""
    try:
        return train(model, parts=2)
    except RuntimeError as error:
        assert "has been modified by an inplace operation" in str(error)
        return None


@pytest.mark.parametrize("keep", [0, 3])
@pytest.mark.parametrize("when", ["before", "between", "after", "by another, after"])
def test_buffer_written_by_forward_equals_that_of_plain_training(either, when, keep):
    """That holds in the first backward too. If autograd refuses the write, so does offloading."""
    model = stack(when)
    other = copy.deepcopy(model)
    plain = trained(model)
    assert (plain is None) == (when in ("between", "after"))
    with offload_layers(other, device="cpu", keep=keep):
        found = trained(other)
        assert found is None if plain is None else agree(plain, found)


@pytest.mark.parametrize("settled", [False, True])
def test_backward_after_a_forward_that_wrote_buffers_is_refused_as_by_autograd(either, settled):
    model = stack("before")
    for layers in ([], list(model)):
        with offload_layers(layers, device="cpu") if layers else torch.enable_grad():
            loss = squares(model, numbers(0))
            if settled:
                model.state_dict()
            squares(model, numbers(1)).backward()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_running_statistics_of_another_forward_do_not_fail_a_backward(either):
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in "12")
    )
    other = copy.deepcopy(model)

    def steps(model):
        losses = [squares(model, numbers(step)) for step in range(3)]
        model.state_dict()
        for loss in losses:
            loss.backward()
        return [*losses, *state(model)]

    with offload_layers(other, device="cpu"):
        assert same(steps(model), steps(other))


class Replaced(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.linspace(0, 1, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x) * self.angles


def test_backward_uses_the_tensors_of_its_forward_even_if_replaced(either):
    """The gradient belongs to the parameter that forward used."""
    torch.manual_seed(4)
    model = nn.Sequential(*(Replaced() for _ in range(3)))
    other = copy.deepcopy(model)

    def step(model):
        loss = squares(model, numbers(0).requires_grad_())
        old = model[1].linear.weight
        model[1].angles = torch.zeros(WIDTH)
        model[1].linear.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        loss.backward()
        assert model[1].linear.weight.grad is None
        return [old.grad, *state(model)]

    with offload_layers(other, device="cpu"):
        assert same(step(model), step(other))
        assert agree(train(model), train(other))


class TiedMaxNorm(nn.Module):
    """A model whose forward writes to weights that its last layer uses."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH, max_norm=0.5)
        self.out = nn.Linear(WIDTH, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x):
        return self.out(self.embedding(x))


@pytest.mark.parametrize("keep", [0, 2])
def test_weights_written_by_one_layer_are_seen_by_another(either, keep):
    torch.manual_seed(5)
    model = TiedMaxNorm()
    other = copy.deepcopy(model)
    how = {"loss": next_token, "batch": tokens}
    with offload_layers([other.embedding, other.out], device="cpu", keep=keep):
        assert agree(train(model, **how), train(other, **how))


def test_cast_weights_written_by_forward_equal_those_of_plain_training(either):
    model = TiedMaxNorm()
    other = copy.deepcopy(model)
    how = {
        "loss": next_token,
        "batch": tokens,
        "around": lambda: torch.autocast("cpu", torch.bfloat16),
    }
    with offload_layers([other.embedding, other.out], device="cpu"):
        assert agree(train(model, **how), train(other, **how))
