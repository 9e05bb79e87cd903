"""Fixtures of the tests of CPUOffloadCallback."""

import gc
import importlib
import sys
from types import SimpleNamespace

import pytest
import stillframe
from fix_lightning import copied

KEYS = ("state_dict", "optimizer_states", "lr_schedulers")


@pytest.fixture
def offload(pkg):
    """Return the callback's class, from each of the two packages in turn."""
    return importlib.import_module(f"stillframe.{pkg.name}").CPUOffloadCallback


@pytest.fixture
def strategies(pkg):
    return part_of(pkg, "strategies")


@pytest.fixture
def small_pool(monkeypatch):
    """Configure a default engine with one block of 1 MiB."""
    with stillframe.Engine(pool_bytes=1 << 20, block_bytes=1 << 20) as engine:
        monkeypatch.setattr(
            sys.modules["stillframe._snapshot.snapshot"], "engine_or_default", lambda given: engine
        )
        yield engine


@pytest.fixture(autouse=True)
def nothing_stays_leased():
    yield
    if leased():
        gc.collect()
    assert leased() == 0


def leased():
    """Return the bytes of the default pool that are in use."""
    return stillframe.default_engine().stats()["leased_bytes"]


def part_of(pkg, name):
    """Import a module of the package's `pytorch` half."""
    root = "lightning.pytorch" if pkg.name == "lightning" else pkg.name
    return importlib.import_module(f"{root}.{name}")


def lightning_async(pkg):
    """Return Lightning's own AsyncCheckpointIO."""
    return part_of(pkg, "plugins.io").AsyncCheckpointIO


def recorder(pkg, seen):
    """Make a callback before ours that copies each checkpoint as the callbacks get it."""

    class Recorder(pkg.Callback):
        def on_save_checkpoint(self, trainer, module, checkpoint):
            seen.append(copied({key: checkpoint[key] for key in KEYS}))

    return Recorder()


def trainer_stub(rank=0, strategy=None):
    """Return the parts of a Trainer that the callback reads."""
    return SimpleNamespace(global_rank=rank, strategy=strategy, optimizers=[])


def save(callback, checkpoint, rank=0, strategy=None):
    callback.on_save_checkpoint(trainer_stub(rank, strategy), None, checkpoint)
    return checkpoint
