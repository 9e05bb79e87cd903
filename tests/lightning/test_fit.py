"""Ordinary fits with stock callbacks: the files they leave, and resuming from them."""

import numpy as np
import pytest
import torch
from fix_lightning import (
    VERSION,
    LightningManualModel,
    PytorchLightningManualModel,
    assert_same,
    copied,
    every_steps,
    load,
    loader,
    trainer,
)
from stillframe.testing import slow
from torch import nn


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("top_k", [1, 3])
def test_top_k_leaves_the_files_that_lightnings_plugin_leaves(pkg, tmp_path, top_k):
    for kind, plugin in (("stock", pkg.TorchCheckpointIO()), ("ours", pkg.AsyncCheckpointIO())):
        callback = every_steps(pkg, tmp_path / kind, 2, save_top_k=top_k)
        run = trainer(pkg, tmp_path, plugin=plugin, callbacks=[callback], max_steps=9)
        run.fit(pkg.Model(), loader())
    assert names(tmp_path / "ours") == names(tmp_path / "stock")
    assert len(names(tmp_path / "ours")) == top_k
    for name in names(tmp_path / "ours"):
        ours, stock = load(tmp_path / "ours" / name), load(tmp_path / "stock" / name)
        # The callback's state holds the directory's name.
        assert ours.pop("callbacks").keys() == stock.pop("callbacks").keys()
        assert_same(ours, stock)


@pytest.mark.parametrize("step", [5, 8])
def test_resumed_fit_is_bit_identical(pkg, tmp_path, step):
    runs = {}
    for kind, plugin in (("stock", pkg.TorchCheckpointIO), ("ours", pkg.AsyncCheckpointIO)):
        whole, resumed = pkg.Model(), pkg.Model()
        callback = every_steps(pkg, tmp_path / kind, step, save_top_k=-1)
        trainer(pkg, tmp_path, plugin=plugin(), callbacks=[callback], max_steps=16).fit(
            whole, loader()
        )
        trainer(pkg, tmp_path, plugin=plugin(), max_steps=16).fit(
            resumed, loader(), ckpt_path=tmp_path / kind / f"step={step}.ckpt"
        )
        runs[kind] = resumed
        # At the end of an epoch (and always before 2.5), Lightning starts the data from the
        # beginning.
        if step == 8 and VERSION >= (2, 5):
            assert resumed.losses == whole.losses[step:]
            assert_same(dict(resumed.state_dict()), dict(whole.state_dict()))
    assert len(runs["ours"].losses) == 16 - step
    assert runs["ours"].losses == runs["stock"].losses


def test_every_checkpoint_is_the_state_at_its_call(pkg, tmp_path):
    expected = {}

    class Keep(pkg.Callback):
        def on_save_checkpoint(self, trainer, module, checkpoint):
            expected[trainer.global_step] = copied(
                {key: checkpoint[key] for key in ("state_dict", "optimizer_states")}
            )

    callback = every_steps(pkg, tmp_path / "c", 1, save_top_k=-1)
    deferred = []
    plugin = pkg.AsyncCheckpointIO(
        on_durable=lambda path, report: deferred.append(report.deferred_nbytes)
    )
    with slow("lane_copy", 0.005):
        trainer(pkg, tmp_path, plugin=plugin, callbacks=[Keep(), callback], max_steps=12).fit(
            pkg.Model(), loader()
        )
    assert sorted(expected) == list(range(1, 13))
    assert max(deferred) > 4 * 300 * 300  # otherwise the test shows nothing
    for step, state in expected.items():
        saved = load(tmp_path / "c" / f"step={step}.ckpt")
        assert_same({key: saved[key] for key in state}, state)


@pytest.mark.skipif(VERSION < (2, 5), reason="this Lightning starts the data afresh")
@pytest.mark.parametrize(("accumulate", "steps_an_epoch"), [(2, 4), (3, 3)])
def test_gradient_accumulation_resumes_exactly(lit, tmp_path, accumulate, steps_an_epoch):
    whole, resumed = lit.Model(), lit.Model()
    callback = every_steps(lit, tmp_path / "c", steps_an_epoch, save_top_k=-1)
    options = {"accumulate_grad_batches": accumulate, "max_steps": steps_an_epoch + 2}
    trainer(lit, tmp_path, plugin=lit.AsyncCheckpointIO(), callbacks=[callback], **options).fit(
        whole, loader()
    )
    trainer(lit, tmp_path, plugin=lit.AsyncCheckpointIO(), **options).fit(
        resumed, loader(), ckpt_path=tmp_path / "c" / f"step={steps_an_epoch}.ckpt"
    )
    assert resumed.losses and resumed.losses == whole.losses[8:]


