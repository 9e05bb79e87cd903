"""`stillframe.snapshot`: the same tree over pool memory, and where that memory is."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import gc
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy
import pytest
import stillframe
import torch
from stillframe.testing import fault, slow

MIB = 1 << 20


class Pair(NamedTuple):
    first: Any
    second: Any


class Dictionary(dict[str, Any]):
    """A dict of somebody's own."""


@dataclasses.dataclass(frozen=True)
class Extra:
    value: int
    tensor: torch.Tensor


class Marked(torch.Tensor):
    """A subclass without anything of its own."""


@pytest.fixture
def engine() -> Iterator[stillframe.Engine]:
    with stillframe.Engine(pool_bytes=32 * MIB, block_bytes=4 * MIB) as engine:
        yield engine


def leased(engine: stillframe.Engine) -> int:
    return int(engine.stats()["leased_bytes"])


def identity(tensor: Any) -> int:
    storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else tensor
    return int(storage._cdata)


def trained(size: int = 300) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer whose state a save would defer."""
    torch.manual_seed(0)
    model = torch.nn.Linear(size, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(4):
        step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    weight = next(model.parameters())
    model(torch.ones(2, weight.shape[1])).sum().backward()
    optimizer.step()


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def flat(node: Any) -> list[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        return [node]
    if isinstance(node, dict):
        return [tensor for value in node.values() for tensor in flat(value)]
    if isinstance(node, (list, tuple)):
        return [tensor for value in node for tensor in flat(value)]
    return []


def raw(tensors: list[torch.Tensor]) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in tensors]


# ---- the tree ----


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
def test_a_tensor_of_any_kind_has_a_twin_in_the_snapshot(
    tensor: Callable[[], torch.Tensor], engine: stillframe.Engine
) -> None:
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


def test_a_nested_tensor_has_a_twin(engine: stillframe.Engine) -> None:
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    twin = stillframe.snapshot([jagged], engine=engine).tree[0]
    before = [part.clone() for part in parts]
    jagged.values().zero_()
    assert all(map(torch.equal, twin.unbind(), before))


def test_what_belongs_to_one_storage_does_so_in_the_snapshot(engine: stillframe.Engine) -> None:
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


def test_containers_keep_their_types_and_what_hangs_on_them(engine: stillframe.Engine) -> None:
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


def test_other_objects_are_left_whole(
    engine: stillframe.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    extra = Extra(1, torch.ones(2))
    module = torch.nn.Linear(1, 1)
    new = stillframe.snapshot({"extra": extra, "module": module}, engine=engine).tree
    assert new["extra"] is extra
    assert new["module"] is module
    assert "state_dict" in caplog.text
    assert "Linear" in caplog.text


def test_a_tree_may_contain_itself(engine: stillframe.Engine) -> None:
    tree: dict[str, Any] = {"tensor": torch.ones(2)}
    tree["list"] = [tree]
    new = stillframe.snapshot(tree, engine=engine).tree
    assert new["list"][0] is new
    assert new is not tree


def test_attributes_of_tensors_come_along(engine: stillframe.Engine) -> None:
    tensor = torch.ones(2)
    tensor.note = {"mean": torch.zeros(1)}  # type: ignore[attr-defined]
    new = stillframe.snapshot([tensor], engine=engine).tree[0]
    assert new.note["mean"].equal(torch.zeros(1))
    assert new.note["mean"] is not tensor.note["mean"]  # type: ignore[attr-defined]


def test_a_wrapper_subclass_is_flattened_and_put_together(engine: stillframe.Engine) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    wrapped = TwoTensor(torch.ones(3), torch.zeros(3))
    new = stillframe.snapshot([wrapped], engine=engine).tree[0]
    wrapped.a.fill_(9)
    assert type(new) is TwoTensor
    assert new.a.equal(torch.ones(3))
    assert new.b.equal(torch.zeros(3))


def test_the_snapshot_of_inference_mode_can_be_used_outside(engine: stillframe.Engine) -> None:
    with torch.inference_mode():
        new = stillframe.snapshot([torch.ones(2)], engine=engine).tree[0]
    assert not new.is_inference()
    new.requires_grad_(True).sum().backward()


def test_a_default_device_changes_nothing(engine: stillframe.Engine) -> None:
    with torch.device("meta"):
        new = stillframe.snapshot([torch.ones(2, 2, device="cpu")], engine=engine).tree[0]
    assert new.device.type == "cpu"
    assert new.equal(torch.ones(2, 2))


def test_the_copy_holds_the_bytes_of_the_call(engine: stillframe.Engine) -> None:
    model, optimizer = trained()
    snap = stillframe.snapshot(state_of(model, optimizer), engine=engine)
    expected = [tensor.clone() for tensor in flat(state_of(model, optimizer))]
    for _ in range(3):
        step(model, optimizer)
    assert all(map(torch.equal, flat(snap.tree), expected))


def test_a_saved_snapshot_loads_as_the_tree_would(engine: stillframe.Engine, tmp_path: Any) -> None:
    model, optimizer = trained()
    state = state_of(model, optimizer)
    live, copied = tmp_path / "live" / "x.pt", tmp_path / "copied" / "x.pt"
    live.parent.mkdir()
    copied.parent.mkdir()
    torch.save(state, live)
    torch.save(stillframe.snapshot(state, engine=engine).tree, copied)
    assert all(map(torch.equal, flat(torch.load(live)), flat(torch.load(copied))))
    assert live.stat().st_size == copied.stat().st_size


# ---- memory ----


def test_memory_goes_back_when_the_last_tensor_is_gone(engine: stillframe.Engine) -> None:
    snap = stillframe.snapshot({"a": torch.ones(5), "b": torch.ones(7)}, engine=engine)
    one = snap.tree["a"]
    snap.release()
    snap.release()
    assert leased(engine) > 0
    with pytest.raises(stillframe.StillframeError, match="released"):
        _ = snap.tree
    view = one[1:]
    del one
    assert leased(engine) > 0
    assert view.equal(torch.ones(4))
    del view
    assert leased(engine) == 0


def test_a_tensor_alone_keeps_its_bytes(engine: stillframe.Engine) -> None:
    kept = [
        stillframe.snapshot([torch.full((1000,), float(value))], engine=engine).tree[0]
        for value in range(5)
    ]
    gc.collect()
    for value, tensor in enumerate(kept):
        assert tensor.eq(value).all()
    del tensor
    kept.clear()
    assert leased(engine) == 0


def test_leaving_the_with_block_releases(engine: stillframe.Engine) -> None:
    with stillframe.snapshot([torch.ones(5)], engine=engine) as snap:
        assert snap.tree[0].equal(torch.ones(5))
        assert leased(engine) > 0
    assert leased(engine) == 0


def test_a_tensor_may_be_larger_than_a_block(engine: stillframe.Engine) -> None:
    source = torch.arange(3 * MIB, dtype=torch.int32)  # 12 MiB
    new = stillframe.snapshot([source], engine=engine).tree[0]
    assert new.equal(source)


def test_what_does_not_fit_is_refused_at_once(engine: stillframe.Engine) -> None:
    with pytest.raises(stillframe.PoolExhaustedError, match="pool_bytes"):
        stillframe.snapshot([torch.zeros(33 * MIB, dtype=torch.uint8)], engine=engine)
    first = stillframe.snapshot([torch.zeros(20 * MIB, dtype=torch.uint8)], engine=engine)
    with pytest.raises(stillframe.PoolExhaustedError):
        stillframe.snapshot([torch.zeros(20 * MIB, dtype=torch.uint8)], engine=engine)
    first.release()
    assert stillframe.snapshot([torch.zeros(20 * MIB, dtype=torch.uint8)], engine=engine).tree
    assert int(engine.stats()["committed_bytes"]) <= 32 * MIB


def test_a_save_is_refused_at_once_while_snapshots_hold_the_pool(
    engine: stillframe.Engine, tmp_path: Any
) -> None:
    snap = stillframe.snapshot([torch.zeros(32 * MIB, dtype=torch.uint8)], engine=engine)
    with pytest.raises(stillframe.PoolExhaustedError):
        stillframe.async_save({"x": torch.ones(3)}, tmp_path / "x.pt", engine=engine)
    assert not (tmp_path / "x.pt").exists()
    snap.release()
    stillframe.save({"x": torch.ones(3)}, tmp_path / "x.pt", engine=engine)
    stillframe.wait_all()
    assert os.listdir(tmp_path) == ["x.pt"]


def test_a_snapshot_waits_for_saves(engine: stillframe.Engine, tmp_path: Any) -> None:
    source = torch.zeros(32 * MIB, dtype=torch.uint8)
    with slow("pwrite", 0.02):
        handle = stillframe.async_save(source[: 16 * MIB].clone(), tmp_path / "x", engine=engine)
        snap = stillframe.snapshot(source, engine=engine)
    assert handle.done() or handle.result() is not None
    assert snap.tree.equal(source)


def test_free_blocks_that_lie_apart_are_used(engine: stillframe.Engine) -> None:
    block = torch.arange(4 * MIB, dtype=torch.uint8)
    snaps = [stillframe.snapshot([block], engine=engine) for _ in range(8)]
    for snap in snaps[::2]:
        snap.release()
    scattered = stillframe.snapshot([block, block.flip(0), block, block[1:].clone()], engine=engine)
    assert scattered.tree[1].equal(block.flip(0))
    assert scattered.tree[3].equal(block[1:])
    with pytest.raises(stillframe.PoolExhaustedError):  # 4 MiB free, but 8 in one piece wanted
        stillframe.snapshot([torch.zeros(8 * MIB, dtype=torch.uint8)], engine=engine)


def test_tensors_outlive_their_engine() -> None:
    engine = stillframe.Engine(pool_bytes=8 * MIB, block_bytes=4 * MIB)
    snap = stillframe.snapshot([torch.arange(5)], engine=engine)
    engine.close()
    with pytest.raises(stillframe.StillframeError, match="closed"):
        stillframe.snapshot([torch.ones(1)], engine=engine)
    assert snap.tree[0].equal(torch.arange(5))
    assert leased(engine) > 0
    del snap
    assert leased(engine) == 0
    assert engine.stats()["committed_bytes"] == 0


def test_a_refused_allocation_leaves_no_lease() -> None:
    for call in ("mprotect", "malloc", "calloc"):
        for nth in range(1, 6):
            with stillframe.Engine(pool_bytes=8 * MIB, block_bytes=4 * MIB) as engine:
                with fault(call, nth=nth, err=12), contextlib.suppress(MemoryError):
                    stillframe.snapshot([torch.ones(5)], engine=engine).release()
                assert leased(engine) == 0
                new = stillframe.snapshot([torch.ones(5)], engine=engine)
                assert new.tree[0].equal(torch.ones(5))


# ---- hold_until ----


def test_a_future_holds_the_memory(engine: stillframe.Engine) -> None:
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    snap = stillframe.snapshot([torch.ones(5)], engine=engine)
    snap.hold_until(future)
    snap.release()
    assert leased(engine) > 0
    snap.hold_until(future)
    future.set_result(None)
    assert leased(engine) == 0
    with pytest.raises(stillframe.StillframeError, match="gone back"):
        snap.hold_until(future)


def test_a_future_that_has_ended_holds_nothing(engine: stillframe.Engine) -> None:
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    future.set_result(None)
    snap = stillframe.snapshot([torch.ones(5)], engine=engine)
    snap.hold_until(future)
    assert snap.tree[0].equal(torch.ones(5))
    snap.release()
    assert leased(engine) == 0


def test_a_wait_for_what_is_only_held_is_a_wait(engine: stillframe.Engine) -> None:
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    snap = stillframe.snapshot([torch.zeros(32 * MIB, dtype=torch.uint8)], engine=engine)
    snap.hold_until(future)
    snap.release()
    got: list[Any] = []

    def take() -> None:
        got.append(stillframe.snapshot([torch.ones(5)], engine=engine))

    thread = threading.Thread(target=take)
    thread.start()
    future.set_result(None)
    thread.join()
    assert got[0].tree[0].equal(torch.ones(5))


def test_only_processes_and_futures_can_be_held_for(engine: stillframe.Engine) -> None:
    snap = stillframe.snapshot([torch.ones(5)], engine=engine)
    with pytest.raises(TypeError, match="future"):
        snap.hold_until(7)
    with pytest.raises(ValueError, match="started"):
        snap.hold_until(multiprocessing.get_context("fork").Process(target=print))
    snap.release()
    assert leased(engine) == 0


def _wait_until_returned(engine: stillframe.Engine) -> None:
    """A snapshot of everything waits for the memory that is still held."""
    nbytes = int(engine.stats()["pool_bytes"])
    with stillframe.snapshot([torch.zeros(nbytes, dtype=torch.uint8)], engine=engine):
        pass
    assert leased(engine) == 0


def test_a_forked_writer_reads_shared_memory_until_it_ends(engine: stillframe.Engine) -> None:
    read, write = os.pipe()
    begin, go = os.pipe()
    snap = stillframe.snapshot({"x": torch.arange(1000)}, shared=True, engine=engine)

    def child() -> None:
        os.read(begin, 1)
        os.write(write, b"y" if snap.tree["x"].equal(torch.arange(1000)) else b"n")

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    snap.hold_until(process)
    snap.release()
    assert leased(engine) > 0
    os.write(go, b"g")
    assert os.read(read, 1) == b"y"
    process.join()
    _wait_until_returned(engine)
    for descriptor in (read, write, begin, go):
        os.close(descriptor)


def test_another_program_can_be_held_for(engine: stillframe.Engine) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        snap = stillframe.snapshot([torch.ones(5)], engine=engine)
        snap.hold_until(process)
        snap.release()
        assert leased(engine) > 0
        process.communicate(b"\n")
    _wait_until_returned(engine)


# ---- fork ----


def in_child(function: Callable[[], object]) -> int:
    """Runs a function in a forked child; its exit status, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if function() in (None, True) else 1)
        except BaseException:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_child_may_not_use_the_parents_snapshot(engine: stillframe.Engine) -> None:
    snap = stillframe.snapshot([torch.ones(5)], engine=engine)
    future: concurrent.futures.Future[None] = concurrent.futures.Future()

    def child() -> bool:
        for use in (
            lambda: snap.tree,
            snap.wait,
            snap.release,
            lambda: snap.hold_until(future),
            lambda: stillframe.snapshot([torch.ones(1)], engine=engine),
        ):
            with pytest.raises(stillframe.ForkError):
                use()
        own = stillframe.snapshot([torch.ones(3)], engine=stillframe.Engine(pool_bytes=32 * MIB))
        return own.tree[0].equal(torch.ones(3))

    assert in_child(child) == 0
    assert snap.tree[0].equal(torch.ones(5))


