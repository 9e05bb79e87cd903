"""Questions to torch.distributed: whether this process has others beside it, and DTensor's class.

The class is found without importing it: code that has a DTensor has imported it.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch.distributed


def is_initialized() -> bool:
    """Return whether there is a process group, even of one rank."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


def may_have_ranks_beside() -> bool:
    """Return whether other ranks may run on this machine. It asks none of them, because a dead or
    missing rank would never answer."""
    if not is_initialized() or torch.distributed.get_world_size() == 1:
        return False
    return os.environ.get("LOCAL_WORLD_SIZE") != "1"  # torchrun sets it, other launchers may not


def dtensor() -> type[Any] | None:
    """Return the class, or None if nobody has imported it."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind if isinstance(kind, type) else None


def memory_of(tensor: Any) -> Any:
    """Return the tensor that has the memory: for a DTensor, its local tensor."""
    return tensor._local_tensor if type(tensor) is dtensor() else tensor
