"""The storages of one save or snapshot that are copied after its call, and their state at the call.

`gate.defer` makes a `Deferral`, which asks the owners of optimizers for the storages.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch

from stillframe import _core
from stillframe._watch import memory_owners, ownership
from stillframe._watch.memory_owners import Marks, MemoryOwner
from stillframe._watch.ownership import Owner


class Sources(Protocol):
    """The object that is saved or copied: a `Skeleton`, or the `Tree` of a snapshot."""

    numbers: _core.Numbers
    rows: bytearray


# The calls whose save is not launched yet, by the id of their deferral: (thread, deferral).
unlaunched_calls: dict[int, tuple[int, weakref.ref[Deferral]]] = {}


class Deferral:
    """The storages of one save that are copied after the call, and their versions at the call.

    Attributes:
        indices: The storages' numbers in the save.
        fallbacks: Sentences for the report, about optimizers whose storages are captured.
        overtaken: A step has written before the save was launched, so the copy may be torn.
    """

    __slots__ = (
        "__weakref__",
        "_indices",
        "_numbers",
        "_owner_ends",
        "_storage_numbers",
        "_tensors",
        "_versions",
        "fallbacks",
        "indices",
        "overtaken",
    )

    def __init__(self) -> None:
        self.indices: list[int] = []
        self.fallbacks: list[str] = []
        self._numbers: _core.Numbers | None = None  # the numbers of all storages of the save
        self._indices: set[int] | None = None  # `indices` as a set; made by the first `is_deferred`
        self._tensors: list[torch.Tensor] = []
        self._storage_numbers: list[int] = []  # for each of `_tensors`, the number of its storage
        self._versions: list[int] = []  # for each of `_tensors`, its version counter at the call
        # The owners, in the order of their storages in `indices`, each with the position after its
        # last storage there.
        self._owner_ends: list[tuple[int, Owner | MemoryOwner]] = []
        self.overtaken = False

    def torn(self) -> int:
        """Return the number of a storage that was written to since the call, by the tensors'
        version counters; -1 if none was.

        One call into the core reads all counters, so no other Python thread runs in between.
        """
        if self.overtaken and self.indices:
            return self.indices[0]
        tensors = self._tensors
        if not tensors:
            return -1  # `release` was called
        with torch._C.DisableTorchFunction():
            changed_index = _core.Observer.changed(tensors, self._versions)
        no_tensor_changed = changed_index < 0
        return -1 if no_tensor_changed else self._storage_numbers[changed_index]

    def distrust(self, index: int) -> None:
        """Have the optimizer that owns storage number ``index`` captured completely from now on."""
        if index not in self.indices:
            return
        position = self.indices.index(index)
        # Each owner's storages follow each other in `indices`, up to the position `end`.
        for end, owner in self._owner_ends:
            if position < end:
                owner.distrust("something other than its step changed it while it was copied")
                return

    def is_deferred(self, identity: int) -> bool:
        """Return whether a storage is copied after the call; `identity` is the address of its
        StorageImpl."""
        if self._indices is None:
            self._indices = set(self.indices)
        return self._numbers is not None and self._numbers.get(identity) in self._indices

    def release(self) -> None:
        """Drop the tensors. `distrust` may still be called."""
        self._tensors = []

    def close(self) -> None:
        """Let steps of other threads go on without waiting for the call that makes the save. May be
        called again."""
        unlaunched_calls.pop(id(self), None)

    def collect_deferred_storages(self, sources: Sources) -> None:
        """Ask every owner which storages may be deferred. Set `indices` and `fallbacks`."""
        marks = Marks(
            numbers=sources.numbers,
            rows=sources.rows,
            indices=self.indices,
            storage_numbers=self._storage_numbers,
            tensors=self._tensors,
            versions=self._versions,
        )
        owners = list(ownership.living())
        for each in owners:
            # Steps without hooks wait for no copy, so no other owner may defer what they write.
            if each.has_unhooked_steps:
                each.capture_params_in_other_owners()
        for owner in (*owners, *memory_owners.registered):
            nr_before = len(self.indices)
            owner.defer(marks)
            if len(self.indices) > nr_before:  # the owner has deferred some storages
                self._owner_ends.append((len(self.indices), owner))
        self._numbers = sources.numbers
        for each in owners:
            sentence = each.why_captured(marks)
            if sentence is not None and sentence not in self.fallbacks:
                self.fallbacks.append(sentence)
