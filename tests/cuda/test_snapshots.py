"""Snapshots of tensors on a device: few batches, one wait, and no storage released too early."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import stillframe
import torch
from fix_training import adamw
from fix_waits import eventually, leased
from stillframe._base import device as _device
from stillframe._save import completion
from stillframe._snapshot.copy import Copy, copy_to_ordinary_memory
from stillframe.testing import FakeDriver
from test_mutation_oracle import assert_same, few_threads, now, warmed_up

__all__ = ["few_threads"]  # a fixture

MIB = 1 << 20
OUT_OF_MEMORY, INVALID_VALUE, NOT_SUPPORTED, ILLEGAL_ADDRESS = 2, 1, 801, 700


def tree(value: float = 1.0) -> dict[str, Any]:
    large = torch.full((3 * MIB // 4,), value)
    return {
        "large": large,
        "tied": [large, large[5:10]],
        "small": [torch.full((n,), value) for n in range(20)],
        "sparse": (torch.eye(4) * value).to_sparse(),
        "number": 7,
    }


def check(copied: dict[str, Any], value: float = 1.0) -> None:
    wanted = tree(value)
    assert torch.equal(copied["sparse"].to_dense(), wanted.pop("sparse").to_dense())
    assert_same({name: each for name, each in copied.items() if name != "sparse"}, wanted)


def test_small_tensors_are_copied_in_one_batch_with_the_state_at_the_call(fake, engine):
    fake.delay(500_000, seed=3)
    source = tree()
    snap = stillframe.snapshot(source, engine=engine)
    source["large"].fill_(-1.0)  # the current stream waits for the copies
    for each in source["small"]:
        each.fill_(-1.0)
    copied = snap.tree
    check(copied)
    assert copied["tied"][0] is copied["large"]
    # One batch for all small tensors; there is a single large one.
    assert fake.calls("cuMemcpyBatchAsync_v2") == 1
    assert fake.calls("cuMemcpyDtoHAsync_v2") == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_snapshot_of_empty_tensors_takes_no_memory(fake, engine, overlap):
    before = dict(completion.copying)
    snap = stillframe.snapshot({"a": torch.zeros(0, 3)}, overlap=overlap, engine=engine)
    assert dict(completion.copying) == before  # no entry is left, because nothing would remove it
    snap.wait(timeout=0)
    assert snap.tree["a"].shape == (0, 3)


def test_dropped_snapshot_returns_its_memory_after_the_copy(fake, engine):
    kinds = ("registered", "streams", "contexts")
    before = [fake.live(kind) for kind in kinds]
    fake.delay(1_000_000, seed=7)
    for _ in range(20):
        snap = stillframe.snapshot(tree(), engine=engine)
        del snap
    gc.collect()
    stillframe.snapshot([torch.ones(5)], engine=engine).wait()
    with stillframe.snapshot([torch.ones(5)], engine=engine) as last:
        last.wait()
    del last
    engine.close()  # waits for copies
    assert engine.stats()["leased_bytes"] == 0
    assert [fake.live(kind) for kind in kinds] == before


@pytest.mark.parametrize("overlap", [False, True])
def test_snapshot_of_training_state_is_the_state_at_the_call(overlap, fake, engine):
    training = warmed_up(adamw, steps=12)
    fake.delay(1_000_000, seed=11)
    for _ in range(4):
        wanted = now(training)
        snap = stillframe.snapshot(training.state(), overlap=overlap, engine=engine)
        training.advance()
        training.advance()
        assert_same(snap.tree, wanted)
        snap.release()


def test_a_write_between_call_and_copy_tears_the_snapshot(fake, engine, monkeypatch):
    training = warmed_up(adamw, steps=12)
    assert training.model is not None
    # not the calling thread, which must not wait while the device is stopped
    stream = fake.stream()
    monkeypatch.setattr(_device, "current_stream", lambda device: stream)
    fake.hold(True)
    try:
        snap = stillframe.snapshot(training.state(), overlap=True, engine=engine)
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.zero_()
    finally:
        fake.hold(False)
    with pytest.raises(stillframe.TornSnapshotError, match="weight"):
        snap.wait()


def test_a_snapshot_while_a_graph_is_captured_is_refused(fake, engine):
    fake.capture(True)
    with pytest.raises(stillframe.StillframeError, match="graph"):
        stillframe.snapshot(tree(), engine=engine)
    fake.capture(False)
    stillframe.snapshot(tree(), engine=engine).wait()


def test_snapshot_works_in_pageable_memory_if_registration_fails(fake, engine):
    before = fake.live("registered")
    fake.allow_pageable(True)
    fake.fail("cuMemHostRegister_v2", sticky=True, code=OUT_OF_MEMORY)
    with stillframe.snapshot(tree(), engine=engine) as snap:
        check(snap.tree)
    assert fake.live("registered") == before


def test_memory_allocated_by_the_driver_is_not_used_for_snapshots(tmp_path, fake):
    """Blocks from cuMemHostAlloc are not adjacent, so they return to the pool before a snapshot."""
    before = fake.live("allocated")
    with stillframe.Engine(pool_bytes=6 * MIB, block_bytes=MIB) as engine:
        fake.fail("cuMemHostRegister_v2", sticky=True, code=OUT_OF_MEMORY)
        stillframe.save({"a": torch.ones(5 * MIB // 4)}, tmp_path / "a", engine=engine)
        assert fake.live("allocated") > before
        fake.reset()
        with stillframe.snapshot(tree(), engine=engine) as snap:
            check(snap.tree)
        with stillframe.snapshot([torch.ones(6 * MIB // 4)], engine=engine) as snap:
            assert_same(snap.tree, [torch.ones(6 * MIB // 4)])
            assert fake.live("allocated") == before
        del snap
        stillframe.save(tree(), tmp_path / "a", engine=engine)


def test_memory_shared_with_spawned_processes_can_be_registered(tmp_path, fake):

    def tensors() -> dict[str, Any]:  # torch warns when a sparse tensor arrives
        return {name: each for name, each in tree().items() if name != "sparse"}

    before = fake.live("registered"), fake.live("allocated")
    with stillframe.Engine(pool_bytes=8 * MIB, block_bytes=MIB, shared_memory=True) as engine:
        source, wanted = tensors(), tensors()
        with stillframe.snapshot(source, shared="spawn", engine=engine) as snap:
            assert fake.live("registered") > before[0]
            source["large"].fill_(-1.0)
            data = ForkingPickler.dumps(snap.tree)
        assert_same(pickle.loads(data), wanted)
        # The memory is on loan until a thread learns that the receiver has dropped it.
        assert gives_back(engine)
        engine.trim()
        assert fake.live("registered") == before[0]
        # Blocks with memory of the driver have no pages in the file, and get them back later.
        fake.fail("cuMemHostRegister_v2", sticky=True, code=OUT_OF_MEMORY)
        stillframe.save({"a": torch.ones(7 * MIB // 4)}, tmp_path / "a", engine=engine)
        assert fake.live("allocated") > before[1]
        fake.reset()
        with stillframe.snapshot(tensors(), shared="spawn", engine=engine) as snap:
            data = ForkingPickler.dumps(snap.tree)
        assert_same(pickle.loads(data), wanted)


def test_refused_batch_is_copied_one_by_one(tmp_path, fake, engine):
    fake.fail("cuMemcpyBatchAsync_v2", sticky=True, code=NOT_SUPPORTED)
    with stillframe.snapshot(tree(), engine=engine) as snap:
        check(snap.tree)
    report = stillframe.save(tree(), tmp_path / "a", engine=engine)
    assert report is not None and any("batch" in each for each in report.fallbacks)


def test_a_copy_never_crosses_two_registrations(fake):
    before = fake.live("registered")
    with stillframe.Engine(pool_bytes=16 * MIB, block_bytes=MIB) as engine:
        # so that there are several registrations
        fake.fail("cuMemHostRegister_v2", code=OUT_OF_MEMORY)
        engine.warm_up(12 * MIB)
        assert fake.live("registered") > before + 1
        source = [torch.arange(13 * MIB // 4, dtype=torch.int32)]
        with stillframe.snapshot(source, engine=engine) as snap:
            assert_same(snap.tree, source)


def gives_back(engine: stillframe.Engine) -> bool:
    """Wait until the memory is returned: the completion thread may still be finishing a copy."""
    return eventually(lambda: leased(engine) == 0)


def test_a_device_that_dies_fails_the_snapshot_and_retires_its_memory(tmp_path, fake):
    with stillframe.Engine(pool_bytes=16 * MIB, block_bytes=MIB) as engine:
        fake.fail_copy(3, ILLEGAL_ADDRESS)
        # Either in the call, or afterwards, when the failure is noticed.
        with pytest.raises(stillframe.StillframeError, match="ILLEGAL_ADDRESS"):
            stillframe.snapshot(tree()["small"], engine=engine).wait()
        assert gives_back(engine)
        stats = engine.stats()
        assert int(stats["retired_bytes"]) > 0
        with pytest.raises(stillframe.StillframeError, match="dead"):
            stillframe.snapshot(tree(), engine=engine)
        # Retired blocks are never leased again.
        with pytest.raises(stillframe.PoolExhaustedError):
            stillframe.snapshot([torch.ones(16 * MIB // 4)], engine=engine)
        stillframe.save({"numbers": [1, 2]}, tmp_path / "b", engine=engine)
    assert "Device 0 is dead" in str(stats["driver"])


@pytest.fixture
def held(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Copy]]:
    """Stop all streams until a call waits for the end of its copy; return the calls that waited."""

    def finish(copy: Copy) -> None:
        fake.hold(False)
        waited.append(copy)
        wait(copy)

    waited: list[Copy] = []
    wait, stream = Copy.finish, fake.stream()
    monkeypatch.setattr(Copy, "finish", finish)
    monkeypatch.setattr(_device, "current_stream", lambda number: stream)
    fake.hold(True)
    yield waited
    fake.hold(False)


def test_failure_in_a_snapshot_call_is_raised_and_keeps_no_memory(fake, held):
    with stillframe.Engine(pool_bytes=16 * MIB, block_bytes=MIB) as engine:
        fake.fail("cuMemcpyBatchAsync_v2", code=ILLEGAL_ADDRESS)
        with pytest.raises(stillframe.StillframeError, match="ILLEGAL_ADDRESS") as refused:
            stillframe.snapshot([torch.ones(MIB), *tree()["small"]], engine=engine)
        assert len(held) == 1
        assert refused.tb is not None and gives_back(engine)


def test_tensors_whose_making_reads_their_bytes_are_made_after_the_copy(engine, held):
    snap = stillframe.snapshot({"sparse": torch.eye(4).to_sparse()}, engine=engine)
    assert len(held) == 1
    assert torch.equal(snap.tree["sparse"].to_dense(), torch.eye(4))


@pytest.mark.parametrize(
    "call",
    [
        "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent_v2",
        "cuStreamCreate",
        "cuEventCreate",
        "cuEventRecord",
        "cuStreamWaitEvent",
        "cuMemcpyBatchAsync_v2",
        "cuMemcpyDtoHAsync_v2",
        "cuEventQuery",
        "*",
    ],
)
@pytest.mark.parametrize("code", [OUT_OF_MEMORY, INVALID_VALUE, ILLEGAL_ADDRESS])
def test_snapshot_survives_the_failure_of_any_driver_call(call, code, fake):
    """The copy is right or missing, nothing hangs, and only a dead device's memory is lost."""
    for nth in range(1, 40):
        with stillframe.Engine(pool_bytes=8 * MIB, block_bytes=MIB) as engine:
            fake.allow_pageable(True)  # a pageable fallback is expected where pinning fails
            fake.fail(call, nth=nth, code=code)
            try:
                snap = stillframe.snapshot(tree(), engine=engine)
                check(snap.tree)
            except stillframe.StillframeError:
                pass
            snap = None
            hits = fake.hits
        assert engine.stats()["leased_bytes"] == 0
        assert fake.violations == []
        fake.reset()
        if not hits:
            break


def test_copies_to_ordinary_memory_make_no_batched_driver_call(fake):
    built, _, _ = copy_to_ordinary_memory(tree())
    check(built)
    assert fake.calls("cuMemcpyBatchAsync_v2") == 0
