"""Tensors that autograd saves are offloaded to the pool and return; results do not change."""

import contextlib
import copy
import functools
import gc

import pytest
import stillframe
import torch
from fix_offloading import (
    WIDTH,
    Bang,
    Transformer,
    agree,
    mlp,
    next_token,
    numbers,
    same,
    squares,
    state,
    tokens,
    train,
)
from fix_waits import eventually
from stillframe.offload import offload_activations, offload_layers
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

TEXT = {"loss": next_token, "batch": tokens}


def away(**how):
    return offload_activations(**{"min_bytes": 0, "device": "cpu", **how})


def counts(context):
    [stats] = context.stats().values()
    return stats


MODELS = {
    "an MLP": (mlp, {}),
    "a transformer": (Transformer, TEXT),
    "BatchNorm": (lambda: mlp(nn.BatchNorm1d(WIDTH)), {"parts": 2}),
    "an LSTM": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), First(nn.LSTM(WIDTH, WIDTH))), {}),
}


class First(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


@pytest.mark.parametrize("keep_last", [0, 3, 1000])
@pytest.mark.parametrize("name", MODELS)
def test_training_with_offloaded_activations_equals_the_plain_one(either, name, keep_last):
    make, how = MODELS[name]
    model = make()
    context = away(keep_last=keep_last)
    plain = train(copy.deepcopy(model), **how)
    assert agree(plain, train(model, around=lambda: context, **how))
    assert (keep_last == 1000) == (counts(context)["groups_offloaded"] == 0)


def test_training_under_autocast_equals_the_plain_one(either):
    model = Transformer()
    plain = train(
        copy.deepcopy(model), around=lambda: torch.autocast("cpu", torch.bfloat16), **TEXT
    )

    class Both:
        def __enter__(self):
            self.inner = [torch.autocast("cpu", torch.bfloat16), away()]
            [each.__enter__() for each in self.inner]

        def __exit__(self, *error):
            [each.__exit__(*error) for each in self.inner[::-1]]

    assert agree(plain, train(model, around=Both, **TEXT))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_training_with_checkpoints_equals_the_plain_one(either, where, use_reentrant):
    def forward(around, model, batch):
        x = batch.requires_grad_()
        for layer in model:
            if where == "inside":
                with around():
                    x = checkpoint(layer, x, use_reentrant=use_reentrant)
            else:

                def part(x, layer=layer):
                    with around():
                        return layer(x)

                x = checkpoint(part, x, use_reentrant=use_reentrant)
        return (x**2).mean()

    model = mlp(nn.Dropout(0.5))
    plain = train(copy.deepcopy(model), loss=functools.partial(forward, contextlib.nullcontext))
    assert agree(plain, train(model, loss=functools.partial(forward, away)))


def test_activations_and_layers_can_be_offloaded_together(either):
    model = Transformer()
    plain = train(copy.deepcopy(model), parts=2, **TEXT)
    with offload_layers(model.layers(), device="cpu"):
        assert agree(plain, train(model, around=away, parts=2, **TEXT))


def test_parameters_stay_on_the_device_and_each_storage_leaves_once(either):
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    frozen = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
    x = torch.randn(8, 3 * WIDTH, requires_grad=True).tanh().detach().requires_grad_()
    context = away(keep_last=0)
    with context:
        y = x * 1  # saves no tensor of x
        q, k, v = y.chunk(3, dim=1)
        total = (q * k).sum() + (k * v).sum() + (y**2).sum()
        assert counts(context)["groups_offloaded"] == 1
        assert counts(context)["bytes_offloaded"] == y.nbytes
        z = nn.functional.linear(q.detach(), weight) + nn.functional.linear(q, frozen)
    assert counts(context)["bytes_offloaded"] == y.nbytes
    (total + z.sum()).backward()
    assert counts(context)["groups_onloaded"] == 1
    q, k, v = x.detach().chunk(3, dim=1)
    expected = torch.cat([k, q + v, k], 1) + 2 * x.detach()
    expected[:, :WIDTH] += frozen.sum(0)
    torch.testing.assert_close(x.grad, expected)
    assert weight.grad is not None


def test_small_view_does_not_offload_its_large_storage(either):
    large = torch.randn(100, WIDTH, requires_grad=True) * 1
    context = away(keep_last=0)
    with context:
        loss = (large[3] ** 2).sum() + (large[7] ** 2).sum()
    assert counts(context)["bytes_offloaded"] == 2 * WIDTH * 4
    loss.backward()


def test_predicate_and_min_bytes_decide_which_tensors_leave(either):
    x = torch.randn(4, WIDTH, requires_grad=True) * 1
    with away(min_bytes=x.nbytes + 1) as context:
        (x**2).sum()
    assert context.stats() == {}
    seen = []
    with away(predicate=lambda tensor: bool(seen.append(tensor))) as context:
        (x**2).sum()
    assert context.stats() == {} and seen[0] is x
    with offload_activations(min_bytes=0) as context:
        loss = (x**2).sum()
    assert bool(context.stats()) == (either == "fake")  # tensors of the CPU are not offloaded
    loss.backward()
    with pytest.raises(ValueError, match="keep_last counts from 0"):
        offload_activations(keep_last=-1)


def test_backward_prefetches_earlier_activations(either):
    model = mlp(depth=12)
    context = away(keep_last=0)
    with context:
        loss = squares(model, numbers(0))
    loss.backward()
    stats = counts(context)
    assert stats["groups_onloaded"] == stats["groups_offloaded"]
    assert stats["groups_prefetched"] >= stats["groups_onloaded"] - 1


@pytest.mark.parametrize("keep_last", [0, 1, 3])
def test_keep_last_activations_stay_on_the_device(either, keep_last):
    y = torch.rand(64, requires_grad=True)
    with away(keep_last=keep_last) as context:
        for _ in range(5):
            y = y.exp()  # saves its output
    assert counts(context)["groups_offloaded"] == 5 - keep_last
    y.sum().backward()
    assert counts(context)["groups_onloaded"] == 5 - keep_last


class Sum(torch.autograd.Function):
    """An operation whose backward needs all its saved tensors at once."""

    @staticmethod
    def forward(ctx, *parts):
        ctx.save_for_backward(*parts)
        return torch.stack(parts).sum(0)

    @staticmethod
    def backward(ctx, grad):
        return tuple(grad * part for part in ctx.saved_tensors)


def test_operation_may_need_more_tensors_than_slots(either):
    x = torch.rand(64, requires_grad=True)
    context = away(keep_last=0)
    with context:
        y = Sum.apply(*(x * factor for factor in range(20)))
    assert counts(context)["groups_offloaded"] == 20
    y.sum().backward()
    torch.testing.assert_close(x.grad, x.detach() * sum(f * f for f in range(20)))


def test_backward_may_run_twice(either):
    model = Transformer().blocks[0]
    model.eval()
    batch = numbers(0)[None]
    other = copy.deepcopy(model)
    for each, around in ((model, contextlib.nullcontext()), (other, away())):
        with around:
            loss = squares(each, batch)
        loss.backward(retain_graph=True)
        loss.backward()
    assert same(state(model), state(other))


@pytest.mark.parametrize("keep_last", [0, 10])
def test_write_after_saving_is_reported(keep_last):
    x = torch.randn(4, WIDTH, requires_grad=True) * 1
    with away(keep_last=keep_last):
        loss = (x**2).sum()
    with torch.no_grad():
        x.zero_()
    if keep_last:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    else:
        loss.backward()  # x was copied before the write


def test_write_to_a_small_saved_tensor_is_reported():
    x = torch.randn(4, WIDTH, requires_grad=True) * 1
    with away(min_bytes=1 << 20):
        loss = (x**2).sum()
    with torch.no_grad():
        x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_small_tensor_is_passed_to_outer_hooks():
    x, seen = torch.randn(4, WIDTH, requires_grad=True), []

    def pack(tensor):
        seen.append(tensor.shape)
        return tensor.tolist()

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.tensor), away(min_bytes=1 << 20):
        loss = (x**2).sum()
    assert seen == [x.shape]
    loss.backward()
    assert torch.equal(x.grad, 2 * x.detach())