def test_private_memory_is_not_there_in_a_child(engine: stillframe.Engine) -> None:
    tensor = stillframe.snapshot([torch.ones(5)], engine=engine).tree[0]
    assert in_child(lambda: tensor.sum().item() == 5) == -signal.SIGSEGV


def test_a_child_that_drops_tensors_touches_nothing(engine: stillframe.Engine) -> None:
    kept = [stillframe.snapshot([torch.ones(5)], engine=engine).tree[0]]
    assert in_child(kept.clear) == 0
    assert leased(engine) > 0
    assert kept[0].equal(torch.ones(5))


def test_shared_memory_is_private_again_after_its_snapshot(engine: stillframe.Engine) -> None:
    stillframe.snapshot([torch.ones(5)], shared=True, engine=engine).release()
    tensor = stillframe.snapshot([torch.ones(5)], engine=engine).tree[0]
    assert in_child(lambda: tensor.sum().item() == 5) == -signal.SIGSEGV


def test_a_fork_waits_for_a_shared_copy(engine: stillframe.Engine) -> None:
    model, optimizer = trained()
    expected = [tensor.clone() for tensor in flat(state_of(model, optimizer))]
    with slow("lane_copy", 0.05):
        snap = stillframe.snapshot(
            state_of(model, optimizer), overlap=True, shared=True, engine=engine
        )
        # No arithmetic of torch: its threads do not exist in the child.
        assert in_child(lambda: raw(flat(snap.tree)) == raw(expected)) == 0
    snap.wait()


