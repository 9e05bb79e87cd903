"""Entry points for Lightning's callback factories, which *every* Trainer in the environment calls.

So this module is outside the package, and importing it imports neither stillframe (whose import
installs the optimizer hooks) nor torch. A Trainer gets the companion callback only if it saves with
a plugin of stillframe's.
"""

import importlib
import logging
import sys

_MAX_FRAMES = 16  # how many callers are examined, at most, to find the Trainer


def _find_trainer_in_call_stack():
    """Return the Trainer whose constructor calls the factory; None if it is not found."""
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


def _patch_reorder_to_add_companion(trainer, companion):
    """Have Lightning put `companion` into the new list that it makes when all callbacks are known.

    Lightning adds a factory's result to the user's own list, so a Trainer that is made later with
    the same list would get this companion too. Return False if this version of Lightning makes its
    list differently.
    """
    connector = trainer._callback_connector
    reorder = getattr(connector, "_reorder_callbacks", None)
    if reorder is None:
        return False

    def reorder_with_companion(callbacks):
        vars(connector).pop("_reorder_callbacks", None)
        return reorder([*callbacks, companion])

    connector._reorder_callbacks = reorder_with_companion
    return True


def _make_companion_callbacks(module: str) -> list[object]:
    """Return a list with the companion for the Trainer that is being made. Return an empty list if
    it needs none, or if `_patch_reorder_to_add_companion` adds it. `module` defines the companion's
    class."""
    plugins = sys.modules.get("stillframe._lightning.plugin")
    if plugins is None or not len(getattr(plugins, "live", ())):
        return []
    try:
        companion = importlib.import_module(module).StillframeCompanion()
        trainer = _find_trainer_in_call_stack()
        if trainer is not None and not plugins.register(trainer):
            return []
        if trainer is not None and _patch_reorder_to_add_companion(trainer, companion):
            return []
        return [companion]
    except Exception:
        # Every Trainer in the environment runs this code, so no error may propagate.
        logging.getLogger("stillframe").exception(
            "stillframe: the companion callback could not be made"
        )
        return []


def lightning_callbacks() -> list[object]:
    """Serve the entry point group `lightning.pytorch.callbacks_factory`."""
    return _make_companion_callbacks("stillframe.lightning")


def pytorch_lightning_callbacks() -> list[object]:
    """Serve the entry point group `pytorch_lightning.callbacks_factory`."""
    return _make_companion_callbacks("stillframe.pytorch_lightning")
