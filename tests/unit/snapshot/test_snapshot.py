"""`stillframe.snapshot`: the same tree, over pool memory."""

from __future__ import annotations

import collections
import dataclasses
import weakref
from typing import Any, NamedTuple

import numpy
import pytest
import stillframe
import torch
from fix_snapshots import engine, flat, identity, state_of, step, trained
from stillframe._snapshot.copy import copy_to_ordinary_memory
from stillframe._tree import walk

__all__ = ["engine"]  # a fixture


@pytest.fixture(autouse=True, params=["made together", "made one by one"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test also as before torch 2.11, which cannot make tensors over given memory."""
    if request.param == "made one by one":
        monkeypatch.setattr("stillframe._tree.skeleton.make_tensors", False)


class Pair(NamedTuple):
    first: Any
    second: Any


class Dictionary(dict[str, Any]):
    """A user's subclass of dict."""


@dataclasses.dataclass(frozen=True)
class Extra:
    value: int
    tensor: torch.Tensor


class Marked(torch.Tensor):
    """A subclass that adds nothing."""


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(lambda: torch.randn(3, 4), id="plain"),
        pytest.param(lambda: torch.tensor(3.5), id="0-d"),
        pytest.param(lambda: torch.empty(0), id="empty"),
        pytest.param(lambda: torch.empty(0, 5), id="empty with a shape"),
        pytest.param(lambda: torch.tensor([True, False]), id="bool"),
        pytest.param(lambda: torch.arange(7, dtype=torch.uint8), id="uint8"),
        pytest.param(lambda: torch.arange(7).to(torch.uint16), id="uint16"),
        pytest.param(lambda: torch.randn(5).to(torch.bfloat16), id="bfloat16"),
        pytest.param(lambda: torch.randn(5).to(torch.float8_e4m3fn), id="float8_e4m3fn"),
        pytest.param(lambda: torch.randn(5).to(torch.float8_e5m2), id="float8_e5m2"),
        pytest.param(lambda: torch.randn(5, dtype=torch.complex64), id="complex"),
        pytest.param(lambda: torch.randn(5, dtype=torch.complex64).conj(), id="conj"),
        pytest.param(lambda: torch.randn(5, dtype=torch.complex64).conj().imag, id="neg"),
        pytest.param(lambda: torch.randn(4, 6).t(), id="transposed"),
        pytest.param(lambda: torch.randn(4, 6)[1:3, ::2], id="slice"),
        pytest.param(lambda: torch.randn(1, 6).expand(5, 6), id="expanded"),
        pytest.param(lambda: torch.randn(10)[3:7], id="part of a storage"),
        pytest.param(
            lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
            id="channels last",
        ),
        pytest.param(lambda: torch.randn(3, requires_grad=True), id="requires_grad"),
        pytest.param(lambda: torch.randn(3, requires_grad=True) * 2, id="not a leaf"),
        pytest.param(lambda: torch.nn.Parameter(torch.randn(3)), id="parameter"),
        pytest.param(
            lambda: torch.nn.Parameter(torch.randn(3), requires_grad=False), id="frozen parameter"
        ),
        pytest.param(lambda: torch.from_numpy(numpy.arange(5.0)), id="over numpy"),
        pytest.param(lambda: torch.eye(4).to_sparse(), id="sparse coo"),
        pytest.param(
            lambda: torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,), check_invariants=True),
            id="uncoalesced",
        ),
        pytest.param(
            lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 3, torch.qint8),
            id="quantized",
            marks=pytest.mark.filterwarnings("ignore::UserWarning"),
        ),
        pytest.param(
            lambda: torch.quantize_per_channel(
                torch.ones(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8
            ),
            id="quantized per channel",
            marks=pytest.mark.filterwarnings("ignore::UserWarning"),
        ),
        pytest.param(
            lambda: torch.eye(4).to_sparse_csr(),
            id="sparse csr",
            marks=pytest.mark.filterwarnings("ignore::UserWarning"),
        ),
        pytest.param(lambda: torch.randn(3).as_subclass(Marked), id="subclass"),
    ],
)
def test_tensor_of_any_kind_is_copied(tensor, engine):
    source = tensor()
    twin = stillframe.snapshot([source], engine=engine).tree[0]
    assert type(twin) is type(source)
    assert twin.dtype is source.dtype
    assert twin.layout is source.layout
    assert twin.shape == source.shape
    assert twin.device.type == "cpu"
    assert twin.requires_grad == source.requires_grad
    assert twin.is_leaf
    if source.layout is torch.strided:
        assert twin.stride() == source.stride()
        assert twin.storage_offset() == source.storage_offset()
        assert (twin.is_conj(), twin.is_neg()) == (source.is_conj(), source.is_neg())
        assert identity(twin) != identity(source)
        assert twin.untyped_storage().tolist() == source.untyped_storage().tolist()
    if source.is_sparse:
        assert twin.is_coalesced() == source.is_coalesced()
    if source.is_quantized:
        assert twin.qscheme() == source.qscheme()
        source, twin = source.dequantize(), twin.dequantize()
    if source.layout is not torch.strided:
        source, twin = source.to_dense(), twin.to_dense()
    if source.dtype.itemsize == 1 and source.dtype.is_floating_point:
        source, twin = source.view(torch.uint8), twin.view(torch.uint8)
    assert torch.equal(source, twin)


