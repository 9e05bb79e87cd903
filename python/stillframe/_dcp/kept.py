"""What is kept of a save's plan for the next one of the same structure.

A plan depends on names, types and shapes on all ranks, and on nothing else. So a rank that finds
its state dict as it was has its part of the plan already, and where all ranks have theirs of one
and the same save, nobody plans, and none of it is sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

_MOST = 8  # structures whose plans are kept

Places = list[list[tuple[int, int]]]  # of the items of each file: offset and length


@dataclasses.dataclass
class Kept:
    """
    Attributes:
        number: Of the save that was planned; 0 where it is not known to be.
        plan: This rank's part.
        places: Where its items stood in the files of the last save.
        metadata: On the coordinator, of the last save.
        files_ids: On the coordinator, what each rank's files had in their names then.
    """

    number: int
    plan: SavePlan
    places: Places
    metadata: Metadata | None
    files_ids: list[int]


class Plans:
    """Those of one group."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Kept] = {}

    def of(self, structure: Hashable) -> Kept | None:
        return self._kept.get(structure)

    def keep(self, structure: Hashable, kept: Kept) -> None:
        self._kept.pop(structure, None)
        while len(self._kept) >= _MOST:
            del self._kept[next(iter(self._kept))]
        self._kept[structure] = kept  # the last one used is the last to go


def structure(flat: dict[str, Any], mappings: dict[str, Any]) -> Hashable:
    """What a plan of PyTorch's planner depends on.

    Args:
        flat, mappings: As the planner has flattened the state dict.

    Returns:
        None where it has something in it that plans by itself.
    """
    kinds = []
    for value in flat.values():
        kind = _kind(value)
        if kind is None:
            return None
        kinds.append(kind)
    return tuple(mappings.items()), tuple(kinds)


def _kind(value: Any) -> Hashable:
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return value.shape, value.dtype, value.layout, value.requires_grad
    if isinstance(value, DTensor):
        local = value.to_local().shape
        place = (value.device_mesh, value.placements)
        return value.shape, value.dtype, value.requires_grad, local, place
    if isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__"):
        return None
    return ()
