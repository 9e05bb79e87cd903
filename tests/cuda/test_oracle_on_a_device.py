"""The mutation oracle for a device: see tests/oracle/test_mutation_oracle.py.

Here the device's streams are delayed at random. The next step overwrites everything that was not
captured in time and that the gate's wait on the stream does not protect.
"""

from __future__ import annotations

import os

import pytest
import stillframe
import torch
from fix_training import TRAININGS, adamw, adamw_fused
from stillframe._base import device as _device
from test_mutation_oracle import assert_same, few_threads, now, read, warmed_up

__all__ = ["few_threads"]  # a fixture

MIB = 1 << 20
ROUNDS = int(os.environ.get("STILLFRAME_ORACLE_ROUNDS", "3"))
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # torch.compile's imports give it


@pytest.mark.parametrize("name", TRAININGS)
def test_every_file_holds_the_state_at_the_call(name, tmp_path, fake, engine):
    training = warmed_up(TRAININGS[name], steps=12)
    path = tmp_path / "state.pt"
    fake.delay(2_000_000, seed=hash(name) % 1000 + 1)
    for _ in range(ROUNDS):
        wanted = now(training)
        handle = stillframe.async_save(training.state(), path, engine=engine)
        training.advance()
        training.advance()
        report = handle.result()
        assert report is not None
        assert_same(read(path), wanted)
        late = {t.untyped_storage()._cdata: t.untyped_storage() for t in training.deferred()}
        large = sum(s.nbytes() for s in late.values() if s.nbytes() > 65536)
        if not training.more_is_fine:
            assert report.deferred_nbytes == large
    assert fake.copied_bytes > 0


@pytest.mark.parametrize("pool_blocks", [1, 2, 7])
@pytest.mark.parametrize("make", [adamw, adamw_fused], ids=lambda m: m.__name__)
def test_small_pools_and_overlapping_saves_are_correct(make, pool_blocks, tmp_path, fake):
    kinds = ("registered", "streams", "contexts")
    before = [fake.live(kind) for kind in kinds]  # of the default engine
    training = warmed_up(make, steps=12)
    made = []
    fake.delay(500_000, seed=pool_blocks)
    with stillframe.Engine(pool_bytes=pool_blocks * MIB, block_bytes=MIB) as small:
        for i in range(2 * ROUNDS):
            state = training.state()
            handle = stillframe.async_save(state, tmp_path / f"{i}", engine=small)
            made.append((now(training), handle))
            if i % 2:
                training.advance()
        for i, (wanted, handle) in enumerate(made):
            report = handle.result()
            assert report is not None and report.deferred_nbytes > 0
            assert_same(read(tmp_path / str(i)), wanted)
    assert [fake.live(kind) for kind in kinds] == before


def test_host_waits_for_the_device_only_if_the_pool_is_too_small(tmp_path, fake):
    training = warmed_up(adamw, steps=12)
    with stillframe.Engine(pool_bytes=64 * MIB, block_bytes=MIB) as large:
        large.warm_up(64 * MIB)
        handle = stillframe.async_save(training.state(), tmp_path / "a", engine=large)
        training.advance()
        assert handle.result() is not None
        stats = large.stats()
        assert stats["committed_bytes"] == 64 * MIB
        assert stats["retired_bytes"] == 0
        assert fake.live("registered") > 0
        large.trim()
        assert large.stats()["committed_bytes"] == 0


def test_a_write_between_call_and_copy_fails_the_save(tmp_path, fake, engine, monkeypatch):
    training = warmed_up(adamw, steps=12)
    path = tmp_path / "a"
    stillframe.save(training.state(), path, engine=engine)
    before = read(path)
    assert training.model is not None
    # not the calling thread, which must not wait while the device is stopped
    stream = fake.stream()
    fake.hold(True)  # otherwise all bytes may be copied before
    try:
        with monkeypatch.context() as patch:
            patch.setattr(_device, "current_stream", lambda device: stream)
            handle = stillframe.async_save(training.state(), path, engine=engine)
        with torch.no_grad():
            next(training.model.parameters()).zero_()
    finally:
        fake.hold(False)
    with pytest.raises(stillframe.TornSnapshotError, match=r"0\.weight"):
        handle.result()
    assert_same(read(path), before)
    training.advance()
    # From now on all storages of this optimizer are captured.
    report = stillframe.async_save(training.state(), path, engine=engine).result()
    assert report is not None and report.deferred_nbytes == 0


def test_check_mutation_compares_every_byte(tmp_path, fake, engine):
    training = warmed_up(adamw, steps=12)
    handle = stillframe.async_save(
        training.state(), tmp_path / "a", engine=engine, check_mutation=True
    )
    training.advance()
    wanted = handle.result()
    assert wanted is not None and wanted.deferred_nbytes > 0
