"""A signal handler that saves at any moment of any call of the plugin."""

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import stillframe
import torch
from fix_lightning import FULL, SLURM, at, every_steps, load, loader, trainer
from stillframe import _core
from stillframe._save import completion
from stillframe.testing import slow
from test_wrapped import other

PACKAGE = str(Path(stillframe.__file__).parent)
STATE = {"x": torch.arange(100_000.0), "n": 1}


@pytest.fixture
def sigusr2():
    before = signal.getsignal(signal.SIGUSR2)
    yield signal.SIGUSR2
    signal.signal(signal.SIGUSR2, before)


class AtLine:
    """Raises a signal once, before the n-th line of the package that the main thread runs.

    With `files`, only lines of files with these names count.
    """

    def __init__(self, number, *files):
        self.number, self.lines, self.where = number, 0, None
        self.files = files

    def __call__(self, frame, event, arg):
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE) or (
            self.files and os.path.basename(name) not in self.files
        ):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.number:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGUSR2)
        return self

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *error):
        sys.settrace(self.before)


def a_rotation(plugin, directory):
    """Make every call of the plugin and its companion."""
    plugin.save_checkpoint(STATE, directory / "a.ckpt")
    plugin._checkpoints.publish(lambda callback: None, CallbackStub())
    plugin.save_checkpoint(STATE, directory / "b.ckpt")
    plugin._checkpoints.publish(lambda callback: None, CallbackStub())
    plugin._checkpoints.link(None, directory / "b.ckpt", directory / "last.ckpt")
    plugin.remove_checkpoint(directory / "a.ckpt")
    plugin._checkpoints.notify()
    assert not plugin._checkpoints.will_exist(directory / "a.ckpt", os.path.exists)
    assert plugin.load_checkpoint(directory / "b.ckpt")["n"] == 1
    plugin._checkpoints.settle()
    plugin.save_checkpoint(STATE, directory / "c.ckpt")
    plugin.teardown()


class CallbackStub:
    best_model_path = ""


@pytest.mark.parametrize("kind", ["ours", "wrapped"])
def test_signal_handler_may_save_before_any_line(lit, tmp_path, sigusr2, kind):
    """Each run is interrupted before another line, until all lines were tried."""
    nr = 0

    def handler(signum, frame):
        emergency = directory / "hpc_ckpt_1.ckpt"
        plugin.save_checkpoint(STATE, emergency)
        saved.append(emergency.exists())
        plugin._checkpoints.settle()  # a logger's finalize calls this

    signal.signal(sigusr2, handler)
    step = 1 if FULL else 41
    while True:
        nr += step
        directory, saved = tmp_path / str(nr), []
        plugin = lit.AsyncCheckpointIO(other(lit) if kind == "wrapped" else None)
        with AtLine(nr) as line:
            a_rotation(plugin, directory)
        if line.where is None:
            break
        assert saved == [True], line.where
        names = sorted(os.listdir(directory))
        assert names == ["b.ckpt", "c.ckpt", "hpc_ckpt_1.ckpt", "last.ckpt"], line.where
        assert os.readlink(directory / "last.ckpt") == "b.ckpt", line.where
    assert nr > 300  # otherwise the tracing saw nothing


@pytest.mark.parametrize("name", ["a.ckpt", "fail.ckpt"])
def test_signal_handler_may_wait_for_all_saves_at_any_line_of_a_handle(
    lit, tmp_path, sigusr2, name
):
    """The interrupted call must not hold anything that the other thread needs."""
    files, nr = ("outcome.py", "external.py", "copy.py", "completion.py", "event.py"), 0
    while True:
        nr += 1
        gate, ended = SimpleNamespace(event=threading.Event()), []
        plugin = lit.AsyncCheckpointIO(other(lit, gate), on_error="warn")
        plugin.save_checkpoint(STATE, tmp_path / name)
        (handle,) = completion.in_flight.values()

        def handler(signum, frame, gate=gate, ended=ended):
            gate.event.set()
            ended.append(_core.log_drain(20))

        signal.signal(sigusr2, handler)
        with AtLine(nr, *files) as line:
            assert handle.state
            handle.done()
            handle.add_done_callback(lambda _: None)
            staging, upload = handle.staging_completion, handle.upload_completion
            with contextlib.suppress(OSError):  # the save has failed already
                handle.wait_staged()
            gate.event.set()
            failed = handle.exception()
            assert handle.done()
        assert (failed is not None) == (name == "fail.ckpt"), line.where
        assert staging.done() and upload.exception(20) is failed, line.where
        plugin.teardown()
        if line.where is None:
            break
        assert ended == [True], line.where
    assert nr > 40  # otherwise the tracing saw nothing


def while_training(lit, line):
    class Traced(lit.Callback):
        def on_train_start(self, trainer, module):
            line.__enter__()

        def on_train_end(self, trainer, module):
            line.__exit__()

    return Traced()


def test_slurms_handler_may_fire_in_the_middle_of_any_call_of_a_fit(
    lit, tmp_path, sigusr2, monkeypatch
):
    """The checkpoint is durable when the requeue is requested. Training continues, and the final
    files are those of an uninterrupted run."""
    from lightning.fabric.plugins.environments import SLURMEnvironment
    from lightning.pytorch.trainer.connectors import signal_connector

    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    requeued = []

    def requeue(command):
        # In the same thread no wait of ours can come in between.
        requeued.append(torch.load(directory / "hpc_ckpt_1.ckpt", weights_only=False))
        return 0

    monkeypatch.setattr(signal_connector, "call", requeue)
    nr = 0
    while True:
        nr += 37 if FULL else 401
        directory = tmp_path / str(nr)
        requeued.clear()
        run = lit.Trainer(
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=directory,
            max_steps=6,
            limit_val_batches=0,
            plugins=[lit.AsyncCheckpointIO(), SLURMEnvironment(requeue_signal=sigusr2)],
            callbacks=[every_steps(lit, directory / "c", 2, save_last="link")],
        )
        line = AtLine(nr)
        run.callbacks.append(while_training(lit, line))
        model = lit.Model()
        try:
            run.fit(model, loader())
        finally:
            sys.settrace(None)
        if line.where is None:
            break
        (saved,) = requeued
        assert 0 <= saved["global_step"] <= 6, line.where
        assert len(model.losses) == 6, line.where
        assert sorted(os.listdir(directory / "c")) == ["last.ckpt", "step=6.ckpt"], line.where
        assert load(directory / "c" / "last.ckpt")["global_step"] == 6, line.where
    assert nr > 3 * 401


def test_terminated_training_keeps_its_earlier_saves(lit, tmp_path):
    """Lightning ends at the next batch after SIGTERM, and saves in flight become durable."""
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    def terminate(run):
        with slow("fdatasync", 0.3):
            run.save_checkpoint(tmp_path / "a.ckpt")
            assert not (tmp_path / "a.ckpt").exists()
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    run = trainer(
        lit, tmp_path, plugin=lit.AsyncCheckpointIO(), callbacks=[at(lit, {2: terminate})]
    )
    try:
        with pytest.raises(SIGTERMException):
            run.fit(lit.Model(), loader())
    finally:
        signal.signal(signal.SIGTERM, before)
    assert load(tmp_path / "a.ckpt")["global_step"] == 2
    assert run.global_step < 8
