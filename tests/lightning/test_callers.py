"""When a save returns depends on who makes it."""

import functools
import gc
import os
import signal
import time

import pytest
import stillframe
import torch
from fix_holds import held_until_awaited
from fix_lightning import SLURM, at, load, loader, trainer
from stillframe.testing import slow


def save_and_look(trainer, path, seen):
    """Saves on a disk that stands still until it is waited for; notes whether the file is there on
    return."""
    with held_until_awaited("fdatasync"):
        trainer.save_checkpoint(path)
        seen.append(path.exists())
        stillframe.wait_all()


def test_only_training_saves_asynchronously(pkg, tmp_path):
    inside, outside = [], []

    class Look(pkg.Callback):
        def on_fit_start(self, trainer, module):
            save_and_look(trainer, tmp_path / "fit_start.ckpt", outside)

        def on_sanity_check_end(self, trainer, module):
            save_and_look(trainer, tmp_path / "sanity.ckpt", outside)

        def on_train_start(self, trainer, module):
            save_and_look(trainer, tmp_path / "train_start.ckpt", inside)

        def on_validation_end(self, trainer, module):
            if not trainer.sanity_checking:
                save_and_look(trainer, tmp_path / "validation.ckpt", inside)

        def on_train_end(self, trainer, module):
            save_and_look(trainer, tmp_path / "train_end.ckpt", outside)

        def on_fit_end(self, trainer, module):
            save_and_look(trainer, tmp_path / "fit_end.ckpt", outside)

        def teardown(self, trainer, module, stage):
            save_and_look(trainer, tmp_path / f"{stage}.ckpt", outside)

    run = trainer(
        pkg,
        tmp_path,
        plugin=pkg.AsyncCheckpointIO(),
        callbacks=[Look()],
        limit_val_batches=1,
        max_steps=2,
        val_check_interval=2,
    )
    model = pkg.Model()
    run.fit(model, loader(), loader())
    save_and_look(run, tmp_path / "after.ckpt", outside)
    assert inside == [False, False]
    assert outside == [True] * 6


def test_training_that_broke_off_has_ended(lit, tmp_path):
    seen = []

    def boom(trainer):
        raise ValueError

    run = trainer(lit, tmp_path, plugin=lit.AsyncCheckpointIO(), callbacks=[at(lit, {2: boom})])
    with pytest.raises(ValueError):
        run.fit(lit.Model(), loader())
    save_and_look(run, tmp_path / "after.ckpt", seen)
    assert seen == [True]


def test_a_validation_after_training_that_broke_off_is_no_training(lit, tmp_path):
    seen = []

    def boom(trainer):
        raise ValueError

    class Look(lit.Callback):
        def on_validation_end(self, trainer, module):
            save_and_look(trainer, tmp_path / "validation.ckpt", seen)

    run = trainer(
        lit,
        tmp_path,
        plugin=lit.AsyncCheckpointIO(),
        callbacks=[at(lit, {2: boom}), Look()],
        limit_val_batches=1,
        num_sanity_val_steps=0,
    )
    model = lit.Model()
    with pytest.raises(ValueError):
        run.fit(model, loader(), loader())
    run.validate(model, loader(), verbose=False)
    assert seen == [True]


def test_a_plugin_that_somebody_wraps_is_found(lit, tmp_path):
    from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

    seen = []

    def look(trainer):
        save_and_look(trainer, tmp_path / "training.ckpt", seen)

    wrapper = _WrappingCheckpointIO(lit.AsyncCheckpointIO())
    run = trainer(lit, tmp_path, plugin=wrapper, callbacks=[at(lit, {2: look})])
    run.fit(lit.Model(), loader())
    save_and_look(run, tmp_path / "after.ckpt", seen)
    assert seen == [False, True]


def test_two_trainers_of_one_plugin_are_told_apart(lit, tmp_path):
    seen = []
    plugin = lit.AsyncCheckpointIO()
    done = trainer(lit, tmp_path, plugin=plugin, max_steps=1)
    done.fit(lit.Model(), loader())
    fabric = lit.Fabric(accelerator="cpu", devices=1, plugins=[plugin])

    def look(trainer):
        save_and_look(trainer, tmp_path / "training.ckpt", seen)
        save_and_look(done, tmp_path / "done.ckpt", seen)

    run = trainer(lit, tmp_path, plugin=plugin, callbacks=[at(lit, {2: look})])
    run.fit(lit.Model(), loader())
    with held_until_awaited("fdatasync"):
        fabric.save(tmp_path / "fabric.ckpt", {"x": torch.ones(3)})
        seen.append((tmp_path / "fabric.ckpt").exists())
        stillframe.wait_all()
    assert seen == [False, True, False]


