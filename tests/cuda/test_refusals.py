"""Saves from a device that are refused, and failures during such saves."""

from __future__ import annotations

import os

import pytest
import stillframe
import torch
from fix_processes import run_python
from fix_training import adamw
from test_mutation_oracle import assert_same, now, read, warmed_up

MIB = 1 << 20
OUT_OF_MEMORY, INVALID_VALUE, NOT_SUPPORTED, ILLEGAL_ADDRESS = 2, 1, 801, 700


def state(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"large": torch.full((MIB,), value), "small": torch.full((10,), value)}


def test_a_save_while_a_graph_is_captured_is_refused(tmp_path, fake, engine):
    fake.capture(True)
    with pytest.raises(stillframe.StillframeError, match="graph"):
        stillframe.async_save(state(), tmp_path / "a", engine=engine)
    fake.capture(False)
    stillframe.save(state(), tmp_path / "a", engine=engine)
    assert engine.stats()["saves_total"] == 1


def test_captured_step_waits_on_the_host_and_its_state_is_captured_afterwards(
    tmp_path, fake, engine
):
    training = warmed_up(adamw, steps=12)
    wanted = now(training)
    handle = stillframe.async_save(training.state(), tmp_path / "a", engine=engine)
    fake.capture(True)
    training.advance()
    fake.capture(False)
    report = handle.result()
    assert report is not None and report.deferred_nbytes > 0
    assert_same(read(tmp_path / "a"), wanted)
    report = stillframe.async_save(training.state(), tmp_path / "a", engine=engine).result()
    assert report is not None and report.deferred_nbytes == 0


def test_memory_that_cannot_be_registered_comes_from_the_driver(tmp_path, fake, engine):
    # Observers and the default engine have memory.
    before = fake.live("allocated"), fake.live("registered")
    fake.fail("cuMemHostRegister_v2", sticky=True, code=OUT_OF_MEMORY)
    report = stillframe.save(state(), tmp_path / "a", engine=engine)
    assert report is not None
    assert any("cuMemHostAlloc" in each for each in report.fallbacks)
    assert fake.live("allocated") > before[0] and fake.live("registered") == before[1]
    assert_same(read(tmp_path / "a"), state())
    engine.trim()
    assert fake.live("allocated") == before[0]


def test_save_works_if_memory_cannot_be_pinned(tmp_path, fake, engine):
    fake.allow_pageable(True)
    fake.fail("cuMemHostRegister_v2", sticky=True, code=OUT_OF_MEMORY)
    fake.fail("cuMemHostAlloc", sticky=True, code=OUT_OF_MEMORY)
    report = stillframe.save(state(), tmp_path / "a", engine=engine)
    assert report is not None
    assert any("pageable" in each for each in report.fallbacks)
    assert_same(read(tmp_path / "a"), state())


def test_refused_large_regions_are_registered_in_smaller_ones(fake, engine):
    before = fake.live("registered")
    fake.fail("cuMemHostRegister_v2", code=OUT_OF_MEMORY)
    engine.warm_up(8 * MIB)
    assert fake.live("registered") == before + 2


def test_pool_above_128_mib_is_registered_in_several_regions(fake):
    """The fake driver reports a longer registration as a violation."""
    before = fake.live("registered")
    with stillframe.Engine(pool_bytes=260 * MIB, block_bytes=MIB) as engine:
        engine.warm_up(260 * MIB)
        assert fake.live("registered") == before + 3


def test_driver_without_batched_copies_gets_single_copies(tmp_path, fake, engine):
    fake.fail("cuMemcpyBatchAsync_v2", sticky=True, code=NOT_SUPPORTED)
    tree = {str(i): torch.full((100,), float(i)) for i in range(100)}
    stillframe.save(tree, tmp_path / "a", engine=engine)
    assert_same(read(tmp_path / "a"), tree)
    assert fake.calls("cuMemcpyDtoHAsync_v2") >= 100


def test_a_device_that_dies_in_mid_copy_fails_its_saves_and_no_others(tmp_path, fake):
    training = warmed_up(adamw, steps=12)
    path = tmp_path / "a"
    with stillframe.Engine(pool_bytes=64 * MIB, block_bytes=MIB) as engine:
        stillframe.save(training.state(), path, engine=engine)
        before = read(path)
        fake.fail_copy(10, ILLEGAL_ADDRESS)
        handle = stillframe.async_save(training.state(), path, engine=engine)
        training.advance()  # training goes on, and raises no error of the save
        with pytest.raises(stillframe.SaveError, match=r"ILLEGAL_ADDRESS") as info:
            handle.result()
        assert info.value.phase == "stage"
        assert_same(read(path), before)
        stats = engine.stats()
        assert "Device 0 is dead" in str(stats["driver"])
        assert int(stats["retired_bytes"]) > 0
        with pytest.raises(stillframe.SaveError, match="dead"):
            stillframe.save(state(), path, engine=engine)
        # Saves without tensors of that device work as before.
        stillframe.save({"numbers": list(range(1000))}, tmp_path / "b", engine=engine)
        assert engine.stats()["leased_bytes"] == 0


def test_without_a_driver_the_error_names_the_library(tmp_path):
    script = f"""
import stillframe, torch
from stillframe._tree import skeleton
from stillframe._base import device as _device
print(stillframe.default_engine().stats()["driver"])
skeleton._types = skeleton._make_torch_types(
    where=lambda t: 1, device_index=lambda t: 0)
_device.current_stream = lambda device: 0
try:
    stillframe.save({{"a": torch.ones(10)}}, {str(tmp_path / "a")!r})
except stillframe.SaveError as error:
    print("refused:", error)
stillframe.save({{"a": [1, 2]}}, {str(tmp_path / "a")!r})
"""
    env = {**os.environ, "STILLFRAME_LIBCUDA": "/nowhere/libcuda.so.1"}
    done = run_python("-c", script, env=env)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "/nowhere/libcuda.so.1" in first
    assert second.startswith("refused:") and "/nowhere/libcuda.so.1" in second
    # The log has the same text, once.
    assert done.stderr.count("CUDA tensors cannot be saved or loaded: no CUDA driver") == 1, (
        done.stderr
    )


@pytest.mark.parametrize(
    "call",
    [
        "cuDeviceGet",
        "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent_v2",
        "cuStreamCreate",
        "cuEventCreate",
        "cuEventRecord",
        "cuStreamWaitEvent",
        "cuMemcpyDtoHAsync_v2",
        "cuEventQuery",
        "*",
    ],
)
@pytest.mark.parametrize("code", [OUT_OF_MEMORY, INVALID_VALUE, ILLEGAL_ADDRESS])
def test_save_survives_the_failure_of_any_driver_call(call, code, tmp_path, fake):
    """The path holds the old or the new file, nothing hangs, and the next engine works."""
    old, new = state(1.0), state(2.0)
    path = tmp_path / "a"
    outcomes = set()
    for nth in range(1, 12):
        stillframe.save(old, path)
        with stillframe.Engine(pool_bytes=8 * MIB, block_bytes=MIB) as engine:
            fake.fail(call, nth=nth, code=code)
            try:
                stillframe.save(new, path, engine=engine)
                outcomes.add("new")
                assert_same(read(path), new)
            except stillframe.StillframeError:
                outcomes.add("old")
                assert_same(read(path), old)
        hits = fake.hits
        fake.reset()
        if not hits:
            break
    assert outcomes