def test_nested_tensor_is_copied(engine):
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    twin = stillframe.snapshot([jagged], engine=engine).tree[0]
    before = [part.clone() for part in parts]
    jagged.values().zero_()
    assert all(map(torch.equal, twin.unbind(), before))


def test_tensors_that_share_a_storage_share_its_copy(engine):
    base = torch.randn(8, 8)
    tied = torch.nn.Parameter(torch.randn(4))
    tree = {
        "base": base,
        "view": base[2:4],
        "transposed": base.t(),
        "bits": base.view(torch.int32),
        "again": base,
        "storage": base.untyped_storage(),
        "tied": [tied, tied],
        "data": tied.data,
        "empties": [torch.empty(0), torch.empty(0)],
    }
    new = stillframe.snapshot(tree, engine=engine).tree
    assert len({identity(new[name]) for name in ("base", "view", "transposed", "bits")}) == 1
    assert identity(new["storage"]) == identity(new["base"])
    assert new["again"] is new["base"]
    assert new["tied"][0] is new["tied"][1]
    assert identity(new["data"]) == identity(new["tied"][0])
    assert identity(new["empties"][0]) != identity(new["empties"][1])
    new["base"][2, 0] = 7.0
    assert new["view"][0, 0] == 7.0
    assert new["transposed"][0, 2] == 7.0
    assert base[2, 0] != 7.0


def test_containers_keep_their_types_and_attributes(engine):
    module = torch.nn.BatchNorm1d(3)
    tensor = torch.randn(3)
    counter = collections.Counter(a=2)
    tree: Any = {
        "state_dict": module.state_dict(),
        "pair": Pair(tensor, 1),
        "default": collections.defaultdict(list, {"x": [tensor]}),
        "own": Dictionary(x=tensor),
        "ordered": collections.OrderedDict([("b", tensor), ("a", 1)]),
        "tuple": (tensor, 1),
        "size": torch.Size([1, 2]),
        "max": torch.ones(2, 2).max(dim=0),
        "deque": collections.deque([tensor, 2], maxlen=5),
        "counter": counter,
        "set": {1, 2},
        "array": numpy.arange(3),
        "none": None,
    }
    tree["own"].note = [tensor]
    new = stillframe.snapshot(tree, engine=engine).tree
    for name, value in tree.items():
        assert type(new[name]) is type(value), name
    assert list(new) == list(tree)
    assert new["state_dict"]._metadata == tree["state_dict"]._metadata
    assert new["state_dict"]._metadata is not tree["state_dict"]._metadata
    assert new["pair"].first is new["own"]["x"]
    assert new["default"].default_factory is list
    assert new["default"]["x"][0] is new["pair"].first
    assert new["own"].note[0] is new["pair"].first
    assert list(new["ordered"]) == ["b", "a"]
    assert new["deque"].maxlen == 5
    assert new["counter"] == counter
    assert new["max"].values.equal(torch.ones(2))
    tree["array"][0] = 9
    tree["set"].add(3)
    counter["a"] = 0
    assert (new["array"][0], new["set"], new["counter"]["a"]) == (0, {1, 2}, 2)


def test_other_objects_are_not_copied(engine, caplog):
    extra = Extra(1, torch.ones(2))
    module = torch.nn.Linear(1, 1)
    new = stillframe.snapshot({"extra": extra, "module": module}, engine=engine).tree
    assert new["extra"] is extra
    assert new["module"] is module
    assert "state_dict" in caplog.text
    assert "Linear" in caplog.text


