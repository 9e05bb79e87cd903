"""Bounds on memory and slots of offloaded layers, and unusual modules."""

import copy
import functools

import pytest
import stillframe
import torch
from fix_offloading import WIDTH, Bang, Recurrent, agree, mlp, numbers, same, squares, train, twice
from stillframe.offload import offload_layers
from torch import nn
from torch.utils.checkpoint import checkpoint

# ---- what goes where ----------------------------------------------------------------------


def test_rnn_uses_its_weights_on_the_device(either):
    """An RNN keeps a list of its weights besides its parameters."""
    model = Recurrent()
    own = list(model.rnn._flat_weights)
    with offload_layers([model.rnn], device="cpu") as handle:
        found = []
        model.rnn.register_forward_pre_hook(lambda rnn, args: found.extend(rnn._flat_weights))
        (model(numbers(0)) ** 2).mean().backward()
        assert len(found) == len(own)
        assert not any(isinstance(weight, nn.Parameter) for weight in found)
        assert all(a is b for a, b in zip(model.rnn._flat_weights, own, strict=True))
        nbytes = sum(weight.nbytes for weight in own)
        assert handle.stats()["bytes_offloaded"] == nbytes  # only gradients are offloaded
    assert all(a is b for a, b in zip(model.rnn._flat_weights, own, strict=True))


class Decays(nn.Module):
    """A module whose forward writes to a buffer in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        self.scale.mul_(0.9)
        return self.linear(x) * self.scale


def test_changed_buffer_is_copied_back_once(either):
    model = Decays()
    with offload_layers([model], device="cpu", keep=1) as handle:
        squares(model, numbers(0)).backward()
        gradients = sum(p.nbytes for p in model.parameters())
        assert handle.stats()["bytes_offloaded"] == model.scale.nbytes + gradients


def test_changed_buffer_is_available_to_later_backwards(either):
    """A buffer counts as changing after the first forward that changes it."""
    model = nn.Sequential(Decays(), nn.Linear(WIDTH, WIDTH), Decays())
    other = copy.deepcopy(model)
    with offload_layers(other, device="cpu"):
        with torch.no_grad():
            assert torch.equal(model(numbers(0)), other(numbers(0)))
        assert agree(train(model), train(other))


def test_under_autocast_no_cast_weight_stays_on_the_device(either):
    model = mlp()
    seen = []

    def pack(tensor):
        seen.append(tuple(tensor.shape))
        return tensor

    with (
        offload_layers(model, device="cpu"),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16),
    ):
        squares(model, numbers(0))
    assert seen and (WIDTH, WIDTH) not in seen


def test_remove_returns_the_pool_memory(either):
    with stillframe.Engine(pool_bytes=1 << 24, block_bytes=1 << 16) as engine:
        model = mlp(nn.BatchNorm1d(WIDTH))
        handle = offload_layers(model, device="cpu", engine=engine)
        squares(model, numbers(0)).backward()
        assert engine.stats()["leased_bytes"] > 0
        handle.remove()
        model.zero_grad()
        assert engine.stats()["leased_bytes"] == 0


def test_a_pool_too_small_for_the_parameters_leaves_them_as_they_were(either):
    with stillframe.Engine(pool_bytes=1 << 17, block_bytes=1 << 16) as engine:
        model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(3)))
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(stillframe.PoolExhaustedError):
            offload_layers(model, device="cpu", engine=engine)
        assert engine.stats()["leased_bytes"] == 0
        torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


def test_backward_fits_into_a_pool_with_room_for_the_gradients_in_flight(request, either):
    """The pool has room for weights, gradients, and the gradients of the layers in the slots."""
    depth, block = 8, 1 << 16
    model = nn.Sequential(*(nn.Linear(120, 120, bias=False) for _ in range(depth)))
    with stillframe.Engine(pool_bytes=(2 * depth + 4) * block, block_bytes=block) as engine:
        with offload_layers(model, device="cpu", engine=engine):
            x = torch.randn(2, 120)
            squares(model, x).backward()
            if either == "fake":
                request.getfixturevalue("fake").delay(2_000_000)
            squares(model, x).backward()
        model.zero_grad()


def test_gradients_in_flight_never_exceed_the_slots(either, monkeypatch):
    model = mlp(depth=6)
    with offload_layers(model, device="cpu", keep=1) as handle:
        seen, real = [], handle._gradients.send

        def send(*args):
            real(*args)
            seen.append(len(handle._gradients._additions))

        monkeypatch.setattr(handle._gradients, "send", send)
        squares(model, numbers(0)).backward()
        assert seen == [1, 2, 3, 3, 3, 3]


def test_all_reads_of_weights_are_complete_when_a_pass_ends(either, monkeypatch):
    """The caller may write to the weights afterwards, and only a wait of the host prevents a
    race."""
    model = mlp()
    with offload_layers(model, device="cpu") as handle:
        waits = []
        real = handle._offloader.wait_read
        monkeypatch.setattr(handle._offloader, "wait_read", lambda: waits.append(real()))
        with torch.no_grad():
            model(numbers(0))
        assert len(waits) == 1
        loss = squares(model, numbers(0))
        assert len(waits) == 1
        loss.backward()
        assert len(waits) == 2


# ---- what modules may be like ----------------------------------------------------------------


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out(self.norm(self.norm(x) * 2 + 1))


def test_layer_used_twice_updates_its_statistics_each_time(either):
    assert agree(*twice(Twice(), lambda m: [m.norm, m.norm, m.out]))


def test_shared_buffers_of_two_layers_are_onloaded_in_order(either):
    norm = nn.BatchNorm1d(WIDTH)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), norm) for _ in range(3)))
    for keep in (0, 3):
        assert agree(*twice(copy.deepcopy(model), offloaded={"keep": keep}))
    with offload_layers(model, device="cpu"):
        squares(model, numbers(0))
        assert model[0].state_dict()["1.num_batches_tracked"] == 3


class Checkpointed(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def test_kept_layer_is_onloaded_again_if_another_changed_its_buffers(either):
    """A checkpoint inside the layer runs its norm again in backward, with the current buffers."""
    norm = nn.BatchNorm1d(WIDTH)
    model = nn.Sequential(*(Checkpointed(nn.Linear(WIDTH, WIDTH), norm) for _ in range(3)))
    assert agree(*twice(model, offloaded={"keep": 3}))


class Empty(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, x):
        return x + torch.relu(x) + (x @ self.weight.t()).sum()


def test_layers_without_bytes_may_be_between_others(either):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Empty(), nn.Linear(WIDTH, WIDTH))
    for keep in (0, 3):
        assert agree(*twice(copy.deepcopy(model), offloaded={"keep": keep}))


@pytest.mark.parametrize("nth", range(3))
def test_prefetch_of_a_failed_forward_is_repeated(either, nth):
    """Writes of a fused optimizer, or through `.data`, change no version."""
    model = mlp(depth=4)
    plain = copy.deepcopy(model)

    def fail(module, args, output):
        raise ArithmeticError("in forward")

    with offload_layers(model, device="cpu"):
        hook = model[nth][0].register_forward_hook(fail)
        with pytest.raises(ArithmeticError):
            model(numbers(0))
        hook.remove()
        for each in (model, plain):
            for parameter in each.parameters():
                parameter.data.mul_(2)
        assert torch.equal(model(numbers(1)), plain(numbers(1)))


class Reentrant(nn.Linear):
    """An operation that runs another backward inside its own."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True) if x.requires_grad else x


