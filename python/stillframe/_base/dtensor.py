"""DTensor's class without importing it: code that has a DTensor has imported it."""

from __future__ import annotations

import sys
from typing import Any


def dtensor() -> type[Any] | None:
    """Return the class, or None if nobody has imported it."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind if isinstance(kind, type) else None


def memory_of(tensor: Any) -> Any:
    """Return the tensor that has the memory: for a DTensor, its local tensor."""
    return tensor._local_tensor if type(tensor) is dtensor() else tensor
