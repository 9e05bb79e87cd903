"""Ctrl-C at any moment of a fit: files are complete, and the plugin stays usable."""

import gc
import os
import signal
import sys
from types import SimpleNamespace

import pytest
import stillframe
import torch
from fix_lightning import FULL, at, every_steps, load, loader, trainer
from stillframe import _core
from stillframe._save import completion, engine
from stillframe._save import ordered as _ordered
from test_signals import AtLine, while_training
from test_wrapped import other


@pytest.fixture
def interrupts():
    """Make SIGUSR2 act like Ctrl-C, because Lightning ignores SIGINT after the first one."""

    def interrupt(signum, frame):
        raise KeyboardInterrupt

    before = [signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGINT)]
    signal.signal(signal.SIGUSR2, interrupt)
    yield
    for number, handler in zip((signal.SIGUSR2, signal.SIGINT), before, strict=True):
        signal.signal(number, handler)


class AtLineOutsideHandlers(AtLine):
    """Interrupts at a line, but not in an `except` block.

    If a trace function raises there, Python 3.11 reports that block's exception in `sys.exc_info`
    for the rest of the process."""

    def __call__(self, frame, event, arg):
        if self.lines == self.number - 1 and sys.exc_info()[0] is not None:
            return self
        return super().__call__(frame, event, arg)


def assert_whole(directory):
    names = os.listdir(directory) if directory.exists() else []
    for name in names:
        assert name.endswith(".ckpt")
        load(directory / name)  # if it is a link, its target exists


def test_signal_between_a_remove_and_the_new_link_loses_nothing(lit, tmp_path, interrupts):
    directory = tmp_path / "c"

    class Interrupted(lit.ModelCheckpoint):
        def _save_last_checkpoint(self, trainer, candidates):
            if trainer.global_step == 4:
                raise KeyboardInterrupt
            super()._save_last_checkpoint(trainer, candidates)

    callback = Interrupted(directory, filename="{step}", every_n_train_steps=2, save_last="link")
    plugin = lit.AsyncCheckpointIO()
    run = trainer(lit, tmp_path, plugin=plugin, callbacks=[callback])
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        run.fit(lit.Model(), loader())
    assert sorted(os.listdir(directory)) == ["last.ckpt", "step=2.ckpt", "step=4.ckpt"]
    assert load(directory / "last.ckpt")["global_step"] == 2
    newer = every_steps(lit, directory, 2, save_last="link")
    again = trainer(lit, tmp_path, plugin=plugin, callbacks=[newer])
    again.fit(lit.Model(), loader(), ckpt_path="last")
    assert load(newer.last_model_path)["global_step"] == 8
    assert_whole(directory)


class SubmittedAndInterrupted:
    """A ticket that raises KeyboardInterrupt just after its launch."""

    def __init__(self, *args):
        self._ticket = _core.Ticket(*args)

    def __getattr__(self, name):
        return getattr(self._ticket, name)

    def submit(self, *args):
        self._ticket.submit(*args)
        raise KeyboardInterrupt


@pytest.mark.parametrize("overlap", [True, False])
def test_signal_just_after_a_save_was_launched_loses_nothing(
    lit, tmp_path, interrupts, monkeypatch, overlap
):
    """A save made because of the interrupt does not wait forever for the interrupted one."""
    directory = tmp_path / "c"

    def interrupted(run):
        replaced = SimpleNamespace(**{**vars(_core), "Ticket": SubmittedAndInterrupted})
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_core", replaced)
            run.save_checkpoint(directory / "interrupted.ckpt")

    class Saves(lit.Callback):
        def on_exception(self, trainer, module, exception):
            trainer.save_checkpoint(directory / "emergency.ckpt")

    plugin = lit.AsyncCheckpointIO(overlap=overlap)
    callbacks = [at(lit, {5: interrupted}), Saves(), every_steps(lit, directory, 1)]
    run = trainer(lit, tmp_path, plugin=plugin, callbacks=callbacks)
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        run.fit(lit.Model(), loader())
    stillframe.wait_all(timeout=60)
    assert not completion.in_flight
    assert_whole(directory)
    assert {"interrupted.ckpt", "emergency.ckpt"} <= set(os.listdir(directory))


@pytest.mark.parametrize("when", ["before", "after"])
def test_signal_around_the_submission_of_a_wrapped_save_loses_nothing(
    lit, tmp_path, monkeypatch, when
):
    """The save is either made or given up, and nothing waits for it forever."""

    class Interrupted:
        def __init__(self, *args):
            self._entry = _core.LogWork(*args)
            self.number, self.end = self._entry.number, self._entry.end

        def append(self):
            if when == "after":
                self._entry.append()
            raise KeyboardInterrupt

    calls = []
    plugin = lit.AsyncCheckpointIO(other(lit, calls=calls))
    plugin.save_checkpoint({"x": torch.zeros(3)}, tmp_path / "first.ckpt")
    plugin.teardown()
    before = stillframe.default_engine().stats()["leased_bytes"]
    replaced = SimpleNamespace(**{**vars(_core), "LogWork": Interrupted})
    with monkeypatch.context() as patch:
        patch.setattr(_ordered, "_core", replaced)
        with pytest.raises(KeyboardInterrupt):
            plugin.save_checkpoint({"x": torch.zeros(300, 300)}, tmp_path / "a.ckpt")
    stillframe.wait_all(timeout=60)
    assert not completion.in_flight
    plugin.save_checkpoint({"x": torch.ones(3)}, tmp_path / "b.ckpt")
    plugin.teardown()
    names = {name for what, name, _ in calls if what == "save"}
    assert names in ({"first.ckpt", "b.ckpt"}, {"first.ckpt", "a.ckpt", "b.ckpt"})
    gc.collect()
    assert stillframe.default_engine().stats()["leased_bytes"] == before


@pytest.mark.parametrize("kind", ["ours", "wrapped"])
def test_signal_before_any_line_of_ours_loses_nothing(lit, tmp_path, interrupts, kind):
    nr, step = 0, 61 if FULL else 997
    while True:
        nr += step
        directory = tmp_path / str(nr)
        plugin = lit.AsyncCheckpointIO(other(lit) if kind == "wrapped" else None, log_metrics=True)
        callback = every_steps(lit, directory / "c", 1, save_last="link")
        line = AtLineOutsideHandlers(nr)
        run = trainer(
            lit,
            directory,
            plugin=plugin,
            callbacks=[while_training(lit, line), callback],
            max_steps=5,
        )
        try:
            run.fit(lit.Model(), loader())
        except (SystemExit, KeyboardInterrupt):
            pass
        finally:
            sys.settrace(None)
        if line.where is None:
            break
        plugin.teardown()
        stillframe.wait_all(timeout=60)
        assert not completion.in_flight, line.where
        assert_whole(directory / "c")
        assert not {"file_exists", "_link_checkpoint"} & set(vars(callback)), line.where
        trainer(
            lit,
            directory,
            plugin=plugin,
            callbacks=[every_steps(lit, directory / "d", 1, save_last="link")],
            max_steps=3,
        ).fit(lit.Model(), loader())
        assert sorted(os.listdir(directory / "d")) == ["last.ckpt", "step=3.ckpt"], line.where
    assert nr > 1000  # otherwise the tracing saw nothing
