"""CPUOffloadCallback in real runs: every kind of writer writes the state at the call."""

import gc
import logging
import queue
import threading

import pytest
import stillframe
import torch
from fix_lightning import assert_same, at, every_steps, load, loader, trainer
from fix_offload import (
    KEYS,
    leased,
    lightning_async,
    nothing_stays_leased,
    offload,
    recorder,
)

__all__ = ["nothing_stays_leased", "offload"]  # fixtures


def writer(pkg, kind, kept):
    """Return a CheckpointIO of each kind; a user's own adds checkpoints to `kept`."""
    if kind == "sync":
        return pkg.TorchCheckpointIO()
    if kind == "async":
        return lightning_async(pkg)()
    if kind == "ours":
        return pkg.AsyncCheckpointIO()

    class Later(pkg.TorchCheckpointIO):
        """Keeps the dictionary for a thread that starts after the training."""

        def save_checkpoint(self, checkpoint, path, storage_options=None):
            kept.append((checkpoint, path))

    return Later()


def write_later(kept):
    def write():
        while kept:
            checkpoint, path = kept.pop(0)
            torch.save(checkpoint, path)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()


@pytest.mark.parametrize("kind", ["sync", "async", "ours", "later"])
def test_file_holds_the_state_at_the_call_of_the_save(pkg, offload, tmp_path, kind):
    seen, kept = [], []
    callback = offload()
    run = trainer(
        pkg,
        tmp_path,
        plugin=writer(pkg, kind, kept),
        callbacks=[recorder(pkg, seen), callback, every_steps(pkg, tmp_path, 2, save_top_k=-1)],
        max_steps=8,
    )
    run.fit(pkg.Model(), loader())
    if kind == "later":
        assert len(kept) == 4
        assert stillframe.default_engine().stats()["leased_bytes"] > 0
        write_later(kept)
    for number, expected in enumerate(seen):
        found = load(tmp_path / f"step={2 * number + 2}.ckpt")
        assert_same({key: found[key] for key in KEYS}, expected)
    state = callback.state_dict()
    assert state["checkpoint_count"] == 4
    assert (state["total_time_saved"] == 0) == (kind == "ours")
    assert state["total_memory_freed"] == 0


def in_its_own_thread(pkg, gate):
    """Return a CheckpointIO whose thread writes each file when the gate opens."""

    class Threaded(pkg.TorchCheckpointIO):
        def __init__(self):
            self.waiting = queue.SimpleQueue()
            self.thread = threading.Thread(target=self.write)
            self.thread.start()

        def save_checkpoint(self, checkpoint, path, storage_options=None):
            self.waiting.put((checkpoint, path))

        def write(self):
            while (item := self.waiting.get()) is not None:
                assert gate.acquire(timeout=60)
                torch.save(*item)
                del item

        def teardown(self):
            gate.release(20)
            self.waiting.put(None)
            self.thread.join()

    return Threaded()


