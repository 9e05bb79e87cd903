"""Safetensors files of tensors on a device: see tests/unit/save/test_safetensors.py."""

from __future__ import annotations

import pytest
import stillframe
import torch
from fix_flat import assert_holds, flattened, random_tensors
from fix_training import TRAININGS, adamw
from stillframe._base import device as _device
from test_mutation_oracle import few_threads, now, warmed_up

__all__ = ["few_threads"]  # a fixture

MIB = 1 << 20
PAGE = 4096
NAMES = ["adamw", "sgd_with_momentum_and_a_scheduler"]


@pytest.mark.parametrize("pool_blocks", [1, 2, 9])
@pytest.mark.parametrize("name", NAMES)
def test_every_file_holds_the_state_at_the_call(name, pool_blocks, tmp_path, fake):
    training = warmed_up(TRAININGS[name], steps=12)
    path = tmp_path / "state.safetensors"
    fake.delay(500_000, seed=pool_blocks)
    with stillframe.Engine(pool_bytes=pool_blocks * MIB, block_bytes=MIB) as small:
        for _ in range(3):
            wanted = flattened(now(training))
            handle = stillframe.async_save(flattened(training.state()), path, engine=small)
            training.advance()
            report = handle.result()
            assert report is not None and report.deferred_nbytes > MIB
            assert_holds(path, wanted)
    assert fake.copied_bytes > 0


@pytest.mark.parametrize("seed", range(10))
def test_tensors_of_all_kinds_are_copied_from_a_device(seed, tmp_path, fake):
    tensors = random_tensors(seed)
    with stillframe.Engine(pool_bytes=2 * PAGE, block_bytes=PAGE) as small:
        stillframe.save(tensors, tmp_path / "a.safetensors", engine=small)
    assert_holds(tmp_path / "a.safetensors", tensors)


def test_a_write_between_call_and_copy_fails_the_save(tmp_path, fake, engine, monkeypatch):
    training = warmed_up(adamw, steps=12)
    assert training.model is not None
    stream = fake.stream()  # not the calling thread, which must not wait while copies are stopped
    fake.hold(True)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(_device, "current_stream", lambda device: stream)
            handle = stillframe.async_save(
                training.model.state_dict(), tmp_path / "a.safetensors", engine=engine
            )
        with torch.no_grad():
            next(training.model.parameters()).zero_()
    finally:
        fake.hold(False)
    with pytest.raises(stillframe.TornSnapshotError, match=r"0\.weight"):
        handle.result()
    assert list(tmp_path.iterdir()) == []
