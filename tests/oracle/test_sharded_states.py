"""Which storages of FSDP2 states are deferred. Their parameters are DTensors over local tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import stillframe
import torch
import torch.distributed as dist
from fix_gate import deferred, give_gradients
from stillframe._watch import ownership
from stillframe.testing import slow
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import SGD, AdamW, Optimizer

WIDTH = 64  # a weight of 16 KiB: large enough to be deferred
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Make a device mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Sharded:
    """An FSDP2 model and its optimizer after a few steps."""

    def __init__(self, mesh: DeviceMesh, steps: int = 4, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        for module in (*self.model, self.model):
            if not isinstance(module, nn.Tanh):
                fully_shard(module, mesh=mesh)
        self.optimizer = AdamW(self.model.parameters(), **options)
        for _ in range(steps):
            self.advance()

    def advance(self) -> None:
        self.model(torch.randn(4, WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def weight(self) -> DTensor:
        weight = self.model[0].weight
        assert isinstance(weight, DTensor)
        return weight


def local_bytes(tree: Any) -> list[bytes]:
    """Return the bytes of every tensor in a tree, in order."""
    if isinstance(tree, dict):
        return [each for value in tree.values() for each in local_bytes(value)]
    if isinstance(tree, Tensor):
        tensor = tree.to_local() if isinstance(tree, DTensor) else tree
        return [tensor.detach().numpy().tobytes()]
    return []


@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"fused": True}], ids=str)
def test_sharded_save_is_deferred_and_holds_the_state_at_the_call(options, mesh, tmp_path):
    training = Sharded(mesh, **options)
    with slow("lane_copy", 0.005):
        for round_ in range(2):
            state = training.state()
            wanted = local_bytes(state)
            handle = stillframe.async_save(state, tmp_path / "s.pt")
            training.advance()
            report = handle.result()
            assert report is not None
            # two weights and two moments of each; biases are small
            assert report.deferred_nbytes == 6 * WIDTH * WIDTH * 4, round_
            saved = torch.load(tmp_path / "s.pt", weights_only=False)
            assert local_bytes(saved) == wanted


def test_sharded_snapshot_is_deferred(mesh):
    training = Sharded(mesh)
    with slow("lane_copy", 0.005):
        state = training.state()
        wanted = local_bytes(state)
        with stillframe.snapshot(state, overlap=True) as snap:
            training.advance()
            snap.wait()
            assert local_bytes(snap.tree) == wanted


def test_snapshot_has_new_dtensors_of_the_same_specification(mesh):
    weight = nn.Parameter(distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)]))
    weight.note = {"mean": torch.zeros(1)}
    view = DTensor(weight._local_tensor[1:], weight._spec, requires_grad=False)
    empty = distribute_tensor(torch.empty(0, 4), mesh, [Replicate()])
    other = DTensor(Wrapper(torch.ones(3)), weight._spec, requires_grad=False)
    tree = {"weight": weight, "tied": [weight, weight], "view": view, "plain": weight._local_tensor}
    with stillframe.snapshot({**tree, "empty": empty, "other": other}) as snap:
        with torch.no_grad():
            old = weight._local_tensor.clone()
            weight._local_tensor.zero_()
        new: Any = snap.tree
        for name in ("weight", "view", "empty", "other"):
            assert type(new[name]) is DTensor
        assert new["weight"]._spec is weight._spec
        assert isinstance(new["weight"], nn.Parameter) and new["weight"].requires_grad
        assert new["weight"].to_local().equal(old) and new["weight"] is not weight
        assert new["weight"].note["mean"].equal(torch.zeros(1))
        assert new["weight"].note["mean"] is not weight.note["mean"]
        assert new["tied"][0] is new["tied"][1] is new["weight"]
        assert new["plain"] is new["weight"]._local_tensor
        assert new["view"].to_local().data_ptr() == new["plain"][1:].data_ptr()
        assert not new["view"].requires_grad
        assert new["empty"].shape == (0, 4)
        assert type(new["other"]._local_tensor) is Wrapper
        assert new["other"]._local_tensor is not other._local_tensor


def test_a_torn_snapshot_names_the_dtensor(mesh):
    training = Sharded(mesh)
    with slow("lane_copy", 0.05):
        snap = stillframe.snapshot(training.state(), overlap=True)
        training.weight()._local_tensor.add_(1)
        with pytest.raises(stillframe.TornSnapshotError, match=r"model\.0\.weight"):
            snap.wait()


def in_place(weight: DTensor) -> None:
    with torch.no_grad():
        weight.mul_(1.0)


def through_to_local(weight: DTensor) -> None:
    with torch.no_grad():
        weight.to_local().view(-1)[1234] += 1.0


def on_the_local_tensor(weight: DTensor) -> None:
    weight._local_tensor.view(-1)[1234] += 1.0


WRITES: list[Callable[[DTensor], None]] = [in_place, through_to_local, on_the_local_tensor]


@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
def test_a_write_outside_the_step_tears_the_save(write, mesh, tmp_path):
    training = Sharded(mesh)
    with slow("lane_copy", 0.1):
        handle = stillframe.async_save(training.state(), tmp_path / "s.pt")
        write(training.weight())
        with pytest.raises(stillframe.TornSnapshotError, match=r"0\.weight"):
            handle.result()
    assert not (tmp_path / "s.pt").exists()


@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
def test_storage_written_between_steps_is_captured(write, mesh):
    training = Sharded(mesh, steps=0)
    for _ in range(4):
        training.advance()
        write(training.weight())
    first, second = training.weight(), training.model[2].weight
    assert deferred(first._local_tensor, second._local_tensor) == [False, True]


def test_a_frozen_dtensor_is_captured(mesh):
    training = Sharded(mesh)
    weight = training.weight()
    assert deferred(weight._local_tensor) == [True]
    weight.requires_grad_(False)
    assert deferred(weight._local_tensor) == [False]


def test_replaced_local_tensor_is_observed_again(mesh):
    weight = nn.Parameter(distribute_tensor(torch.zeros(WIDTH, WIDTH), mesh, [Replicate()]))
    optimizer = SGD([weight], momentum=0.9)
    for _ in range(4):
        give_gradients(optimizer)
        optimizer.step()
    old = weight._local_tensor
    assert deferred(old) == [True]
    weight._local_tensor = old.clone()
    assert deferred(old, weight._local_tensor) == [False, False]
    for _ in range(4):
        give_gradients(optimizer)
        optimizer.step()
    assert deferred(old, weight._local_tensor) == [False, True]


def test_sharded_model_is_converted_as_without_stillframe(mesh):
    """torch swaps the DTensors, and refuses those that have weak references."""
    sharded = Sharded(mesh)
    sharded.model.double().bfloat16().float()
    for _ in range(4):
        sharded.advance()
    assert sharded.weight().dtype is torch.float32


def test_gradient_of_a_dtensor_counts_as_trained_without_state(mesh):
    made = [distribute_tensor(torch.zeros(WIDTH, WIDTH), mesh, [Replicate()]) for _ in range(2)]
    weights = [nn.Parameter(each) for each in made]
    optimizer = SGD(weights, lr=0.1)
    for _ in range(4):
        weights[0].grad = torch.full_like(weights[0], 0.01)
        optimizer.step()
    assert deferred(*(each._local_tensor for each in weights)) == [True, False]


class Wrapper(Tensor):
    """A wrapper subclass over two tensors, with the attribute of DTensor's name."""

    _local_tensor: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        self = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        self._local_tensor = inner
        self.scale = torch.ones(1)
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(value: Any) -> Any:
            return value._local_tensor if isinstance(value, Wrapper) else value

        out = func(*(unwrap(a) for a in args), **{k: unwrap(v) for k, v in (kwargs or {}).items()})
        return Wrapper(out) if isinstance(out, Tensor) else out


