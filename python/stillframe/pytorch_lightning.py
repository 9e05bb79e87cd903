"""The checkpoint plugin for `pytorch_lightning`.

    from stillframe.pytorch_lightning import AsyncCheckpointIO
    trainer = Trainer(plugins=[AsyncCheckpointIO()])

Fabric takes it as well: `Fabric(plugins=[AsyncCheckpointIO()])`. Fabric has no hook for its
end, so call `stillframe.wait_all()` when training is done.
"""

from __future__ import annotations

# isort: off
from stillframe._base import support

support.refuse_unsupported_framework("pytorch_lightning")
# isort: on

from lightning_fabric.plugins import CheckpointIO, TorchCheckpointIO
from pytorch_lightning import strategies
from pytorch_lightning.callbacks import Callback

from stillframe._lightning.companion import CompanionHooks
from stillframe._lightning.offload import OffloadHooks
from stillframe._lightning.plugin import CheckpointPlugin, register_with_loaded_packages
from stillframe._lightning.sharded import sharded

__all__ = ["AsyncCheckpointIO", "CPUOffloadCallback", "sharded"]


class AsyncCheckpointIO(CheckpointPlugin, CheckpointIO):
    __doc__ = CheckpointPlugin.__doc__
    _reader = TorchCheckpointIO  # the class that loads checkpoints


class CPUOffloadCallback(OffloadHooks, Callback):
    __doc__ = OffloadHooks.__doc__
    _strategies = strategies  # the module in which strategies are looked up by name


class StillframeCompanion(CompanionHooks, Callback):
    """Waits for the saves in flight wherever Lightning lets other code write.

    The package's entry point adds it to every Trainer that is made while one of our plugins exists.
    """


# The Trainers of every loaded Lightning package accept the plugin.
register_with_loaded_packages(AsyncCheckpointIO)
