"""Registered owners of memory that only an optimizer step replaces but no optimizer owns.

Offloaded optimizer state is in new pool memory after every step. An observer trusts a storage only
after watching it for a step. So the owner of this memory tells which storages may be deferred.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple, Protocol

import torch

from stillframe import _core
from stillframe._tree.skeleton import SOURCE


class Marks(NamedTuple):
    """The storages of a save, and which of them are copied after its call.

    Attributes:
        numbers: The storages' numbers in the save, by the addresses of their StorageImpls.
        rows: One `struct sfr_source` for each storage; marking a storage changes its lane.
        indices: The numbers of the marked storages.
        tensors: The tensors over marked storages.
        storage_numbers: For each of `tensors`, the number of its storage.
        versions: For each of `tensors`, its version counter.
    """

    numbers: _core.Numbers
    rows: bytearray
    indices: list[int]
    storage_numbers: list[int]
    tensors: list[torch.Tensor]
    versions: list[int]

    def is_deferred(self, number: int) -> bool:
        """Return whether the storage with this number is marked."""
        _, _, lane, _ = SOURCE.unpack_from(self.rows, number * SOURCE.size)
        return bool(lane != 0)  # captured storages have lane 0


class MemoryOwner(Protocol):
    def defer(self, marks: Marks) -> None:
        """Mark the storages of a save that may be copied after its call, with
        `Observer.defer_memory_owner`."""

    def distrust(self, why: str) -> None:
        """Defer nothing from now on: other code wrote to the memory while a save copied it."""


registered: weakref.WeakSet[MemoryOwner] = weakref.WeakSet()


def register(owner: MemoryOwner) -> None:
    """Have every save call `owner.defer` to learn which of the owner's storages it may copy after
    the call. The registration ends with the owner's life."""
    registered.add(owner)
