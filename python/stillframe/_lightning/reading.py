"""Loads with `stillframe.load` if that gives the result of Lightning's own reader, else with it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import torch

from stillframe._base.distributed import may_have_ranks_beside
from stillframe._base.paths import Place
from stillframe._load.load import load

_FORCED = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")


def read(reader: Callable[..., Any], place: Place, args: Any, kwargs: Any) -> Any:
    """Load what `reader(place.given, *args, **kwargs)` would return.

    Args:
        reader: The `load_checkpoint` of the installed Lightning's CheckpointIO.

    Raises:
        CorruptCheckpointError: The file is damaged.
        FileNotFoundError: There is no such file.
        Exception: The reader's own errors.
    """
    path = place.given
    how = _arguments(reader, place, args, kwargs)
    if how is None:
        return reader(path, *args, **kwargs)
    if not os.path.exists(path):
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    return load(path, **how, shared=may_have_ranks_beside())


def _arguments(
    reader: Callable[..., Any], place: Place, args: Any, kwargs: Any
) -> dict[str, Any] | None:
    """Return the arguments for `load`; None if the reader must be called."""
    path = place.given
    if not isinstance(path, (str, os.PathLike)) or place.remote or str(path).startswith("~"):
        return None
    # Code that has replaced torch.load, to decrypt or to count, expects that to be called.
    if torch.load not in (torch.serialization.load, load):
        return None
    if any(name in os.environ for name in _FORCED):
        return None
    try:
        given = inspect.signature(reader).bind(path, *args, **kwargs)
    except TypeError:
        return None  # the reader raises this itself
    asked = dict(given.arguments)
    given.apply_defaults()
    meant = dict(given.arguments)
    del meant["path"]
    # The reader's default leaves every storage on the CPU.
    meant["map_location"] = asked.get("map_location", "cpu")
    # None means torch.load's own default, True. Older versions of Lightning passed False.
    weights_only = meant.get("weights_only", False)
    meant["weights_only"] = True if weights_only is None else weights_only
    return meant if meant.keys() == {"map_location", "weights_only"} else None
