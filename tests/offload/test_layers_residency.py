"""Which layers are on the device at which time, and modules that are moved or copied."""

import copy
import io
import runpy
from pathlib import Path

import pytest
import stillframe
import torch
from fix_offloading import WIDTH, agree, mlp, numbers, same, squares, state, train, twice
from stillframe.offload import offload_layers
from torch import nn

ROOT = Path(__file__).parents[2]


def test_skipped_layer_costs_only_its_slot(either):
    class Skips(nn.Sequential):
        def forward(self, x):
            for number, layer in enumerate(self):
                if (number + int(x[0, 0] > 0)) % 2:
                    x = layer(x)
            return x

    plain, offloaded = twice(Skips(*mlp(depth=6)), steps=6)
    assert agree(plain, offloaded)


def test_no_weight_stays_on_the_device_between_forward_and_backward(either):
    model = mlp(nn.BatchNorm1d(WIDTH))
    with offload_layers(model, device="cpu") as handle:
        loss = squares(model, numbers(0))
        assert handle.resident() == []
        loss.backward()
        assert handle.resident() == []


def test_kept_layer_is_onloaded_again_after_a_forward_without_backward(either):
    """A write through `.data` changes no version."""
    model = mlp()
    plain = copy.deepcopy(model)
    with offload_layers(model, device="cpu", keep=2) as handle:
        squares(model, numbers(0))
        assert handle.resident() != []
        for each in (model, plain):
            for parameter in each.parameters():
                parameter.data.mul_(2)
        assert torch.equal(model(numbers(1)), plain(numbers(1)))


def test_next_layer_is_prefetched_in_forward_and_backward(either):
    model = mlp(depth=5)
    forward, backward = [], []
    with offload_layers(model, device="cpu") as handle:

        def inspect(module, args, output):
            forward.append(handle.resident())
            output.register_hook(lambda grad: backward.append(handle.resident()))

        for layer in model:
            layer[0].register_forward_hook(inspect)
        squares(model, numbers(0)).backward()
    pairs = [[f"layers[{i}]", f"layers[{i + 1}]"] for i in range(4)]
    assert forward == [*pairs, ["layers[4]"]]
    assert backward == [*pairs[::-1], ["layers[0]"]]


def test_unused_prefetched_layer_returns_its_slot(either):
    model = mlp(depth=4)
    with offload_layers(model, device="cpu") as handle:
        seen = []
        between = model[0](numbers(0))
        between.register_hook(lambda grad: seen.append(handle.resident()))
        loss = squares(model[1], between)
        assert handle.resident() == ["layers[2]"]
        assert handle.stats()["slots_in_use"] == 1
        loss.backward()
        assert seen == [["layers[0]"]]
        assert handle.resident() == []
        assert handle.stats()["slots_in_use"] == 0


def test_remove_restores_the_module(either):
    model = mlp(nn.BatchNorm1d(WIDTH))
    before, entries = state(model), [dict(m.__dict__) for m in model.modules()]
    parameters = list(model.parameters())
    handle = offload_layers(model, device="cpu")
    handle.remove()
    handle.remove()
    assert same(before, state(model))
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    for module, entry in zip(model.modules(), entries, strict=True):
        assert module.__dict__.keys() == entry.keys()
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert not module._forward_hooks_always_called and not module._state_dict_pre_hooks
    offload_layers(model, device="cpu").remove()


def test_copied_module_is_not_offloaded(either):
    model = mlp()
    with offload_layers(model, device="cpu"):
        other = copy.deepcopy(model)
        assert agree(train(other), train(model))


def test_a_model_that_is_moved_leaves_its_offloaded_layers_where_they_are(either):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *mlp(depth=2))
    other = copy.deepcopy(model)
    with offload_layers(list(other)[1:], device="cpu"):
        other.to("meta")
        assert other[0].weight.is_meta and not other[1][0].weight.is_meta
        other[0].to_empty(device="cpu").load_state_dict(model[0].state_dict())
        assert agree(train(model), train(other))
        with pytest.raises(stillframe.StillframeError, match=r"cannot be made torch.float64"):
            other[1].double()
        pickled = torch.load(io.BytesIO(dumped(other)), weights_only=False)
    for each in (pickled, copy.deepcopy(other), other):
        assert agree(train(copy.deepcopy(model)), train(each))
        assert each.double()[1][0].weight.dtype is torch.float64


def dumped(tree):
    file = io.BytesIO()
    torch.save(tree, file)
    return file.getvalue()


def test_the_example_trains_eight_times_what_the_slots_hold(fake, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples/offload.py"))
    assert capsys.readouterr().out.splitlines() == [
        "weights of the blocks: 8 times what the slots hold",
        "brought ahead of need: 94%",
        "the loss falls: True",
    ]
