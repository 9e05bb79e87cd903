"""Questions to torch.distributed: whether there are other ranks, and what DTensor's class is."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch.distributed

# The first and the longest pause between two queries of a store.
_SHORTEST_S, _LONGEST_S = 0.0002, 0.01


def is_initialized() -> bool:
    """Return whether there is a process group, even of one rank."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


def may_have_other_local_ranks() -> bool:
    """Return whether other ranks may run on this machine. No rank is asked, because a dead rank
    would never answer."""
    if not is_initialized() or torch.distributed.get_world_size() == 1:
        return False
    return os.environ.get("LOCAL_WORLD_SIZE") != "1"  # torchrun sets it, other launchers may not


def poll(is_there: Callable[[], bool], longest_s: float = math.inf) -> bool:
    """Wait until `is_there()` returns True. Return False if that takes longer than `longest_s`.
    Unlike a wait of a process group's store, this can be ended by Ctrl-C."""
    end, pause_s = time.monotonic() + longest_s, _SHORTEST_S
    while not is_there():
        if time.monotonic() > end:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_S)
    return True


def dtensor_class_if_imported() -> type[Any] | None:
    """Return the class DTensor, or None if its module was not imported: then there are no
    DTensors."""
    module = sys.modules.get("torch.distributed.tensor")  # None if it was not imported
    kind = getattr(module, "DTensor", None)
    return kind if isinstance(kind, type) else None


def memory_of(tensor: Any) -> Any:
    """Return the local tensor of a DTensor, and any other tensor as it is."""
    return tensor._local_tensor if type(tensor) is dtensor_class_if_imported() else tensor
