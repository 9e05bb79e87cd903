"""When a save returns, for every kind of caller."""

import gc
import os

import pytest
import stillframe
import torch
from fix_callers import save_and_compare, waits
from fix_holds import held_until_awaited
from fix_lightning import at, load, loader, trainer
from stillframe._lightning import ranks
from stillframe._lightning.callers import Fabric
from stillframe._lightning.trainers import Trainers
from stillframe.testing import fault, slow


def test_only_training_saves_asynchronously(pkg, tmp_path):
    inside, outside = [], []

    class Observer(pkg.Callback):
        def on_fit_start(self, trainer, module):
            save_and_compare(trainer, tmp_path / "fit_start.ckpt", outside)

        def on_sanity_check_end(self, trainer, module):
            save_and_compare(trainer, tmp_path / "sanity.ckpt", outside)

        def on_train_start(self, trainer, module):
            save_and_compare(trainer, tmp_path / "train_start.ckpt", inside)

        def on_validation_end(self, trainer, module):
            if not trainer.sanity_checking:
                save_and_compare(trainer, tmp_path / "validation.ckpt", inside)

        def on_train_end(self, trainer, module):
            save_and_compare(trainer, tmp_path / "train_end.ckpt", outside)

        def on_fit_end(self, trainer, module):
            save_and_compare(trainer, tmp_path / "fit_end.ckpt", outside)

        def teardown(self, trainer, module, stage):
            save_and_compare(trainer, tmp_path / f"{stage}.ckpt", outside)

    run = trainer(
        pkg,
        tmp_path,
        plugin=pkg.AsyncCheckpointIO(),
        callbacks=[Observer()],
        limit_val_batches=1,
        max_steps=2,
        val_check_interval=2,
    )
    model = pkg.Model()
    run.fit(model, loader(), loader())
    save_and_compare(run, tmp_path / "after.ckpt", outside)
    assert inside == [False, False]
    assert outside == [True] * 6


def test_interrupted_training_counts_as_ended(lit, tmp_path):
    seen = []

    def boom(trainer):
        raise ValueError

    run = trainer(lit, tmp_path, plugin=lit.AsyncCheckpointIO(), callbacks=[at(lit, {2: boom})])
    with pytest.raises(ValueError):
        run.fit(lit.Model(), loader())
    save_and_compare(run, tmp_path / "after.ckpt", seen)
    assert seen == [True]


def test_validation_after_interrupted_training_saves_durably(lit, tmp_path):
    seen = []

    def boom(trainer):
        raise ValueError

    class Observer(lit.Callback):
        def on_validation_end(self, trainer, module):
            save_and_compare(trainer, tmp_path / "validation.ckpt", seen)

    run = trainer(
        lit,
        tmp_path,
        plugin=lit.AsyncCheckpointIO(),
        callbacks=[at(lit, {2: boom}), Observer()],
        limit_val_batches=1,
        num_sanity_val_steps=0,
    )
    model = lit.Model()
    with pytest.raises(ValueError):
        run.fit(model, loader(), loader())
    run.validate(model, loader(), verbose=False)
    assert seen == [True]


def test_plugin_inside_a_users_wrapper_is_found(lit, tmp_path):
    from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

    seen = []

    def observe(trainer):
        save_and_compare(trainer, tmp_path / "training.ckpt", seen)

    wrapper = _WrappingCheckpointIO(lit.AsyncCheckpointIO())
    run = trainer(lit, tmp_path, plugin=wrapper, callbacks=[at(lit, {2: observe})])
    run.fit(lit.Model(), loader())
    save_and_compare(run, tmp_path / "after.ckpt", seen)
    assert seen == [False, True]