# ---- overlap ----


def test_the_next_step_waits_for_the_copy(engine: stillframe.Engine) -> None:
    model, optimizer = trained()
    expected = [tensor.clone() for tensor in flat(state_of(model, optimizer))]
    with slow("lane_copy", 0.05) as injected:
        before = injected.calls("lane_copy")
        snap = stillframe.snapshot(state_of(model, optimizer), overlap=True, engine=engine)
        step(model, optimizer)
        assert injected.calls("lane_copy") > before
    snap.wait()
    assert all(map(torch.equal, flat(snap.tree), expected))


def test_the_tree_is_complete_when_it_is_asked_for(engine: stillframe.Engine) -> None:
    model, optimizer = trained()
    with slow("lane_copy", 0.05):
        snap = stillframe.snapshot(state_of(model, optimizer), overlap=True, engine=engine)
        tree = snap.tree
    assert all(map(torch.equal, flat(tree), flat(state_of(model, optimizer))))


def test_a_wait_that_takes_too_long_says_so(engine: stillframe.Engine) -> None:
    model, optimizer = trained()
    with slow("lane_copy", 0.3, sticky=False):
        snap = stillframe.snapshot(state_of(model, optimizer), overlap=True, engine=engine)
        with pytest.raises(TimeoutError):
            snap.wait(timeout=0)
    snap.wait()


