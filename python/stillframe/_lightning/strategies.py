"""Recognises strategies that do not, or cannot, give their checkpoints to a CheckpointIO.

Checkpoints of some of them are saved all the same, by all ranks (`sharded.py`). Strategies are
recognised by the names of their classes, because their modules may not be installed.
"""

from __future__ import annotations

import warnings
from typing import Any

_XLA = ("XLAStrategy", "SingleDeviceXLAStrategy", "XLAFSDPStrategy")

_warned: set[str] = set()


def refuse(strategy: Any) -> None:
    """Refuse strategies of XLA.

    Raises:
        TypeError: `strategy` keeps its state on XLA devices.
    """
    for cls in type(strategy).__mro__:
        if cls.__name__ in _XLA:
            raise TypeError(
                f"{cls.__name__} cannot save with stillframe: the state on an XLA device has to be"
                " copied to the host by XLA itself, which stops training, and only its own"
                " XLACheckpointIO does that. Leave the plugin out with this strategy."
            )


def warn_if_bypassed(strategy: Any, plugin: str) -> None:
    """Warn once if `strategy` writes its checkpoints without its CheckpointIO."""
    reason = _bypassed(strategy)
    if reason is None or reason in _warned:
        return
    _warned.add(reason)
    warnings.warn(
        f"{reason}, so {plugin} does not see its checkpoints: they are saved as if it were not"
        " there, synchronously.",
        UserWarning,
        stacklevel=2,
    )


def sharded_as(strategy: Any) -> str | None:
    """Return the model's key in the checkpoints of `strategy` if each rank saves a part of them.

    None if the strategy does not save so, or has a `save_checkpoint` that is not Lightning's.
    """
    kind = _sharded(strategy)
    if kind is None or not _is_lightnings(getattr(type(strategy), "save_checkpoint", None)):
        return None
    return "model" if kind == "FSDPStrategy" else "state_dict"


def _bypassed(strategy: Any) -> str | None:
    if any(cls.__name__ == "DeepSpeedStrategy" for cls in type(strategy).__mro__):
        return "DeepSpeedStrategy writes its own checkpoints"
    if _sharded(strategy) is not None and sharded_as(strategy) is None:
        return f"{type(strategy).__name__} has a save_checkpoint of its own"
    return None


def _sharded(strategy: Any) -> str | None:
    """Return the name of Lightning's class if `strategy` is set to save sharded checkpoints."""
    for cls in type(strategy).__mro__:
        name = cls.__name__
        if name == "FSDPStrategy" and getattr(strategy, "_state_dict_type", None) == "sharded":
            return name
        if name == "ModelParallelStrategy" and getattr(
            strategy, "_save_distributed_checkpoint", False
        ):
            return name
    return None


def _is_lightnings(method: Any) -> bool:
    module = getattr(method, "__module__", None) or ""
    return module.endswith((".strategies.fsdp", ".strategies.model_parallel"))