def test_tensor_written_before_it_left_stays_and_is_reported(either):
    x = torch.rand(64, requires_grad=True)
    with away(keep_last=2) as context:
        y = x.exp()
        y.add_(1)  # before two more are saved
        total = y.exp().exp().exp().sum()
    # all that was saved, except the last two tensors and y
    assert counts(context)["groups_offloaded"] <= 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_dropped_graph_returns_the_pool_memory(either):
    with stillframe.Engine(pool_bytes=1 << 24, block_bytes=1 << 20) as engine:
        context = offload_activations(min_bytes=0, keep_last=0, device="cpu", engine=engine)
        for _ in range(3):
            with context:
                loss = squares(mlp(), numbers(0))
            assert engine.stats()["leased_bytes"] > 0
            del loss
            gc.collect()
        # Memory of running copies is kept until they complete.
        assert eventually(lambda: engine.stats()["leased_bytes"] == 0)


def test_retained_graph_holds_nothing_on_the_device(either):
    model = mlp()
    context = away(keep_last=0)
    with context:
        loss = squares(model, numbers(0))
    for _ in range(2):
        loss.backward(retain_graph=True)
        assert counts(context)["bytes_lingering"] == 0


def test_a_tensor_saved_before_and_after_a_write_is_saved_twice(either):
    x = torch.rand(64, requires_grad=True)
    with away(keep_last=0) as context:
        y = x * 2
        total = (y**2).sum()
        # Until y is in the pool, a write to it is reported.
        assert eventually(lambda: counts(context)["offload_copy_s"] > 0)
        y.add_(1)
        total = total + (y**3).sum()
    total.backward()
    before = (x * 2).detach()
    torch.testing.assert_close(x.grad, 2 * (2 * before + 3 * (before + 1) ** 2))


