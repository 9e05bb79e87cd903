"""A pytest plugin for Lightning's own tests: sets a default CheckpointIO.

`theirs_lightning.py` sets the environment: THEIRS_WITH (sync, stock or ours) selects the
CheckpointIO of Trainers without one, and THEIRS_DELAY delays each save by some seconds.
"""

import functools
import os
import tempfile
import time

import pytest
from lightning.pytorch.plugins.io import AsyncCheckpointIO as StockAsync
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.connectors import accelerator_connector

WITH = os.environ["THEIRS_WITH"]
DELAY_S = float(os.environ["THEIRS_DELAY"])


class SlowTorch(TorchCheckpointIO):
    """Lightning's own writer on a disk that takes longer for each file."""

    def save_checkpoint(self, *args, **kwargs):
        time.sleep(DELAY_S)
        super().save_checkpoint(*args, **kwargs)


def checkpoint_io():
    if WITH == "stock":
        return StockAsync(SlowTorch() if DELAY_S else TorchCheckpointIO())
    from stillframe.lightning import AsyncCheckpointIO

    return AsyncCheckpointIO()


def by_default(init):
    @functools.wraps(init)
    def make(connector, *args, **kwargs):
        init(connector, *args, **kwargs)
        strategy = connector.strategy
        given = connector.checkpoint_io is not None or strategy._checkpoint_io is not None
        if not given and "XLA" not in type(strategy).__name__:
            strategy.checkpoint_io = checkpoint_io()

    return make


if WITH != "sync":
    connector = accelerator_connector._AcceleratorConnector
    connector.__init__ = by_default(connector.__init__)


def pytest_sessionstart():
    """Start our threads first: Lightning's tests compare the number of threads before and after."""
    if WITH != "ours":
        return
    import stillframe
    from stillframe.lightning import AsyncCheckpointIO

    with tempfile.TemporaryDirectory() as directory:
        plugin = AsyncCheckpointIO(TorchCheckpointIO(), on_durable=lambda path, report: None)
        plugin.save_checkpoint({}, f"{directory}/a.ckpt")
        plugin.teardown()
        stillframe.save({}, f"{directory}/b.ckpt")


@pytest.fixture(autouse=True)
def a_slow_disk():
    if WITH != "ours":
        yield
        return
    import stillframe
    from stillframe.testing import slow

    with slow("fdatasync", DELAY_S):
        yield
        # Saves that a test left under way must not reach the next test.
        try:
            stillframe.wait_all(timeout=60)
        except stillframe.StillframeError as error:
            print(f"nobody looked at: {error}")