@pytest.mark.parametrize("through_data", [False, True])
def test_a_change_outside_the_step_is_found_and_named(
    engine: stillframe.Engine, through_data: bool
) -> None:
    model, optimizer = trained()
    state = state_of(model, optimizer)
    with slow("lane_copy", 0.1):
        snap = stillframe.snapshot(state, overlap=True, engine=engine)
        with torch.no_grad():
            weight: Any = model.weight
            (weight.data if through_data else weight).add_(1.0)
        with pytest.raises(stillframe.TornSnapshotError) as caught:
            snap.wait()
    assert caught.value.tensors == ("model.weight",)
    with pytest.raises(stillframe.TornSnapshotError):
        _ = snap.tree
    # From then on that optimizer's state is captured.
    with slow("lane_copy", 1.0) as injected:
        again = stillframe.snapshot(state, overlap=True, engine=engine)
        again.wait()
        assert injected.calls("lane_copy") == 0


def test_a_torn_snapshot_nobody_asks_about_is_logged(
    engine: stillframe.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = trained()
    with slow("lane_copy", 0.1):
        snap = stillframe.snapshot(state_of(model, optimizer), overlap=True, engine=engine)
        with torch.no_grad():
            model.weight.add_(1.0)  # type: ignore[operator, union-attr]
        step(model, optimizer)
    with caplog.at_level(logging.ERROR):
        del snap
        gc.collect()
    assert "model.weight" in caplog.text


def test_dropping_a_snapshot_while_it_is_copied_gives_everything_back(
    engine: stillframe.Engine,
) -> None:
    model, optimizer = trained()
    with slow("lane_copy", 0.05):
        stillframe.snapshot(state_of(model, optimizer), overlap=True, engine=engine).release()
        step(model, optimizer)
    assert leased(engine) == 0
    assert not stillframe.completion.copying or engine.close() is None


def test_closing_an_engine_waits_for_the_copy() -> None:
    model, optimizer = trained()
    engine = stillframe.Engine(pool_bytes=32 * MIB)
    expected = [tensor.clone() for tensor in flat(state_of(model, optimizer))]
    with slow("lane_copy", 0.05):
        snap = stillframe.snapshot(state_of(model, optimizer), overlap=True, engine=engine)
        engine.close()
        snap.wait(timeout=0)
    assert all(map(torch.equal, flat(snap.tree), expected))


def test_a_signal_handler_may_take_a_snapshot_while_one_waits(
    engine: stillframe.Engine,
) -> None:
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    done = threading.Event()

    def handler(number: int, frame: object) -> None:
        assert stillframe.snapshot([torch.ones(3)], engine=engine).tree[0].sum() == 3
        done.set()

    def poke() -> None:
        while not done.wait(0.01):
            os.kill(os.getpid(), signal.SIGUSR1)
        future.set_result(None)

    held = stillframe.snapshot([torch.zeros(4 * MIB, dtype=torch.uint8)], engine=engine)
    held.hold_until(future)
    held.release()
    source = torch.zeros(32 * MIB, dtype=torch.uint8)
    thread = threading.Thread(target=poke)
    old = signal.signal(signal.SIGUSR1, handler)
    try:
        thread.start()
        snap = stillframe.snapshot([source], engine=engine)
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert done.is_set()
    assert snap.tree[0].equal(source)


# ---- the end of the process ----


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


def test_a_process_may_end_with_snapshots_of_every_kind() -> None:
    done = run(
        "import torch, stillframe\n"
        "from stillframe.testing import slow\n"
        "model = torch.nn.Linear(300, 300)\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "for _ in range(4):\n"
        "    model(torch.ones(1, 300)).sum().backward(); optimizer.step()\n"
        "keep = stillframe.snapshot([torch.ones(3)])\n"
        "tensor = stillframe.snapshot([torch.ones(3)]).tree[0]\n"
        "blocker = slow('lane_copy', 0.05); blocker.__enter__()\n"
        "late = stillframe.snapshot(model.state_dict(), overlap=True)\n"
        "print('end')\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
