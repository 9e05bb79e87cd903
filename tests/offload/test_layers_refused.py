"""Layers that cannot be offloaded, and the state after a failure."""

import copy
import itertools

import pytest
import stillframe
import torch
from fix_offloading import WIDTH, agree, mlp, numbers, squares, train
from stillframe.offload import offload_layers
from torch import nn


def test_arguments_of_offload_layers_are_checked():
    model = mlp()
    with pytest.raises(ValueError, match="no modules"):
        offload_layers([], device="cpu")
    with pytest.raises(TypeError, match=r"modules takes layers .* not one Linear"):
        offload_layers(model[0][0], device="cpu")
    with pytest.raises(TypeError, match=r"modules takes layers .* not one ModuleDict"):
        offload_layers(nn.ModuleDict({"one": model[0]}), device="cpu")
    with pytest.raises(TypeError, match=r"modules takes layers .* not one int"):
        offload_layers(3, device="cpu")
    with pytest.raises(TypeError, match="keep takes a number of layers, not a str"):
        offload_layers(model, device="cpu", keep="all")
    with pytest.raises(TypeError, match=r"dtype takes a torch.dtype, not a str"):
        offload_layers(model, device="cpu", dtype="bf16")
    with pytest.raises(ValueError, match="keep"):
        offload_layers(model, device="cpu", keep=5)
    with pytest.raises(ValueError, match="dtype"):
        offload_layers(model, device="cpu", dtype=torch.int8)
    with pytest.raises(TypeError, match="got a str"):
        offload_layers(["layer"], device="cpu")
    with pytest.raises(ValueError, match="is inside a Sequential"):
        offload_layers([model[0], model[0][0]], device="cpu")
    with pytest.raises(TypeError, match="no shape yet"):
        offload_layers([nn.LazyLinear(3)], device="cpu")
    with pytest.raises(stillframe.StillframeError, match="is on meta"):
        offload_layers([nn.Linear(2, 2, device="meta")], device="cpu")
    with offload_layers(model, device="cpu"), pytest.raises(ValueError, match="offloaded already"):
        offload_layers(model[0], device="cpu")


def test_module_list_is_accepted_like_a_list(either):
    model = nn.ModuleList(mlp())
    with offload_layers(model, device="cpu") as handle:
        squares(nn.Sequential(*model), numbers(0)).backward()
        assert handle.stats()["groups_onloaded"] == 2 * 4


@pytest.fixture
def alone(tmp_path):
    """Make a process group of one rank."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_module_wrapped_for_several_processes_is_refused(alone):
    model = mlp(depth=2)
    wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    for each in (wrapped, [wrapped], [nn.Sequential(wrapped)], [nn.DataParallel(model)]):
        with pytest.raises(TypeError, match="Parallel cannot be offloaded: that reduces"):
            offload_layers(each, device="cpu")
    sharded = torch.distributed.fsdp.fully_shard(
        copy.deepcopy(model), mesh=torch.distributed.init_device_mesh("cpu", (1,))
    )
    with pytest.raises(TypeError, match="FSDPModule cannot be offloaded"):
        offload_layers(sharded, device="cpu")
    with pytest.raises(TypeError, match="is a DTensor of layout"):
        offload_layers([sharded[0]], device="cpu")


def test_layers_inside_a_gradient_reducing_module_are_refused(alone):
    model = mlp(depth=2)
    weight = model[0][0].weight
    with offload_layers(model, device="cpu"):
        wrapped = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), model))
        with pytest.raises(stillframe.StillframeError, match="inside a DistributedDataParallel"):
            wrapped(numbers(0))
        assert model[0][0].weight is weight
        with torch.no_grad():
            wrapped(numbers(0))  # for example a teacher model's forward
        squares(model, numbers(0)).backward()


def test_module_that_replaces_its_parameters_is_refused(either):
    class Moves(nn.Linear):
        moves = False

        def forward(self, x):
            if self.moves:
                self.weight = nn.Parameter(self.weight.detach().clone())
            return super().forward(x)

    model = nn.Sequential(Moves(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    weight, before = model[0].weight, model[0].weight.detach().clone()
    with offload_layers(model, device="cpu"):
        model[0].moves = True
        with pytest.raises(
            stillframe.StillframeError, match=r"layers\[0\].weight was replaced or moved"
        ):
            model(numbers(0))
        assert model[0].weight is weight
        model[0].moves = False
        assert torch.equal(weight, before)
        squares(model, numbers(0)).backward()


def test_module_moved_while_offloaded_is_refused(either):
    model = mlp(depth=2)
    with offload_layers(model, device="cpu"):
        model[1][0].to("meta")
        with pytest.raises(stillframe.StillframeError, match="is on meta"):
            model(numbers(0))


def test_weights_changed_before_their_backward_are_reported(either):
    model = mlp()
    with offload_layers(model, device="cpu"):
        loss = squares(model, numbers(0))
        with torch.no_grad():
            model[2][0].weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"layers\[2\].0.weight has been modified"):
            loss.backward()


def test_backward_after_remove_is_refused(either):
    model = mlp()
    with offload_layers(model, device="cpu"):
        loss = squares(model, numbers(0))
    with pytest.raises(stillframe.StillframeError, match="after remove"):
        loss.backward()


@pytest.mark.parametrize("nth", range(8))
def test_full_device_leaves_everything_on_the_cpu(either, nth, monkeypatch):
    model = mlp()
    other = copy.deepcopy(model)
    with offload_layers(other, device="cpu") as handle:
        count = itertools.count()
        real = handle._offloader.onload

        def onload(what):
            if next(count) == nth:
                raise torch.OutOfMemoryError("no room")
            return real(what)

        with monkeypatch.context() as patch:
            patch.setattr(handle._offloader, "onload", onload)
            with pytest.raises(torch.OutOfMemoryError):
                squares(other, numbers(0)).backward()
        assert all(isinstance(p, nn.Parameter) for p in other.parameters())
        assert agree(train(model), train(other))
