"""A signal handler that saves, at any moment of any of the plugin's calls."""

import os
import signal
import sys
from pathlib import Path

import pytest
import stillframe
import torch
from fix_lightning import FULL
from test_wrapped import other

PACKAGE = str(Path(stillframe.__file__).parent)
STATE = {"x": torch.arange(100_000.0), "n": 1}


@pytest.fixture
def sigusr2():
    before = signal.getsignal(signal.SIGUSR2)
    yield signal.SIGUSR2
    signal.signal(signal.SIGUSR2, before)


class AtLine:
    """Raises a signal once, before the n-th line of the package that the main thread runs."""

    def __init__(self, number):
        self.number, self.lines, self.where = number, 0, None

    def __call__(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(PACKAGE):
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
    """Every call that the plugin and its companion know."""
    plugin.save_checkpoint(STATE, directory / "a.ckpt")
    plugin.publish(lambda callback: None, Told())
    plugin.save_checkpoint(STATE, directory / "b.ckpt")
    plugin.publish(lambda callback: None, Told())
    plugin.link(None, directory / "b.ckpt", directory / "last.ckpt")
    plugin.remove_checkpoint(directory / "a.ckpt")
    plugin.tend()
    assert not plugin.will_exist(directory / "a.ckpt", os.path.exists)
    assert plugin.load_checkpoint(directory / "b.ckpt")["n"] == 1
    plugin.settle()
    plugin.save_checkpoint(STATE, directory / "c.ckpt")
    plugin.teardown()


class Told:
    best_model_path = ""


@pytest.mark.parametrize("kind", ["ours", "wrapped"])
def test_a_handler_may_save_before_every_line(lit, tmp_path, sigusr2, kind):
    """Each run of the calls is interrupted before another line, until no line is left."""
    nr = 0

    def handler(signum, frame):
        emergency = directory / "hpc_ckpt_1.ckpt"
        plugin.save_checkpoint(STATE, emergency)
        saved.append(emergency.exists())
        plugin.settle()  # as a logger's finalize does

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
    assert nr > 300  # or the tracing saw nothing
