"""Entry points of Lightning's callback factories: run by *every* Trainer of the environment.

So this module stands outside the package, and importing it imports nothing: neither stillframe
(whose import sets the optimizer hooks) nor torch. A Trainer gets the companion callback only if
a plugin of ours is alive in the process.
"""

import importlib
import sys


def _companions(module: str) -> list[object]:
    plugin = sys.modules.get("stillframe._plugin")
    if plugin is None or not len(plugin.live):
        return []
    return [importlib.import_module(module).StillframeCompanion()]


def lightning_callbacks() -> list[object]:
    """Group `lightning.pytorch.callbacks_factory`."""
    return _companions("stillframe.lightning")


def pytorch_lightning_callbacks() -> list[object]:
    """Group `pytorch_lightning.callbacks_factory`."""
    return _companions("stillframe.pytorch_lightning")