def test_a_trainer_without_the_companion_saves_durably_and_says_why_once(lit, tmp_path, caplog):
    seen = []

    def look(trainer):
        save_and_look(trainer, tmp_path / f"{trainer.global_step}.ckpt", seen)

    gc.collect()  # plugins of earlier tests, for which this Trainer would get the callback
    run = trainer(lit, tmp_path, callbacks=[at(lit, {2: look, 3: look})])
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


def test_a_link_outlives_a_remove_at_the_end_of_a_fit_until_it_is_made_anew(lit, tmp_path):
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
    # By hand, with nobody to make it anew, a file goes although a link names it.
    plugin.remove_checkpoint(new)
    assert not new.exists()


def test_the_learning_rate_finder_works(lit, tmp_path):
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


def test_a_learning_rate_finder_in_the_middle_of_training_works(lit, tmp_path):
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


def test_the_batch_size_scaler_works(lit, tmp_path):
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


# -- signal handlers ---------------------------------------------------------------------------
# ------------------------


class ByMethod:
    def __init__(self, save):
        self.save = save

    def handle(self, signum, frame):
        self.save()


class ByCall(ByMethod):
    def __call__(self, signum, frame):
        self.save()


def plain(save):
    def handler(signum, frame):
        save()

    return handler


def resets_itself(save):
    def handler(signum, frame):
        signal.signal(signum, signal.SIG_IGN)
        del signum, frame
        save()

    return handler


def decorated(save):
    handler = plain(save)

    @functools.wraps(handler)
    def wrapper(*args, **kwargs):
        return handler(*args, **kwargs)

    return wrapper


HANDLERS = {
    "a function": plain,
    "one that resets itself": resets_itself,
    "a decorated one": decorated,
    "a method": lambda save: ByMethod(save).handle,
    "an object": ByCall,
    "a partial": lambda save: functools.partial(lambda save, signum, frame: save(), save),
    "a lambda": lambda save: lambda *_: save(),
}


@pytest.fixture
def sigusr2():
    handler = signal.getsignal(signal.SIGUSR2)
    yield signal.SIGUSR2
    signal.signal(signal.SIGUSR2, handler)


@pytest.mark.parametrize("kind", HANDLERS)
def test_a_save_of_a_signal_handler_is_durable_on_return(lit, tmp_path, sigusr2, kind):
    seen = []
    by_handler, after = tmp_path / "handler.ckpt", tmp_path / "after.ckpt"

    class Signalled(lit.Callback):
        def on_train_start(self, trainer, module):
            save = functools.partial(save_and_look, trainer, by_handler, seen)
            signal.signal(sigusr2, HANDLERS[kind](save))

        def on_train_batch_start(self, trainer, module, *args):
            if trainer.global_step == 2:
                os.kill(os.getpid(), sigusr2)
                time.sleep(0.01)
                save_and_look(trainer, after, seen)

    trainer(lit, tmp_path, plugin=lit.AsyncCheckpointIO(), callbacks=[Signalled()]).fit(
        lit.Model(), loader()
    )
    assert seen == [True, False]
    assert load(by_handler)["global_step"] == 2


def test_a_decorator_shared_with_a_handler_makes_no_handler(lit, tmp_path, sigusr2):
    seen = []

    def logged(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)

        return wrapper

    signal.signal(sigusr2, logged(lambda signum, frame: None))

    @logged
    def fit(extra):
        run = trainer(
            lit,
            tmp_path,
            plugin=lit.AsyncCheckpointIO(),
            callbacks=[at(lit, {2: lambda t: save_and_look(t, tmp_path / "a.ckpt", seen)})],
        )
        run.fit(lit.Model(), loader())

    fit(1)
    assert seen == [False]


def test_slurms_requeue_finds_the_checkpoint_on_the_disk(lit, tmp_path, monkeypatch):
    from lightning.fabric.plugins.environments import SLURMEnvironment
    from lightning.pytorch.trainer.connectors import signal_connector

    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    requeued = []

    def requeue(command):
        requeued.append((command, [path.name for path in tmp_path.glob("hpc_ckpt*")]))
        return 0

    monkeypatch.setattr(signal_connector, "call", requeue)

    def preempt(trainer):
        with slow("fdatasync", 0.3):
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(0.01)

    plugin = lit.AsyncCheckpointIO()
    run = lit.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
        max_steps=4,
        plugins=[plugin, SLURMEnvironment(requeue_signal=signal.SIGUSR2)],
        callbacks=[at(lit, {2: preempt})],
    )
    run.fit(lit.Model(), loader())
    assert requeued == [(["scontrol", "requeue", "1"], ["hpc_ckpt_1.ckpt"])]
    assert load(tmp_path / "hpc_ckpt_1.ckpt")["global_step"] == 2