def test_gradients_are_added_in_the_order_of_their_backwards(either):
    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), Reentrant(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
        )
        model[3].weight = model[1].weight
        assert agree(*twice(model, parts=3))


def test_partial_gradient_sum_of_a_failed_backward_is_dropped(either):
    """Autograd drops it too: it adds a gradient only after the last use of the parameter."""

    def grads(model, repeated):
        model(numbers(0)).sum().backward()
        with pytest.raises(ArithmeticError):
            repeated(Bang.apply(repeated(numbers(1).requires_grad_()))).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    model = mlp(depth=2)
    other = copy.deepcopy(model)
    with offload_layers(other, device="cpu"):
        assert same(grads(model, model[1]), grads(other, other[1]))


def test_kept_norm_may_change_while_its_statistics_are_copied(fake):
    norm = nn.BatchNorm1d(WIDTH)
    model = nn.Sequential(Checkpointed(nn.Linear(WIDTH, WIDTH), norm))
    other = copy.deepcopy(model)
    plain = train(model)
    fake.delay(2_000_000)
    with offload_layers(other, device="cpu", keep=1):
        assert agree(plain, train(other))


class Adds(nn.Module):
    """A module whose weight gradient has the strides of another tensor."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.register_buffer("scales", torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return x + (self.weight * self.scales).sum()


def test_gradient_has_the_strides_of_its_parameter(either):
    model = mlp(Adds())
    model[1][0].weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
    other = copy.deepcopy(model)
    squares(model, numbers(0)).backward()
    with offload_layers(other, device="cpu"):
        squares(other, numbers(0)).backward()
    strides = [[p.grad.stride() for p in each.parameters()] for each in (model, other)]
    assert strides[0] == strides[1]


def test_parameter_with_shared_memory_keeps_its_memory(either):
    model = mlp(depth=2)
    alias = model[0][0].weight.detach()
    with offload_layers(model, device="cpu"):
        with torch.no_grad():
            alias.zero_()
        assert model[0][0].weight.count_nonzero() == 0


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))

    def forward(self, x):
        return torch.view_as_real(torch.complex(x, 2 * x) @ self.weight.conj()).sum(-1)


def test_complex_weights_train_as_in_the_plain_model(either):
    sgd = functools.partial(torch.optim.SGD, lr=0.01)
    model = nn.Sequential(Complex(), Complex())
    assert agree(*twice(model, optimizer=lambda m: sgd(m.parameters())))
