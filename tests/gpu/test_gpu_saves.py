"""Saves and snapshots on a real device: right bytes, no device memory, no wait of the host."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from typing import Any

import pytest
import stillframe
import torch
from fix_gpu import Training, same

MIB = 1 << 20
FUSED = functools.partial(torch.optim.AdamW, fused=True)
FOREACH = functools.partial(torch.optim.AdamW, foreach=True)
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@pytest.fixture
def engine() -> Any:
    with stillframe.Engine(pool_bytes=256 * MIB, block_bytes=4 * MIB) as engine:
        engine.warm_up(128 * MIB)
        yield engine


@pytest.mark.parametrize("make", [FUSED, FOREACH, SGD], ids=["fused", "foreach", "sgd"])
def test_every_file_holds_the_state_at_the_call(make, tmp_path, engine):
    training = Training(make)
    for _ in range(10):
        wanted = training.now()
        handle = stillframe.async_save(training.state(), tmp_path / "a.pt", engine=engine)
        training.step()
        training.step()
        report = handle.result()
        same(torch.load(tmp_path / "a.pt", map_location="cpu"), wanted)
        assert report.deferred_nbytes > 0
        print(report.fallbacks)


@pytest.mark.parametrize("pool_blocks", [1, 2, 5])
def test_save_works_with_a_small_pool(pool_blocks, tmp_path):
    training = Training(FUSED)
    with stillframe.Engine(pool_bytes=pool_blocks * MIB, block_bytes=MIB) as small:
        for _ in range(3):
            wanted = training.now()
            handle = stillframe.async_save(training.state(), tmp_path / "a.pt", engine=small)
            training.step()
            handle.result()
            same(torch.load(tmp_path / "a.pt", map_location="cpu"), wanted)


@pytest.mark.parametrize("pool_blocks", [1, 2, 64])
def test_object_in_a_store_holds_the_state_at_the_call(pool_blocks):
    files = pytest.importorskip("fsspec").filesystem("memory")
    training = Training(FUSED)
    with stillframe.Engine(pool_bytes=pool_blocks * MIB, block_bytes=MIB) as small:
        for _ in range(5):
            wanted = training.now()
            handle = stillframe.async_save(training.state(), "memory://gpu/a.pt", engine=small)
            training.step()
            training.step()
            report = handle.result()
            with files.open("gpu/a.pt") as file:
                same(torch.load(file, map_location="cpu"), wanted)
            assert report.deferred_nbytes > 0
            loaded = stillframe.load("memory://gpu/a.pt", map_location="cuda")
            same(loaded, wanted)
    files.rm("gpu/a.pt")


def test_safetensors_file_holds_the_state_at_the_call(tmp_path, engine):
    library = pytest.importorskip("safetensors.torch")
    training = Training(FUSED)
    path = tmp_path / "a.safetensors"
    for _ in range(5):
        wanted = training.now()["model"]
        handle = stillframe.async_save(training.state()["model"], path, engine=engine)
        training.step()
        report = handle.result()
        same(library.load_file(path), wanted)
        assert report.deferred_nbytes > 0


def test_save_takes_no_device_memory(tmp_path, engine):
    training = Training(FUSED)
    stillframe.save(training.state(), tmp_path / "a.pt", engine=engine)
    training.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    handle = stillframe.async_save(training.state(), tmp_path / "a.pt", engine=engine)
    handle.result()
    torch.cuda.synchronize()
    assert (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) == before


def test_neither_call_nor_gate_waits_for_the_device(tmp_path, engine, busy):
    training = Training(FUSED)
    stillframe.save(training.state(), tmp_path / "a.pt", engine=engine)
    wanted = training.now()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # torch's own waits would raise
    try:
        is_busy = busy()
        handle = stillframe.async_save(training.state(), tmp_path / "a.pt", engine=engine)
        assert is_busy(), "the call waited"
        training.step()
        assert is_busy(), "the gate waited"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    handle.result()
    same(torch.load(tmp_path / "a.pt", map_location="cpu"), wanted)


def test_work_queued_before_the_call_is_in_the_file(tmp_path, engine, busy):
    value = torch.zeros(MIB, device="cuda")
    busy()
    value.fill_(1.0)
    handle = stillframe.async_save([value], tmp_path / "a.pt", engine=engine)
    value.fill_(2.0)  # the stream waits for the copy
    handle.result()
    assert torch.load(tmp_path / "a.pt", map_location="cpu")[0].eq(1.0).all()


def test_file_holds_the_state_at_the_call_on_side_streams_of_two_threads(tmp_path, engine):
    failed: list[BaseException] = []

    def one(name: str) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                training = Training(FUSED)
                for _ in range(5):
                    wanted = training.now()
                    handle = stillframe.async_save(training.state(), tmp_path / name, engine=engine)
                    training.step()
                    handle.result()
                    same(torch.load(tmp_path / name, map_location="cpu"), wanted)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=one, args=(f"{i}.pt",)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


def test_file_holds_the_state_at_the_call_with_optimizers_inside_backward(tmp_path, engine):
    training = Training(FUSED)
    optimizers = {p: torch.optim.AdamW([p], fused=True) for p in training.model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in training.model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for _ in range(6):
        training.model(training.input).square().mean().backward()
    for _ in range(4):
        wanted = training.now()
        handle = stillframe.async_save(training.state(), tmp_path / "a.pt", engine=engine)
        training.model(training.input).square().mean().backward()
        handle.result()
        same(torch.load(tmp_path / "a.pt", map_location="cpu"), wanted)


def test_file_holds_the_state_at_the_call_with_a_grad_scaler(tmp_path, engine):
    training, scaler = Training(FUSED), torch.amp.GradScaler("cuda")
    for _ in range(6):
        wanted = training.now()
        handle = stillframe.async_save(training.state(), tmp_path / "a.pt", engine=engine)
        training.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = training.model(training.input).square().mean()
        scaler.scale(loss).backward()
        scaler.step(training.optimizer)
        scaler.update()
        handle.result()
        same(torch.load(tmp_path / "a.pt", map_location="cpu"), wanted)


def test_tensors_may_leave_the_device_during_the_copy(tmp_path, engine):
    training = Training(FUSED)
    wanted = training.now()
    handle = stillframe.async_save(training.state(), tmp_path / "a.pt", engine=engine)
    training.model.cpu()
    for state in training.optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                state[name] = value.cpu()
    torch.cuda.empty_cache()
    torch.full((64 * MIB,), 7.0, device="cuda")
    handle.result()
    same(torch.load(tmp_path / "a.pt", map_location="cpu"), wanted)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_snapshot_is_the_state_at_the_call(overlap, engine):
    training = Training(FUSED)
    for _ in range(4):
        wanted = training.now()
        snap = stillframe.snapshot(training.state(), overlap=overlap, engine=engine)
        training.step()
        same(snap.tree, wanted)
        snap.release()


def test_many_small_tensors_are_saved(tmp_path, engine):
    tree = [torch.full((i % 300 + 1,), float(i), device="cuda") for i in range(5000)]
    handle = stillframe.async_save(tree, tmp_path / "a.pt", engine=engine)
    report = handle.result()
    same(torch.load(tmp_path / "a.pt", map_location="cpu"), tree)
    assert not any("batched" in sentence for sentence in report.fallbacks), report.fallbacks


def test_stats_name_the_driver_and_pool_memory_is_pinned(tmp_path, engine):
    report = stillframe.save([torch.ones(MIB, device="cuda")], tmp_path / "a.pt", engine=engine)
    print(engine.stats()["driver"], report.fallbacks)
    assert "CUDA driver" in engine.stats()["driver"]
    assert not any("pageable" in sentence for sentence in report.fallbacks), report.fallbacks


ALLOCATORS = """
import sys, torch, stillframe
tree = [torch.full((3_000_000 + i,), float(i), device="cuda") for i in range(8)]
wanted = [each.cpu() for each in tree]
handle = stillframe.async_save(tree, sys.argv[1])
del tree
torch.cuda.empty_cache()
torch.full((50_000_000,), -1.0, device="cuda")
handle.result()
got = torch.load(sys.argv[1], map_location="cpu")
assert all(map(torch.equal, got, wanted))
"""


@pytest.mark.parametrize("config", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_file_holds_the_state_at_the_call_with_other_allocators(config, tmp_path):
    import os

    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": config, "PYTORCH_ALLOC_CONF": config}
    done = subprocess.run(
        [sys.executable, "-c", ALLOCATORS, str(tmp_path / "a.pt")],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


DYING = """
import sys, torch, stillframe
engine = stillframe.Engine(pool_bytes=256 << 20)
tree = [torch.ones(20_000_000, device="cuda")]
stillframe.save(tree, sys.argv[1], engine=engine)
index = torch.full((10,), 10**9, device="cuda")
broken = tree[0][index]  # an assertion on the device: the context is lost
handle = stillframe.async_save(tree, sys.argv[1], engine=engine)
try:
    handle.result()
    raise SystemExit("nothing was raised")
except stillframe.SaveError as error:
    print("raised:", error, error.phase)
print(engine.stats()["driver"])
assert "dead" in engine.stats()["driver"]
stillframe.save({"numbers": [1, 2]}, sys.argv[1] + "2", engine=engine)
assert torch.load(sys.argv[1], map_location="cpu")[0].eq(1).all()  # the old file
try:
    torch.cuda.synchronize()
    raise SystemExit("the training's own error is gone")
except RuntimeError:
    pass
"""


def test_a_device_that_dies_fails_the_save_and_keeps_the_old_file(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", DYING, str(tmp_path / "a.pt")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "raised:" in done.stdout