def test_lists_and_dicts_keep_their_order(engine):
    tree = [3, "two", [torch.ones(1), 2.5], {"b": [], "a": (1, [None, 0])}]
    with stillframe.snapshot(tree, engine=engine) as snap:
        assert snap.tree == tree and list(snap.tree[3]) == ["b", "a"]
        assert snap.tree[2] is not tree[2] and snap.tree[3]["b"] is not tree[3]["b"]


def test_a_tree_may_contain_itself(engine):
    tree: dict[str, Any] = {"tensor": torch.ones(2)}
    tree["list"] = [tree]
    new = stillframe.snapshot(tree, engine=engine).tree
    assert new["list"][0] is new
    assert new is not tree


def test_attributes_of_tensors_are_copied(engine):
    tensor = torch.ones(2)
    tensor.note = {"mean": torch.zeros(1)}
    new = stillframe.snapshot([tensor], engine=engine).tree[0]
    assert new.note["mean"].equal(torch.zeros(1))
    assert new.note["mean"] is not tensor.note["mean"]


def test_a_wrapper_subclass_is_flattened_and_put_together(engine):
    from torch.testing._internal.two_tensor import TwoTensor

    wrapped = TwoTensor(torch.ones(3), torch.zeros(3))
    new = stillframe.snapshot([wrapped], engine=engine).tree[0]
    wrapped.a.fill_(9)
    assert type(new) is TwoTensor
    assert new.a.equal(torch.ones(3))
    assert new.b.equal(torch.zeros(3))


@pytest.mark.parametrize("trained", [False, True])
def test_wrapper_subclass_keeps_requires_grad(engine, trained):
    from torch.testing._internal.two_tensor import TwoTensor

    wrapped = TwoTensor(torch.ones(3), torch.zeros(3)).requires_grad_(trained)
    new = stillframe.snapshot([wrapped], engine=engine).tree[0]
    assert (new.requires_grad, new.is_leaf) == (trained, True)


def test_a_tensor_whose_memory_was_freed_has_none_in_the_snapshot_either(engine):
    freed = torch.arange(6.0)
    freed.untyped_storage().resize_(0)
    tree = stillframe.snapshot([freed, freed.view(2, 3), torch.ones(2)], engine=engine).tree
    assert [each.untyped_storage().nbytes() for each in tree] == [0, 0, 8]
    assert [each.shape for each in tree] == [(6,), (2, 3), (2,)]
    assert tree[0].untyped_storage()._cdata == tree[1].untyped_storage()._cdata


def test_a_tensor_that_reaches_beyond_its_memory_is_refused(engine):
    shrunk = torch.arange(6.0)
    shrunk.untyped_storage().resize_(8)
    with pytest.raises(RuntimeError, match=r"shape \(6,\) reaches beyond its memory.* to 8 bytes"):
        stillframe.snapshot([torch.ones(2), shrunk], engine=engine)
    assert engine.stats()["leased_bytes"] == 0


class Holder:
    """An object that the walk leaves whole."""

    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class HoldingTensor(torch.Tensor):
    """A subclass that reduces to its attributes, as ShardedTensor does."""


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_tensor_with_bytes_in_uncopied_objects_is_refused_by_name(depth, engine):
    live = torch.ones(2)
    tensor = torch.zeros(2).as_subclass(HoldingTensor)
    inner: Any = live
    for _ in range(depth):
        inner = Holder({"deeper": [inner]})
    tensor.parts = [Holder(inner)]
    before = engine.stats()["leased_bytes"]
    with pytest.raises(TypeError, match=r"^model\.0\.weight is a HoldingTensor.*class Holder"):
        stillframe.snapshot({"model": [{"weight": tensor}]}, engine=engine)
    assert engine.stats()["leased_bytes"] == before


def test_objects_without_tensors_in_a_reduced_tensor_are_not_copied(engine):
    tensor = torch.zeros(2).as_subclass(HoldingTensor)
    config: Any = Holder(None)
    config.inner = [config, {"width": 3}]
    tensor.config = config
    new: Any = stillframe.snapshot([tensor], engine=engine).tree[0]
    assert type(new) is HoldingTensor
    assert new.config is config


