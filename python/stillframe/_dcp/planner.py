"""Planners: PyTorch's own, with plans kept from save to save, and one that only fails.

DCP keeps cached plans in the class `SavePlanner`, by the name of the planner's class: all planners
of a class share one place. A rank whose plan is in it sends none, and the coordinator takes the one
it has there. So a place may serve one structure only, the same on all ranks, and after a save that
failed, which may have filled it on some ranks and not on others, another one is used.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner

_MOST = 8  # structures whose plans are kept


class Places:
    """The places of cached plans that one process uses."""

    def __init__(self) -> None:
        self._classes: dict[str, type[DefaultSavePlanner]] = {}

    def planner(self, words: Iterable[int]) -> DefaultSavePlanner:
        """A planner for a structure.

        Args:
            words: Say which one it is: the same on all ranks.
        """
        digest = zlib.crc32(b"".join(struct.pack("<q", word) for word in words))
        name = f"StillframePlanner{digest:08x}"
        kind = self._classes.pop(name, None)
        if kind is None:
            kind = type(name, (DefaultSavePlanner,), {})
            if len(self._classes) >= _MOST:
                self._forget(next(iter(self._classes)))
        self._classes[name] = kind  # the last one used is the last to go
        return kind(enable_plan_caching=True)

    def clear(self) -> None:
        """Forgets all plans."""
        for name in list(self._classes):
            self._forget(name)

    def _forget(self, name: str) -> None:
        del self._classes[name]
        for kept in vars(SavePlanner).values():
            if isinstance(kept, dict):
                kept.pop(name, None)


def structure(state_dict: dict[str, Any]) -> int:
    """A number for what a state dict's keys are, on one rank."""
    value = 0
    stack: list[Any] = [state_dict]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            value = zlib.crc32("\0".join(map(str, node)).encode(), value)
            stack.extend(each for each in node.values() if isinstance(each, (dict, list, tuple)))
        else:
            value = zlib.crc32(struct.pack("<q", len(node)), value)
            stack.extend(each for each in node if isinstance(each, (dict, list, tuple)))
    return value


class FailingPlanner(DefaultSavePlanner):
    """Takes part in a save for a rank that has nothing to save, so that all ranks get the reason
    instead of waiting for it."""

    def __init__(self, why: BaseException) -> None:
        super().__init__()
        self._why = why

    def set_up_planner(self, *args: Any, storage_meta: Any = None, **kwargs: Any) -> None:
        raise self._why
