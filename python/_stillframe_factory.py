"""Entry points of Lightning's callback factories: run by *every* Trainer of the environment.

So this module stands outside the package, and importing it imports nothing: neither stillframe
(whose import sets the optimizer hooks) nor torch. A Trainer gets the companion callback only if
it saves with a plugin of ours.
"""

import importlib
import logging
import sys

_MAX_FRAMES = 16


def _trainer_being_made():
    """The Trainer in whose constructor the factory is called; None if it is not found."""
    frame = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        frame = frame.f_back
        if frame is None:
            return None
        if frame.f_code.co_name == "__init__" and frame.f_code.co_argcount:
            self = frame.f_locals.get(frame.f_code.co_varnames[0])
            if hasattr(self, "_accelerator_connector") and hasattr(self, "_callback_connector"):
                return self
    return None


def _adds_later(trainer, companion):
    """Have Lightning put `companion` into the new list that it makes when all callbacks are known.

    Lightning adds a factory's result to the user's own list, so a Trainer that is made later with
    the same list would have it too. Returns False if this Lightning makes its list differently.
    """
    connector = trainer._callback_connector
    reorder = getattr(connector, "_reorder_callbacks", None)
    if reorder is None:
        return False

    def reorder_once(callbacks):
        vars(connector).pop("_reorder_callbacks", None)
        return reorder([*callbacks, companion])

    connector._reorder_callbacks = reorder_once
    return True


def _companions(module: str) -> list[object]:
    plugins = sys.modules.get("stillframe._lightning.plugin")
    if plugins is None or not len(getattr(plugins, "live", ())):
        return []
    try:
        companion = importlib.import_module(module).StillframeCompanion()
        trainer = _trainer_being_made()
        if trainer is not None and not plugins.register(trainer):
            return []
        if trainer is not None and _adds_later(trainer, companion):
            return []
        return [companion]
    except Exception:
        # Every Trainer of the environment comes through here.
        logging.getLogger("stillframe").exception(
            "stillframe: the companion callback could not be made"
        )
        return []


def lightning_callbacks() -> list[object]:
    """Group `lightning.pytorch.callbacks_factory`."""
    return _companions("stillframe.lightning")


def pytorch_lightning_callbacks() -> list[object]:
    """Group `pytorch_lightning.callbacks_factory`."""
    return _companions("stillframe.pytorch_lightning")