def test_a_wrapper_subclass_with_a_tensor_in_its_context_is_refused(engine, monkeypatch):
    from torch.testing._internal.two_tensor import TwoTensor

    wrapped = TwoTensor(torch.ones(3), torch.zeros(3))
    monkeypatch.setattr(TwoTensor, "__tensor_flatten__", lambda self: (["a"], {"b": [self.b]}))
    with pytest.raises(TypeError, match=r"^0 is a TwoTensor.*class dict "):
        stillframe.snapshot([wrapped], engine=engine)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch warns at every ShardedTensor
def test_a_sharded_tensor_is_refused_and_saved_with_the_bytes_of_the_call(engine, tmp_path):
    from torch import distributed
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        live = torch.arange(64.0).reshape(8, 8)
        metadata = ShardMetadata([0, 0], [8, 8], "rank:0/cpu")
        tensor: Any = init_from_local_shards([Shard(live, metadata)], 8, 8)
        with pytest.raises(TypeError, match=r"^a\.w is a ShardedTensor.*class Shard "):
            stillframe.snapshot({"a": {"w": tensor}}, engine=engine)
        handle = stillframe.async_save({"w": tensor}, tmp_path / "s.pt", engine=engine)
        live.zero_()
        handle.result()
        loaded = torch.load(tmp_path / "s.pt", weights_only=False)["w"]
        assert loaded.local_shards()[0].tensor.equal(torch.arange(64.0).reshape(8, 8))
    finally:
        distributed.destroy_process_group()


def test_the_snapshot_of_inference_mode_can_be_used_outside(engine):
    with torch.inference_mode():
        new = stillframe.snapshot([torch.ones(2)], engine=engine).tree[0]
    assert not new.is_inference()
    new.requires_grad_(True).sum().backward()


def test_default_device_does_not_affect_a_snapshot(engine):
    with torch.device("meta"):
        new = stillframe.snapshot([torch.ones(2, 2, device="cpu")], engine=engine).tree[0]
    assert new.device.type == "cpu"
    assert new.equal(torch.ones(2, 2))


def test_torch_modes_do_not_affect_a_snapshot(engine):
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    class Refusing(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            raise AssertionError("asked a mode")

    tied = torch.randn(3, 2)
    tree = {"a": tied, "b": tied.t(), "c": torch.nn.Parameter(torch.ones(2))}
    for mode in (Watching(), Refusing()):
        with mode:
            new = stillframe.snapshot(tree, engine=engine).tree
        assert [type(each) for each in new.values()] == [type(each) for each in tree.values()]
        assert all(map(torch.equal, new.values(), tree.values()))
        assert identity(new["a"]) == identity(new["b"])


def test_the_copy_holds_the_bytes_of_the_call(engine):
    model, optimizer = trained()
    snap = stillframe.snapshot(state_of(model, optimizer), engine=engine)
    expected = [tensor.clone() for tensor in flat(state_of(model, optimizer))]
    for _ in range(3):
        step(model, optimizer)
    assert all(map(torch.equal, flat(snap.tree), expected))


def test_a_saved_snapshot_loads_as_the_tree_would(engine, tmp_path):
    model, optimizer = trained()
    state = state_of(model, optimizer)
    live, copied = tmp_path / "live" / "x.pt", tmp_path / "copied" / "x.pt"
    live.parent.mkdir()
    copied.parent.mkdir()
    torch.save(state, live)
    torch.save(stillframe.snapshot(state, engine=engine).tree, copied)
    assert all(map(torch.equal, flat(torch.load(live)), flat(torch.load(copied))))
    assert live.stat().st_size == copied.stat().st_size


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (1, 4, 1), (2, 1, 3, 2)])
@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint16, torch.uint32, torch.uint64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128),
    ],
)
def test_every_dtype_and_shape_is_copied_byte_for_byte(engine, dtype, shape):
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    raw_bytes = torch.randint(0, 2, (nbytes,), dtype=torch.uint8)
    source = raw_bytes.view(dtype).reshape(shape)
    twin = stillframe.snapshot([source], engine=engine).tree[0]
    raw_bytes.fill_(3)
    assert (twin.dtype, twin.shape, twin.stride()) == (dtype, source.shape, source.stride())
    assert twin.untyped_storage().nbytes() == nbytes
    assert set(twin.untyped_storage().tolist()) <= {0, 1}


@pytest.mark.parametrize("size", [(1,), (1, 2), (2, 1)])
def test_irrelevant_strides_are_kept(engine, size):
    stride = tuple(1 if length > 1 else 7 for length in size)
    source = torch.arange(float(torch.Size(size).numel())).as_strided(size, stride)
    assert source.is_contiguous()
    twin = stillframe.snapshot([source], engine=engine).tree[0]
    assert twin.stride() == stride
    assert twin.equal(source)


