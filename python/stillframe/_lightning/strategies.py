"""Strategies that do not hand their checkpoints to a CheckpointIO, or cannot.

They are told by the names of their classes: their modules need not be there.
"""

from __future__ import annotations

import warnings
from typing import Any

_XLA = ("XLAStrategy", "SingleDeviceXLAStrategy", "XLAFSDPStrategy")

_warned: set[str] = set()


def refuse(strategy: Any) -> None:
    """
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
    """One warning if `strategy` writes its checkpoints without its CheckpointIO."""
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


def _bypassed(strategy: Any) -> str | None:
    for cls in type(strategy).__mro__:
        name = cls.__name__
        if name == "DeepSpeedStrategy":
            return "DeepSpeedStrategy writes its own checkpoints"
        if name == "FSDPStrategy" and getattr(strategy, "_state_dict_type", None) == "sharded":
            return (
                'FSDPStrategy(state_dict_type="sharded") writes one file for each rank by itself'
                ' (state_dict_type="full" does not)'
            )
        if name == "ModelParallelStrategy" and getattr(
            strategy, "_save_distributed_checkpoint", False
        ):
            return (
                "ModelParallelStrategy(save_distributed_checkpoint=True) writes one file for each"
                " rank by itself (save_distributed_checkpoint=False does not)"
            )
    return None
