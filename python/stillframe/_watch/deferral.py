"""The storages of one save or snapshot that are copied after its call, and their state at the call.

`gate.defer` makes a `Deferral`, which asks the owners of optimizers for the storages. `gate.py`
holds steps back until they are copied.
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
    """The object that is saved or copied: a `Skeleton`, or the `Tree` of a snapshot. Its attributes
    are those of `Marks`."""

    numbers: _core.Numbers
    rows: bytearray


# The calls whose save is not launched yet. By the id of a deferral: the thread of its call, and a
# weak reference to the deferral.
calls: dict[int, tuple[int, weakref.ref[Deferral]]] = {}


class Deferral:
    """The storages of one save that are copied after the call, and their versions at the call.

    Attributes:
        indices: The storages' numbers in the save; the lane in their rows is ``SFR_LANE_HOST``.
        fallbacks: Sentences for the report. Each names an optimizer whose storages are captured,
            and the reason.
        overtaken: A step has written before the save was launched, so the copy may be torn.
    """

    __slots__ = (
        "__weakref__",
        "_indices",
        "_numbers",
        "_owner_ends",
        "_storages",
        "_tensors",
        "_versions",
        "fallbacks",
        "indices",
        "overtaken",
    )

    def __init__(self) -> None:
        self.indices: list[int] = []
        self.fallbacks: list[str] = []
        self._storages: _core.Numbers | None = None  # the numbers of all storages of the save
        self._indices: set[int] | None = None  # `indices` as a set; made by the first `holds`
        self._numbers: list[int] = []  # for each of `_tensors`, the number of its storage
        self._tensors: list[torch.Tensor] = []
        self._versions: list[int] = []  # for each of `_tensors`, its version counter at the call
        # Each owner's storages are adjacent in `indices`. For each owner, in the same order: the
        # position after its last storage in `indices`, and the owner.
        self._owner_ends: list[tuple[int, Owner | MemoryOwner]] = []
        self.overtaken = False

    def torn(self) -> int:
        """Return the number of a storage whose tensors' version counters show a write since the
        call, or -1.

        One call into the core reads all counters, so no other Python thread runs in between.
        """
        if self.overtaken and self.indices:
            return self.indices[0]
        tensors = self._tensors
        if not tensors:
            return -1  # `release` was called
        with torch._C.DisableTorchFunction():
            position = _core.Observer.changed(tensors, self._versions)
        return -1 if position < 0 else self._numbers[position]

    def distrust(self, index: int) -> None:
        """Have the optimizer that owns storage ``index`` captured completely from now on. Do
        nothing if the storage was not deferred."""
        position = self.indices.index(index) if index in self.indices else len(self.indices)
        for end, owner in self._owner_ends:
            if position < end:
                owner.distrust("something other than its step changed it while it was copied")
                return

    def holds(self, identity: int) -> bool:
        """Return whether a storage is copied after the call; `identity` is the address of its
        StorageImpl."""
        if self._indices is None:
            self._indices = set(self.indices)
        return self._storages is not None and self._storages.get(identity) in self._indices

    def release(self) -> None:
        """Drop the tensors, because the verdict is given. `distrust` may still be called."""
        self._tensors = []

    def close(self) -> None:
        """Remove the deferral from `calls`, so that steps do not wait for its call any more. Steps
        wait for the save itself by then, or there is no save. May be called again."""
        calls.pop(id(self), None)

    def ask(self, sources: Sources) -> None:
        """Ask every owner which of its storages may be copied after the call. Set `indices` and
        `fallbacks`."""
        lists = self.indices, self._numbers, self._tensors, self._versions
        marks = Marks(sources.numbers, sources.rows, *lists)
        owners = list(ownership.living())
        # Steps of an unseen owner do not wait for copies, so no other owner may defer its storages.
        for unseen in (each for each in owners if each.unseen):
            unseen.capture_for_others()
        for owner in (*owners, *memory_owners.known):
            before = len(self.indices)
            owner.defer(marks)
            if len(self.indices) > before:
                self._owner_ends.append((len(self.indices), owner))
        self._storages = sources.numbers
        for sentence in (owner.why_captured(marks) for owner in owners):
            if sentence is not None and sentence not in self.fallbacks:
                self.fallbacks.append(sentence)