class Kept(dict[str, Any]):
    """A dict that cannot be copied."""

    def __copy__(self) -> Kept:
        return self


def test_container_that_cannot_be_copied_is_in_the_snapshot_itself(engine):
    tensor = torch.ones(3)
    tree = Kept(a=tensor)
    assert stillframe.snapshot([tree], engine=engine).tree[0] is tree
    assert tree["a"] is tensor  # the training still uses the original


@pytest.mark.parametrize("most", [None, 2, 9])
def test_snapshot_of_a_deque_keeps_its_maximum_length(engine, most):
    tree = collections.deque([torch.ones(2), torch.zeros(2)], most)
    copied = stillframe.snapshot(tree, engine=engine).tree
    assert copied.maxlen == most and [each.tolist() for each in copied] == [[1, 1], [0, 0]]
    assert all(one is not other for one, other in zip(copied, tree, strict=True))


def test_objects_are_rebuilt_in_their_order():
    """Objects that are neighbours in memory are read one after the other, also inside users' own
    containers."""
    tensors = [torch.ones(3) for _ in range(4)]
    nested = [Dictionary(a=tensors[0], b=tensors[1]), collections.deque([tensors[2]])]
    found = walk.Tree([*nested, Dictionary(c=tensors[3])])
    addresses = [storage.data_ptr() for storage in found.storages]
    assert addresses == [tensor.untyped_storage().data_ptr() for tensor in tensors]


def test_a_copy_in_ordinary_memory_is_as_aligned_as_torchs_own():
    tree = [torch.ones(3, dtype=torch.uint8), torch.arange(5.0, dtype=torch.float64)]
    copied, number, nbytes = copy_to_ordinary_memory(tree)
    assert (number, nbytes) == (2, 43)
    assert all(map(torch.equal, copied, tree))
    assert [each.data_ptr() % 64 for each in copied] == [0, 0]


def test_empty_tensors_are_copied_to_ordinary_memory():
    copied, number, nbytes = copy_to_ordinary_memory({"step": 3, "empty": torch.empty(0, 7)})
    assert copied["step"] == 3 and copied["empty"].shape == (0, 7)
    assert (number, nbytes) == (1, 0)


def test_dropped_tree_keeps_no_containers_or_tensors():
    class Root(list[Any]):
        pass

    tensor = torch.ones(3)
    root = Root([tensor, {"a": tensor[1:]}])
    tree = walk.Tree(root)
    refs = [weakref.ref(root), weakref.ref(tensor)]
    del root, tensor
    tree.forget()
    assert [ref() for ref in refs] == [None, None]
    assert len(tree.storages) == 1


def test_dropped_tree_keeps_no_wrapped_tensor(monkeypatch):
    class Wrapped:  # represents a DTensor
        __slots__ = ("__weakref__", "_local_tensor")

    monkeypatch.setattr(walk, "dtensor_class_if_imported", lambda: Wrapped)
    wrapped = Wrapped()
    wrapped._local_tensor = torch.ones(3)
    tree = walk.Tree([wrapped])
    refs = [weakref.ref(wrapped), weakref.ref(wrapped._local_tensor)]
    assert tree.num_tensors() == 2 and len(tree.storages) == 1
    del wrapped
    tree.forget()
    assert [ref() for ref in refs] == [None, None]


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns about its prototypes
def test_tensors_of_every_kind_are_counted_once():
    plain, marked = torch.ones(3), torch.ones(3).as_subclass(Marked)
    quantized = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 3, torch.quint8)
    conjugated = torch.ones(2, dtype=torch.complex64).conj()
    tree = [plain, plain, torch.nn.Parameter(plain), marked, [marked], quantized, conjugated]
    assert walk.Tree(tree).num_tensors() == 5
    # its indices and values count too
    assert walk.Tree([torch.eye(3).to_sparse()]).num_tensors() == 3


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns about its prototypes
def test_copies_have_no_autograd_history(engine):
    marked = torch.ones(3).as_subclass(Marked).requires_grad_()
    rows = torch.eye(3).to_sparse_csr().requires_grad_()
    with torch.enable_grad():
        taken = stillframe.snapshot([marked, rows, marked * 2], engine=engine)
    assert [each.grad_fn for each in taken.tree] == [None] * 3
    assert taken.tree[0].requires_grad and taken.tree[0].is_leaf