def test_two_trainers_with_one_plugin_are_distinguished(lit, tmp_path):
    seen = []
    plugin = lit.AsyncCheckpointIO()
    done = trainer(lit, tmp_path, plugin=plugin, max_steps=1)
    done.fit(lit.Model(), loader())
    fabric = lit.Fabric(accelerator="cpu", devices=1, plugins=[plugin])

    def observe(trainer):
        save_and_compare(trainer, tmp_path / "training.ckpt", seen)
        save_and_compare(done, tmp_path / "done.ckpt", seen)

    run = trainer(lit, tmp_path, plugin=plugin, callbacks=[at(lit, {2: observe})])
    run.fit(lit.Model(), loader())
    with held_until_awaited("fdatasync"):
        fabric.save(tmp_path / "fabric.ckpt", {"x": torch.ones(3)})
        seen.append((tmp_path / "fabric.ckpt").exists())
        stillframe.wait_all()
    assert seen == [False, True, False]


def test_a_trainer_without_the_companion_saves_durably_and_says_why_once(lit, tmp_path, caplog):
    seen = []

    def observe(trainer):
        save_and_compare(trainer, tmp_path / f"{trainer.global_step}.ckpt", seen)

    gc.collect()  # deletes plugins of earlier tests, which would add the callback to this Trainer
    run = trainer(lit, tmp_path, callbacks=[at(lit, {2: observe, 3: observe})])
    run.strategy.checkpoint_io = lit.AsyncCheckpointIO()
    run.fit(lit.Model(), loader())
    assert seen == [True, True]
    assert caplog.text.count("companion callback is not among") == 1