def behind_a_gate(pkg, gate):
    """Return Lightning's AsyncCheckpointIO, whose thread starts a file when the gate opens."""

    class WaitsForTheGate(pkg.TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            assert gate.acquire(timeout=60)
            super().save_checkpoint(checkpoint, path, storage_options)

    return lightning_async(pkg)(WaitsForTheGate())


@pytest.mark.parametrize("make_writer", [in_its_own_thread, behind_a_gate])
def test_a_writer_slower_than_training_sees_no_byte_of_a_later_step(
    pkg, offload, tmp_path, make_writer
):
    """The run saves at every step, and each file is started three saves later."""
    seen, gate = [], threading.Semaphore(0)

    class Releases(pkg.Callback):
        def on_train_batch_end(self, trainer, module, *args):
            if trainer.global_step > 3:
                gate.release()

        def on_train_end(self, trainer, module):
            gate.release(20)

    run = trainer(
        pkg,
        tmp_path,
        plugin=make_writer(pkg, gate),
        callbacks=[
            recorder(pkg, seen),
            offload(),
            Releases(),
            every_steps(pkg, tmp_path, 1, save_top_k=-1),
        ],
        max_steps=10,
    )
    run.fit(pkg.Model(), loader(nr_samples=64))
    assert len(seen) == 10
    for number, expected in enumerate(seen):
        found = load(tmp_path / f"step={number + 1}.ckpt")
        assert_same({key: found[key] for key in KEYS}, expected)


def test_with_our_plugin_a_save_logs_one_line_and_counts_once(pkg, offload, tmp_path, caplog):
    callback = offload()
    run = trainer(
        pkg,
        tmp_path,
        plugin=pkg.AsyncCheckpointIO(),
        callbacks=[callback, every_steps(pkg, tmp_path, 2)],
        max_steps=4,
    )
    with caplog.at_level(logging.DEBUG, "stillframe"):
        run.fit(pkg.Model(), loader())
    lines = [each.getMessage() for each in caplog.records if "checkpoint " in each.getMessage()]
    lines = [line for line in lines if "CPUOffloadCallback: checkpoint" in line]
    assert len(lines) == 2
    assert all("left to stillframe's AsyncCheckpointIO" in line for line in lines)
    assert callback.state_dict() == {
        "checkpoint_count": 2,
        "total_time_saved": 0.0,
        "total_memory_freed": 0.0,
        "is_enabled": True,
    }


def test_wrapped_checkpoint_io_gets_the_copies(pkg, offload, tmp_path):
    """The wrapped CheckpointIO gets the callback's copies."""
    seen = []
    callback = offload()
    run = trainer(
        pkg,
        tmp_path,
        plugin=pkg.AsyncCheckpointIO(pkg.TorchCheckpointIO()),
        callbacks=[
            recorder(pkg, seen),
            callback,
            every_steps(pkg, tmp_path, 2, save_top_k=-1),
        ],
        max_steps=6,
    )
    run.fit(pkg.Model(), loader())
    assert callback.state_dict()["checkpoint_count"] == 3
    assert callback.state_dict()["total_time_saved"] > 0
    for number, expected in enumerate(seen):
        found = load(tmp_path / f"step={2 * number + 2}.ckpt")
        assert_same({key: found[key] for key in KEYS}, expected)


def test_checkpoint_of_weights_alone_is_complete(pkg, offload, tmp_path):
    """Lightning asks no callback about such a checkpoint."""
    callback = offload()
    trainer(
        pkg,
        tmp_path,
        callbacks=[callback, every_steps(pkg, tmp_path, 2, save_weights_only=True)],
        max_steps=2,
    ).fit(pkg.Model(), loader())
    assert "optimizer_states" not in load(tmp_path / "step=2.ckpt")
    assert callback.state_dict()["checkpoint_count"] == 0


def test_callback_does_not_change_the_training(pkg, offload, tmp_path):
    losses = []
    for callbacks in ([], [offload()]):
        model = pkg.Model()
        before = [id(each) for each in model.parameters()]
        trainer(
            pkg, tmp_path, callbacks=[*callbacks, every_steps(pkg, tmp_path, 2)], max_steps=6
        ).fit(model, loader())
        assert [id(each) for each in model.parameters()] == before
        losses.append(model.losses)
    assert losses[0] == losses[1]


def test_callback_state_is_restored_on_resume(pkg, offload, tmp_path):
    callbacks = [offload(), every_steps(pkg, tmp_path, 2, save_top_k=-1)]
    trainer(pkg, tmp_path, callbacks=callbacks, max_steps=4).fit(pkg.Model(), loader())
    resumed = offload()
    callbacks = [resumed, every_steps(pkg, tmp_path, 2, save_top_k=-1)]
    trainer(pkg, tmp_path, callbacks=callbacks, max_steps=6).fit(
        pkg.Model(), loader(), ckpt_path=tmp_path / "step=4.ckpt"
    )
    # When the checkpoint of step 4 was made, one checkpoint had been counted.
    assert resumed.state_dict()["checkpoint_count"] == 2
    assert resumed.state_dict()["total_time_saved"] > 0


def test_exception_during_a_run_returns_all_leases(pkg, offload, tmp_path, caplog):
    def fail(trainer):
        raise RuntimeError("in mid-run")

    callback = offload()
    run = trainer(
        pkg,
        tmp_path,
        plugin=lightning_async(pkg)(),
        callbacks=[callback, every_steps(pkg, tmp_path, 1), at(pkg, {5: fail})],
    )
    with (
        caplog.at_level(logging.INFO, "stillframe"),
        pytest.raises(RuntimeError, match="in mid-run"),
    ):
        run.fit(pkg.Model(), loader())
    assert callback.state_dict()["checkpoint_count"] == 4
    assert "RuntimeError ended the run; 4 checkpoints" in caplog.text
    # the fixture nothing_stays_leased checks the rest


def test_failed_writer_returns_all_leases(pkg, offload, tmp_path):
    class Full(pkg.TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            assert leased() > 0
            raise OSError(28, "full")

    run = trainer(
        pkg, tmp_path, plugin=Full(), callbacks=[offload(), every_steps(pkg, tmp_path, 1)]
    )
    with pytest.raises(OSError, match="full") as caught:
        run.fit(pkg.Model(), loader())
    # A traceback that is kept refers to frames, which refer to the checkpoint.
    del caught, run
    gc.collect()
    assert leased() == 0


def test_failure_of_a_later_callback_returns_all_leases(pkg, offload, tmp_path):
    class Fails(pkg.Callback):
        def on_save_checkpoint(self, trainer, module, checkpoint):
            raise ValueError("behind")

    run = trainer(
        pkg, tmp_path, callbacks=[offload(), Fails(), every_steps(pkg, tmp_path, 1)], max_steps=2
    )
    with pytest.raises(ValueError, match="behind") as caught:
        run.fit(pkg.Model(), loader())
    del caught, run
    gc.collect()
    assert leased() == 0


def test_expected_sizes_are_logged_when_training_starts(pkg, offload, tmp_path, caplog):
    callback = offload()
    with caplog.at_level(logging.INFO, "stillframe"):
        trainer(pkg, tmp_path, callbacks=[callback], max_steps=1).fit(pkg.Model(), loader())
    parameters = 300 * 300 + 300 + 2 * 300 + 300 + 1
    model = 4 * (parameters + 2 * 300) + 8  # BatchNorm's statistics and counter
    checkpoint = model + 2 * 4 * parameters + 4 * 6  # AdamW: two moments, a counter each
    assert f"{parameters:,} parameters, {parameters:,} of them trained" in caplog.text
    assert f"model {model / 1000:.3g} kB, checkpoint about {checkpoint / 1e6:.3g} MB" in caplog.text