class OwnDTensor(DTensor):
    """A subclass of DTensor; it is not known what it does with its local tensor."""


def test_other_wrapper_tensors_are_captured_without_an_error(mesh):
    plain = distribute_tensor(torch.zeros(WIDTH, WIDTH), mesh, [Replicate()])
    own = OwnDTensor(plain._local_tensor.clone(), plain._spec, requires_grad=True)
    own.grad = own.detach()
    other = nn.Parameter(Wrapper(torch.zeros(WIDTH, WIDTH)))
    ordinary = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    optimizers: list[Optimizer] = [SGD([each], lr=0.1) for each in (own, other, ordinary)]
    for _ in range(5):
        for optimizer, weight in zip(optimizers, (own, other, ordinary), strict=True):
            weight.grad = torch.zeros_like(weight)
            optimizer.step()
    kept = (own._local_tensor, other._local_tensor, ordinary)
    assert deferred(*kept) == [False, False, True]


def test_dtensor_without_a_local_tensor_is_captured_without_an_error(mesh):
    weight = nn.Parameter(distribute_tensor(torch.zeros(WIDTH, WIDTH), mesh, [Replicate()]))
    optimizer = SGD([weight], momentum=0.9)
    for _ in range(4):
        give_gradients(optimizer)
        optimizer.step()
    local = weight._local_tensor
    del weight._local_tensor
    assert deferred(local) == [False]
    owner = ownership.find(optimizer)
    assert owner is not None
    owner.compare()
    assert not owner.distrusted