def test_removes_outside_training_are_done_on_return(lit, tmp_path):
    run = trainer(lit, tmp_path, plugin=lit.AsyncCheckpointIO())
    run.fit(lit.Model(), loader())
    run.save_checkpoint(tmp_path / "a.ckpt")
    with slow("unlink", 0.3):
        run.strategy.remove_checkpoint(tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()


def test_remove_belongs_to_the_trainer_that_calls_it(lit, tmp_path, monkeypatch):
    waited = waits(monkeypatch)
    plugin = lit.AsyncCheckpointIO()
    done = trainer(lit, tmp_path, plugin=plugin, max_steps=1)
    done.fit(lit.Model(), loader())
    seen = []

    def observe(run):
        for each in (run, done):
            del waited[:]
            each.strategy.remove_checkpoint(tmp_path / "nothing.ckpt")
            seen.append(len(waited))

    run = trainer(lit, tmp_path, plugin=plugin, callbacks=[at(lit, {2: observe})])
    run.fit(lit.Model(), loader())
    assert seen == [0, 1]


def test_function_named_like_a_plugin_method_is_not_taken_for_a_strategy(
    lit, tmp_path, monkeypatch
):
    plugin = lit.AsyncCheckpointIO()
    monkeypatch.setattr(ranks, "has_several_ranks", lambda trainer: True)

    def save_checkpoint():
        with fault("fdatasync", sticky=True), pytest.raises(stillframe.SaveError):
            run.strategy.save_checkpoint({}, tmp_path / "bad.ckpt")
        plugin.save_checkpoint({"n": 3}, tmp_path / "a.ckpt")

    run = trainer(lit, tmp_path, plugin=plugin)
    run.fit(lit.Model(), loader())
    save_checkpoint()
    assert load(tmp_path / "a.ckpt")["n"] == 3


def test_users_code_saves_durably_once_a_trainer_exists(lit, tmp_path):
    plugin, seen = lit.AsyncCheckpointIO(), []
    before = tmp_path / "before.ckpt", tmp_path / "after.ckpt"
    for path in before:
        with held_until_awaited("fdatasync"):
            plugin.save_checkpoint({"n": 3}, path)
            seen.append(path.exists())
            stillframe.wait_all()
        run = trainer(lit, tmp_path, plugin=plugin)
    assert seen == [False, True]
    del run


@pytest.mark.parametrize("what", ["add", "register_at_setup", "record_training_start"])
def test_trainer_is_registered_by_its_first_call_of_any_kind(lit, tmp_path, caplog, what):
    run, trainers = trainer(lit, tmp_path), Trainers()
    getattr(trainers, what)(run)
    assert trainers.of_caller(None) == [run]
    trainers.can_return_before_durable(run)
    assert "companion" not in caplog.text
    assert trainers.is_set_up(run) is (what == "register_at_setup")
    trainers.tear_down(run)
    assert not trainers.is_set_up(run)
    assert not trainers.is_set_up(None) and not trainers.is_set_up(Fabric)


def test_save_without_a_later_barrier_waits_for_no_rank(lit, tmp_path, monkeypatch):
    """An error skips the barrier of `trainer.save_checkpoint`, so the plugin must call it. A
    strategy's own save has no barrier."""
    run = trainer(lit, tmp_path, plugin=lit.AsyncCheckpointIO())
    run.fit(lit.Model(), loader())
    checkpoint, met = run._checkpoint_connector.dump_checkpoint(), []
    monkeypatch.setattr(ranks, "has_several_ranks", lambda trainer: True)
    monkeypatch.setattr(run.strategy, "barrier", met.append)
    with fault("fdatasync", sticky=True):
        with pytest.raises(stillframe.SaveError):
            run.strategy.save_checkpoint(checkpoint, tmp_path / "bad.ckpt")
        assert met == []
        with pytest.raises(stillframe.SaveError):
            run.save_checkpoint(tmp_path / "bad.ckpt")
    assert met == ["Trainer.save_checkpoint"]


def test_link_target_stays_at_the_end_of_a_fit_until_the_link_moves(lit, tmp_path):
    old, new, link = (tmp_path / f"{name}.ckpt" for name in ("old", "new", "last"))
    plugin = lit.AsyncCheckpointIO()
    seen = []

    class Rotates(lit.Callback):
        def on_train_start(self, trainer, module):
            trainer.save_checkpoint(old)
            plugin._checkpoints.link(trainer, old, link)

        def on_fit_end(self, trainer, module):
            trainer.save_checkpoint(new)
            trainer.strategy.remove_checkpoint(old)
            seen.append((os.readlink(link), link.exists()))
            plugin._checkpoints.link(trainer, new, link)
            seen.append((os.readlink(link), old.exists()))

    trainer(lit, tmp_path, plugin=plugin, callbacks=[Rotates()]).fit(lit.Model(), loader())
    assert seen == [("old.ckpt", True), ("new.ckpt", False)]
    # The user removes the file after the run, so it is removed although a link names it.
    plugin.remove_checkpoint(new)
    assert not new.exists()


def test_learning_rate_finder_leaves_no_file(lit, tmp_path):
    from lightning.pytorch.callbacks import LearningRateFinder

    model = lit.Model()
    with slow("fdatasync", 0.1):
        trainer(
            lit,
            tmp_path,
            plugin=lit.AsyncCheckpointIO(),
            callbacks=[LearningRateFinder(num_training_steps=10)],
        ).fit(model, loader())
    assert list(tmp_path.glob(".lr_find*")) == []


def test_learning_rate_finder_during_training_changes_no_loss(lit, tmp_path):
    from lightning.pytorch.callbacks import LearningRateFinder

    class Milestone(LearningRateFinder):
        def on_fit_start(self, *args):
            return

        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == 1:
                self.lr_find(trainer, module)

    losses = []
    for plugin in (lit.TorchCheckpointIO(), lit.AsyncCheckpointIO()):
        model = lit.Model()
        with slow("lane_copy", 0.005):
            trainer(
                lit,
                tmp_path,
                plugin=plugin,
                max_steps=12,
                callbacks=[Milestone(num_training_steps=5)],
            ).fit(model, loader())
        losses.append(model.losses)
    assert losses[0] == losses[1]
    assert list(tmp_path.glob(".lr_find*")) == []


def test_batch_size_finder_leaves_no_file(lit, tmp_path):
    from lightning.pytorch.callbacks import BatchSizeFinder

    class Model(lit.Model):
        batch_size = 2

        def train_dataloader(self):
            return loader(batch_size=self.batch_size)

        def val_dataloader(self):
            return loader()

    with slow("fdatasync", 0.1):
        trainer(
            lit,
            tmp_path,
            plugin=lit.AsyncCheckpointIO(),
            callbacks=[BatchSizeFinder(max_trials=2, steps_per_trial=1)],
        ).fit(Model())
    assert list(tmp_path.glob(".scale_batch_size*")) == []
