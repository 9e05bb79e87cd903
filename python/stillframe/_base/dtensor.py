"""DTensor's class, without importing it: whoever has such a tensor has imported it."""

from __future__ import annotations

import sys
from typing import Any


def dtensor() -> type[Any] | None:
    """The class, or None where nobody has imported it."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind if isinstance(kind, type) else None


def memory_of(tensor: Any) -> Any:
    """The tensor that has the memory: of a DTensor, its local one."""
    return tensor._local_tensor if type(tensor) is dtensor() else tensor
