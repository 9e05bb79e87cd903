"""What has memory that only an optimizer's step takes the place of, beside what optimizers own.

A state that is offloaded lies in the pool, in new memory after every step: so nothing that is known
of it could be known of the next. Who put it there says itself what a save may copy behind its call.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple, Protocol

import torch

from stillframe import _core
from stillframe._tree.skeleton import SOURCE


class Marks(NamedTuple):
    """The storages of a save, and which of them are copied behind its call.

    Attributes:
        numbers: A storage's number in the save, by the address of its StorageImpl.
        rows: What is known of each, `struct sfr_source`; marking one changes its lane.
        indices: The numbers of those marked.
        owners: For each tensor over them, the storage's number,
        tensors: the tensor,
        versions: and its version.
    """

    numbers: _core.Numbers
    rows: bytearray
    indices: list[int]
    owners: list[int]
    tensors: list[torch.Tensor]
    versions: list[int]

    def is_late(self, number: int) -> bool:
        """Whether the storage with this number is marked."""
        _, _, lane, _ = SOURCE.unpack_from(self.rows, number * SOURCE.size)
        return bool(lane)


class Keeper(Protocol):
    """What has memory that nothing but an optimizer's step takes the place of, beside what the
    optimizers own themselves."""

    def defer(self, marks: Marks) -> None:
        """Marks what of a save may be copied late, with ``Observer.defer_kept``."""

    def distrust(self, why: str) -> None:
        """Has everything captured from now on: it was written to while a save copied it."""


known: weakref.WeakSet[Keeper] = weakref.WeakSet()


def keep(keeper: Keeper) -> None:
    """Asks a keeper at every save, for as long as it lives."""
    known.add(keeper)