@pytest.mark.skipif(VERSION < (2, 6), reason="this Lightning swaps no weights")
def test_manual_optimization_saves_the_weights_before_the_step(pkg, tmp_path):
    # All before a step, ModelCheckpoint loads older weights, saves, and loads the newer ones again.
    model = {"lightning": LightningManualModel, "pytorch_lightning": PytorchLightningManualModel}[
        pkg.name
    ]()
    before = {}

    class Keep(pkg.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            before[trainer.global_step] = copied(module.saved_models[batch_idx])

    callback = every_steps(pkg, tmp_path / "c", 2, save_top_k=-1)
    with slow("lane_copy", 0.005):
        trainer(pkg, tmp_path, plugin=pkg.AsyncCheckpointIO(), callbacks=[Keep(), callback]).fit(
            model, loader()
        )
    for step in (2, 4, 6, 8):
        state = load(tmp_path / "c" / f"step={step}.ckpt")["state_dict"]
        for name, value in before[step].items():
            assert torch.equal(state[f"layer.{name}"], value), (step, name)


def test_tied_weights_stay_tied_and_arrays_hold_the_values_at_the_call(lit, tmp_path):
    class Tied(lit.Model):
        def __init__(self):
            super().__init__()
            self.second = nn.Linear(300, 300)
            self.second.weight = self.layer[0].weight
            self.array = np.zeros(1000)

        def on_train_batch_end(self, *args):
            self.array += 1.0

        def on_save_checkpoint(self, checkpoint):
            checkpoint["array"] = self.array

    callback = every_steps(lit, tmp_path / "c", 2, save_top_k=-1)
    with slow("pwrite", 0.01):
        trainer(lit, tmp_path, plugin=lit.AsyncCheckpointIO(), callbacks=[callback]).fit(
            Tied(), loader()
        )
    for step in (2, 4, 6, 8):
        saved = load(tmp_path / "c" / f"step={step}.ckpt")
        state = saved["state_dict"]
        first, second = state["layer.0.weight"], state["second.weight"]
        assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        # The callbacks' hook runs before the module's.
        assert (saved["array"] == step - 1).all()


def test_one_plugin_serves_several_fits(pkg, tmp_path):
    plugin = pkg.AsyncCheckpointIO(pool_bytes=64 << 20)
    for turn in range(3):
        callback = every_steps(pkg, tmp_path / f"c{turn}", 2)
        run = trainer(pkg, tmp_path, plugin=plugin, callbacks=[callback])
        run.fit(pkg.Model(), loader())
        run.validate(pkg.Model(), loader(), verbose=False)
        assert names(tmp_path / f"c{turn}") == ["step=8.ckpt"]


def test_second_fit_of_a_trainer_saves_its_checkpoints_too(lit, tmp_path):
    callback = every_steps(lit, tmp_path / "c", 2, save_top_k=-1)
    run = trainer(lit, tmp_path, plugin=lit.AsyncCheckpointIO(), callbacks=[callback], max_steps=4)
    model = lit.Model()
    run.fit(model, loader())
    run.fit_loop.epoch_loop.max_steps = 8
    run.fit(model, loader())
    assert names(tmp_path / "c") == [f"step={step}.ckpt" for step in (2, 4, 6, 8)]


def test_a_rotation_never_leaves_fewer_than_one_durable_checkpoint(lit, tmp_path):
    directory = tmp_path / "c"
    seen = []

    class Observer(lit.Callback):
        def on_train_batch_end(self, *args):
            seen.append(sorted(directory.glob("*.ckpt")) if directory.exists() else [])
            for path in seen[-1]:
                try:
                    load(path)
                except FileNotFoundError:
                    # It was removed between listing and loading, so another one must exist.
                    assert list(directory.glob("*.ckpt"))

    callback = every_steps(lit, directory, 1)
    with slow("pwrite", 0.02), slow("fdatasync", 0.05):
        trainer(
            lit,
            tmp_path,
            plugin=lit.AsyncCheckpointIO(),
            callbacks=[Observer(), callback],
            max_steps=20,
        ).fit(lit.Model(), loader())
    first = next(index for index, files in enumerate(seen) if files)
    assert all(seen[first:])
    assert names(directory) == ["step=20.ckpt"]
