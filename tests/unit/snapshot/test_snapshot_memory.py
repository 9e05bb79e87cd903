"""The memory of a snapshot: when it returns, what is refused, and which processes may read it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import stillframe
import torch
from fix_snapshots import MIB, engine, flat, raw, state_of, trained
from fix_waits import leased
from stillframe import _core
from stillframe._snapshot.holds import call_at_end
from stillframe._snapshot.snapshot import snapshot_for_pickling
from stillframe.testing import fault, slow

__all__ = ["engine"]  # a fixture


# ---- memory ----


def test_memory_goes_back_when_the_last_tensor_is_gone(engine):
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


def test_copy_for_a_writer_tries_again_while_room_is_expected():
    with stillframe.Engine(pool_bytes=2 * MIB, block_bytes=MIB) as engine:
        kept = [stillframe.snapshot([torch.ones(5)], engine=engine).tree for _ in range(2)]

        def wait_for_room() -> bool:
            kept.pop()
            return bool(kept)

        tree = [torch.ones(MIB // 2)]  # two blocks
        with pytest.raises(stillframe.PoolExhaustedError):
            snapshot_for_pickling(tree, overlap=False, engine=engine)
        assert len(kept) == 2
        with pytest.raises(stillframe.PoolExhaustedError):
            snapshot_for_pickling(
                tree, overlap=False, engine=engine, wait_for_room=lambda: wait_for_room() and False
            )
        assert len(kept) == 1
        taken = snapshot_for_pickling(
            tree, overlap=False, engine=engine, wait_for_room=lambda: not wait_for_room()
        )
        assert taken.tree[0].equal(tree[0]) and not kept


def test_weak_reference_to_the_memory_dies_with_it(engine):
    memory = _core.Snapshot(engine._core, bytearray(), 0).lease()
    ended: list[str] = []
    weakly = weakref.ref(memory, lambda _: ended.append("ended"))
    assert weakly() is memory
    del memory
    assert weakly() is None and ended == ["ended"]


def test_torch_keeps_no_list_of_sparse_tensors_that_were_made(engine):
    sparse = torch.eye(100).to_sparse()
    with stillframe.snapshot({"s": sparse}, engine=engine) as copied:
        assert torch.equal(copied.tree["s"].to_dense(), torch.eye(100))
        assert not torch._utils._sparse_tensors_to_validate


def test_a_tensor_alone_keeps_its_bytes(engine):
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


def test_leaving_the_with_block_releases_the_memory_of_the_snapshot(engine):
    with stillframe.snapshot([torch.ones(5)], engine=engine) as snap:
        assert snap.tree[0].equal(torch.ones(5))
        assert leased(engine) > 0
    assert leased(engine) == 0


def test_tree_that_does_not_fit_is_refused_at_once(engine):
    with pytest.raises(stillframe.PoolExhaustedError, match="pool_bytes"):
        stillframe.snapshot([torch.zeros(33 * MIB, dtype=torch.uint8)], engine=engine)
    first = stillframe.snapshot([torch.zeros(20 * MIB, dtype=torch.uint8)], engine=engine)
    with pytest.raises(stillframe.PoolExhaustedError):
        stillframe.snapshot([torch.zeros(20 * MIB, dtype=torch.uint8)], engine=engine)
    first.release()
    assert stillframe.snapshot([torch.zeros(20 * MIB, dtype=torch.uint8)], engine=engine).tree
    assert int(engine.stats()["committed_bytes"]) <= 32 * MIB


def test_a_save_is_refused_at_once_while_snapshots_hold_the_pool(engine, tmp_path):
    snap = stillframe.snapshot([torch.zeros(32 * MIB, dtype=torch.uint8)], engine=engine)
    with pytest.raises(stillframe.PoolExhaustedError):
        stillframe.async_save({"x": torch.ones(3)}, tmp_path / "x.pt", engine=engine)
    assert not (tmp_path / "x.pt").exists()
    snap.release()
    stillframe.save({"x": torch.ones(3)}, tmp_path / "x.pt", engine=engine)
    stillframe.wait_all()
    assert os.listdir(tmp_path) == ["x.pt"]


def test_a_snapshot_waits_for_saves(engine, tmp_path):
    source = torch.zeros(32 * MIB, dtype=torch.uint8)
    with slow("pwrite", 0.02):
        handle = stillframe.async_save(source[: 16 * MIB].clone(), tmp_path / "x", engine=engine)
        snap = stillframe.snapshot(source, engine=engine)
    # The snapshot has every block, so the save has returned its own.
    assert engine._core.stats()["save_bytes"] == 0 and leased(engine) == 32 * MIB
    assert snap.tree.equal(source)
    handle.result()


def test_tensors_outlive_their_engine():
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


def test_a_refused_allocation_leaves_no_lease():
    for call in ("mprotect", "malloc", "calloc"):
        for nth in range(1, 6):
            with stillframe.Engine(pool_bytes=8 * MIB, block_bytes=4 * MIB) as engine:
                with fault(call, nth=nth, err=12), contextlib.suppress(MemoryError):
                    stillframe.snapshot([torch.ones(5)], engine=engine).release()
                assert leased(engine) == 0
                new = stillframe.snapshot([torch.ones(5)], engine=engine)
                assert new.tree[0].equal(torch.ones(5))


# ---- hold_until ----


def test_a_future_holds_the_memory(engine):
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


def test_ended_future_holds_no_memory(engine):
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    future.set_result(None)
    snap = stillframe.snapshot([torch.ones(5)], engine=engine)
    snap.hold_until(future)
    assert snap.tree[0].equal(torch.ones(5))
    snap.release()
    assert leased(engine) == 0


def test_snapshot_waits_for_memory_that_is_only_held(engine):
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


def test_only_processes_and_futures_can_be_held_for(engine):
    snap = stillframe.snapshot([torch.ones(5)], engine=engine)
    with pytest.raises(TypeError, match="future"):
        snap.hold_until(7)
    with pytest.raises(ValueError, match="started"):
        snap.hold_until(multiprocessing.get_context("fork").Process(target=print))
    snap.release()
    assert leased(engine) == 0


def _wait_until_returned(engine: stillframe.Engine) -> None:
    """Take a snapshot of the whole pool, which waits for memory that is still held."""
    nbytes = int(engine.stats()["pool_bytes"])
    with stillframe.snapshot([torch.zeros(nbytes, dtype=torch.uint8)], engine=engine):
        pass
    assert leased(engine) == 0


def test_a_forked_writer_reads_shared_memory_until_it_ends(engine):
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


def test_another_program_can_be_held_for(engine):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        snap = stillframe.snapshot([torch.ones(5)], engine=engine)
        snap.hold_until(process)
        snap.release()
        assert leased(engine) > 0
        process.communicate(b"\n")
    _wait_until_returned(engine)


def test_a_process_may_be_joined_and_closed_while_it_is_waited_for(caplog):
    descriptors = len(os.listdir("/proc/self/fd"))
    read, write = os.pipe()
    process = multiprocessing.get_context("fork").Process(target=os.read, args=(read, 1))
    process.start()
    over = threading.Event()
    call_at_end(process, over.set)
    os.write(write, b"g")
    process.join()
    process.close()
    assert over.wait(60) and not caplog.records
    for descriptor in (read, write):
        os.close(descriptor)
    assert len(os.listdir("/proc/self/fd")) == descriptors


# ---- fork ----


def in_child(function: Callable[[], object]) -> int:
    """Run a function in a forked child; return its exit status, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            faulthandler.disable()  # some of these children crash on purpose
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os._exit(0 if function() in (None, True) else 1)
        except BaseException:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_child_may_not_use_the_parents_snapshot(engine):
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


def test_private_memory_is_not_there_in_a_child(engine):
    tensor = stillframe.snapshot([torch.ones(5)], engine=engine).tree[0]
    assert in_child(lambda: tensor.sum().item() == 5) == -signal.SIGSEGV


def test_child_that_drops_tensors_returns_no_memory_of_the_parent(engine):
    kept = [stillframe.snapshot([torch.ones(5)], engine=engine).tree[0]]
    assert in_child(kept.clear) == 0
    assert leased(engine) > 0
    assert kept[0].equal(torch.ones(5))


def test_a_fork_waits_for_a_shared_copy(engine):
    model, optimizer = trained()
    expected = [tensor.clone() for tensor in flat(state_of(model, optimizer))]
    with slow("lane_copy", 0.05):
        snap = stillframe.snapshot(
            state_of(model, optimizer), overlap=True, shared=True, engine=engine
        )
        # No torch arithmetic, because its threads do not exist in the child.
        assert in_child(lambda: raw(flat(snap.tree)) == raw(expected)) == 0
    snap.wait()
