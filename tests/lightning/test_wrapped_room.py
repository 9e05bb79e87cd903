"""`AsyncCheckpointIO(checkpoint_io=other)`: waiting for memory that may never return."""

import threading

import stillframe
import torch
from fix_lightning import load
from stillframe._lightning import wrapped

BLOCK = 1 << 20


def ones(blocks):
    return {"x": torch.ones(blocks * BLOCK // 4 - 64)}


def test_save_without_room_waits_for_one_under_way_and_tries_again(
    lit, tmp_path, caplog, monkeypatch
):
    go = threading.Event()

    class Giving(lit.TorchCheckpointIO):
        """A CheckpointIO whose first save frees memory of the pool."""

        def save_checkpoint(self, checkpoint, path, storage_options=None):
            assert go.wait(60)
            kept.release()
            super().save_checkpoint(checkpoint, path)

    def wait_for_end(save):
        go.set()
        return wait(save)

    wait = wrapped.wait_for_end
    monkeypatch.setattr(wrapped, "wait_for_end", wait_for_end)
    with stillframe.Engine(pool_bytes=4 * BLOCK, block_bytes=BLOCK) as engine:
        kept = stillframe.snapshot(ones(2), engine=engine)
        plugin = lit.AsyncCheckpointIO(Giving(), engine=engine, max_in_flight=2)
        plugin.save_checkpoint(ones(1), tmp_path / "a.ckpt")
        plugin.save_checkpoint(ones(3), tmp_path / "b.ckpt")
        plugin.teardown()
    assert "does not fit into the pool" not in caplog.text
    assert len(load(tmp_path / "b.ckpt")["x"]) == 3 * BLOCK // 4 - 64