def test_reallocated_memory_is_saved_again(either):
    """A storage is identified by its address, which a later storage may get."""
    x = torch.rand(64, requires_grad=True)
    factors, parts = [i / 30 for i in range(1, 30)], []
    inputs = [x * factor for factor in factors]
    with away(keep_last=0):
        for each in inputs:
            y = each.exp()  # saves its output, and allocates no other storage
            parts.append(y.sum())
            storage = StorageWeakRef(y.untyped_storage())
            del y
            gc.collect(0)
            assert eventually(storage.expired)  # it was copied to the pool
            del storage
    torch.stack(parts).sum().backward()
    torch.testing.assert_close(x.grad, sum(f * (x.detach() * f).exp() for f in factors))


def test_interrupted_backward_leaves_nothing_on_the_device(either):
    context = away(keep_last=0)
    with context:
        loss = squares(mlp(depth=3), Bang.apply(mlp(depth=6)(numbers(0))))
    with pytest.raises(ArithmeticError):
        loss.backward()
    assert counts(context)["slots_in_use"] > 0  # it has prefetched earlier groups
    del loss
    gc.collect()
    assert counts(context)["slots_in_use"] == 0


def test_small_activations_share_blocks(either):
    """200 activations of 16 KiB would take 1.6 GiB in blocks of their own."""
    with stillframe.Engine(pool_bytes=1 << 26, block_bytes=1 << 23) as engine:
        context = away(engine=engine, keep_last=0)
        x = torch.randn(4096, requires_grad=True)
        for _ in range(2):
            with context:
                y = x
                for _ in range(201):
                    y = y.sin()
            assert counts(context)["groups_offloaded"] % 200 == 0
            assert engine.stats()["leased_bytes"] == 1 << 23
            y.sum().backward()
            del y
        expected = x.detach().clone().requires_grad_()
        y = expected
        for _ in range(201):
            y = y.sin()
        y.sum().backward()
        assert torch.equal(x.grad, 2 * expected.grad)


def test_memory_is_pinned_once_for_all_steps(fake):
    with stillframe.Engine(pool_bytes=1 << 24, block_bytes=1 << 20) as engine:
        context = away(engine=engine, keep_last=0)
        model = mlp()
        calls = []
        for step in range(3):
            with context:
                loss = squares(model, numbers(step))
            loss.backward()
            calls.append(fake.calls("cuMemHostRegister_v2"))
        assert calls[0] == calls[2] > 0


def test_a_forward_without_gradients_inside_the_block_leaves_no_trace(either):
    """A forward without gradients has no backward, so its tensors must not delay other forwards."""
    model = mlp(depth=6)
    other = copy.deepcopy(model)
    context = away(keep_last=0)

    def loss(around, model):
        with around:
            first = squares(model, numbers(0))
            with torch.no_grad():
                model(numbers(1))
            return first + squares(model, numbers(2))

    loss(contextlib.nullcontext(), model).backward()
    value = loss(context, other)
    assert counts(context)["groups_offloaded"] == 2 * 7  # the input, and the output of each layer
    value.backward()
    assert same(state(model), state(other))


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"min_bytes": "lots"}, "min_bytes takes a number, not a str"),
        ({"keep_last": 1.5}, "keep_last takes a number, not a float"),
        ({"predicate": 3}, "predicate takes a function, not a int"),
    ],
)
def test_unknown_option_is_named(option, text):
    with pytest.raises(TypeError, match=text):
        offload_activations(**option)


def test_context_left_more_often_than_entered_is_refused():
    with pytest.raises(stillframe.StillframeError, match="more often"):
        away().__exit__(None, None, None)
