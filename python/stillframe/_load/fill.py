"""Reads a file's records into the targets of `load(into=)`, without a second copy if possible.

The records are read in the file's order. A record whose bytes are a target's whole memory is read
straight into it. Any other is read into temporary memory and copied from there, as for strided
views and parts of a storage.

A tensor of the file without a target is *new*: it is in a value of the tree that the file's value
replaces, or belongs to an object that loads its state itself. Such a tensor has no memory in the
plan. It gets the memory that its record is read into, and stays the same object.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stillframe import _core
from stillframe._base import device as _device
from stillframe._base import records
from stillframe._load import restore
from stillframe._load.into import Plan, copy_tensor

_AHEAD_BYTES = 128 << 20  # most bytes of temporary memory; a single longer storage may exceed it
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # tensors of these types wrap no other tensors


class Fill:
    """A reader of a file's records into their targets.

    Records are numbered in the order of the file. The keys of the dicts here, and the elements of
    the sets, are these numbers.

    Args:
        core: A restore of the file that has not begun.
        plan: Which tensor of the file goes to which target. The file's tensors have no memory:
            `restore.Shapes` or `flat.Files.shapes` has made them.
        new: The plan's `new_tensors`.
        first: The plan's number for this file's first record. A plan for several files numbers
            all their records together.
    """

    def __init__(self, core: _core.Restore, plan: Plan, new: list[Tensor], first: int = 0) -> None:
        self._core = core
        self._plan = plan
        self._sizes = core.sizes(0, restore.EVERYTHING)
        # For each record its targets, each with the tensor of the file that goes there.
        self._wanted: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for _, target, found in plan.tensors:
            index = self._number(found, first)
            if index is not None and found.numel():
                self._wanted.setdefault(index, []).append((target, found))
        # Each new tensor that has a record in this file, after the number of this record.
        numbers = [self._number(found, first) for found in new]
        self._new = [(i, found) for i, found in zip(numbers, new, strict=True) if i is not None]
        # The records that are read into the memory of a new tensor.
        self._kept = {index for index, found in self._new if found.numel()}
        # The records that are read straight into their first target, each with that target.
        self._straight: dict[int, Tensor] = {}
        for index, pairs in self._wanted.items():
            target, found = pairs[0]
            if index not in self._kept and _can_be_read_into(target, found, self._sizes[index]):
                self._straight[index] = target
        # The devices of those targets that are not in host memory, as `_device` numbers them.
        devices = {i: _device.number_of_tensor(target) for i, target in self._straight.items()}
        self._devices = {index: device for index, device in devices.items() if device > 0}
        # The memory of records that are copied from there to their targets.
        self._temporary: dict[int, torch.UntypedStorage] = {}
        self._made: dict[int, torch.UntypedStorage] = {}  # the memory of the new tensors
        self._placed = 0  # how many records have a destination

    def _number(self, found: Tensor, first: int) -> int | None:
        """Return the number of a tensor's record in this file, or None if it has none here."""
        index = restore.record_of(found)
        if index is None or not first <= index < first + len(self._sizes):
            return None
        return index - first

    def run(self) -> None:
        """Read every record into its targets. The caller then calls the plan's `finish`.

        Raises:
            records.RestoreFailed: A record is damaged or could not be read. After this and every
                other exception the targets may be half written.
        """
        try:
            restore.open_devices(self._core, {number - 1 for number in self._devices.values()})
            for index in sorted(self._wanted):
                self._assign_memory(self._core.reach(index))
                records.wait(self._core, index)
                self._hand_over(index)
            self._assign_memory(self._core.nr)
            records.wait(self._core, self._core.nr)
        finally:
            # The threads end before the memory that they write to is freed.
            self._core.close()
        self._adopt_memory()

    def _assign_memory(self, least: int) -> None:
        """Give records their destinations: at least the first `least`, and then as many as may be
        read ahead."""
        first, addresses = self._placed, []
        ahead = sum(storage.nbytes() for storage in self._temporary.values())
        while self._placed < least or (self._placed < self._core.nr and ahead < _AHEAD_BYTES):
            index = self._placed
            address = 0  # 0: the record has no destination in host memory
            if index in self._straight and index not in self._devices:
                address = self._straight[index].data_ptr()
            elif index in self._kept:
                storage = self._made[index] = restore.new_storage(self._sizes[index])
                address = storage.data_ptr()
            elif index in self._wanted and index not in self._straight:
                storage = self._temporary[index] = restore.new_storage(self._sizes[index])
                address = storage.data_ptr()
                ahead += self._sizes[index]
            addresses.append(address)
            self._placed += 1
        self._core.into(first, addresses)
        for index in range(first, self._placed):
            if index in self._devices:
                there = _address(self._straight[index])
                self._core.into_device(index, self._devices[index] - 1, there)
        self._core.go(self._placed)

    def _hand_over(self, index: int) -> None:
        """Copy a record that has been read to all its targets. The target that the record was read
        straight into has the bytes already."""
        pairs = self._wanted[index]
        if index in self._straight:
            target = pairs[0][0]
            torch.autograd.graph.increment_version(target)  # for autograd, as torch's writes do
            storage, start, pairs = target.untyped_storage(), _start(target), pairs[1:]
        elif index in self._made:
            storage, start = self._made[index], 0
        else:
            storage, start = self._temporary.pop(index), 0
        for target, found in pairs:
            copy_tensor(target, _view_of(storage, start, found))

    def _adopt_memory(self) -> None:
        """Give the new tensors the memory that their records were read into. They stay the same
        objects, because the plan's values refer to them."""
        none = restore.new_storage(0)
        for index, found in self._new:
            storage = self._made.get(index, none)
            new = _view_of(storage, 0, found)
            if type(found) is torch.nn.Parameter:
                new = torch.nn.Parameter(new, found.requires_grad)
            else:
                new.requires_grad_(found.requires_grad)
            new.__dict__.update(found.__dict__)
            torch.utils.swap_tensors(found, new)  # type: ignore[no-untyped-call]


def _can_be_read_into(target: Tensor, found: Tensor, nbytes: int) -> bool:
    """Return whether a record can be read straight into the target, because its bytes are exactly
    those of the target's memory. `found` is the file's tensor over the record, `nbytes` the
    record's length."""
    return (
        type(target) in _PLAIN
        and _device.number_of_tensor(target) >= 0
        and target.data_ptr() != 0
        and target.is_contiguous()
        and found.is_contiguous()
        and found.storage_offset() == 0
        and found.numel() * found.element_size() == nbytes
        and not (target.is_conj() or target.is_neg() or found.is_conj() or found.is_neg())
    )


def _address(target: Tensor) -> int:
    """Return the address of the target's first byte, as given to the driver."""
    return _device.address_of(target.untyped_storage()) + _start(target)


def _start(target: Tensor) -> int:
    """Return the offset of the target's first byte in its storage."""
    return int(target.storage_offset()) * target.element_size()


def _view_of(storage: torch.UntypedStorage, start: int, found: Tensor) -> Tensor:
    """Return a tensor like `found` over its record's bytes, which begin at `start` in `storage`."""
    if start % found.element_size():
        # A tensor must begin at a multiple of its element size. `start` is no such multiple,
        # because the record was read into a target with smaller elements. So the bytes are copied.
        record = torch.empty(0, dtype=torch.uint8, device=storage.device)
        record.set_(storage, start, (storage.nbytes() - start,), (1,))
        storage, start = record.clone().untyped_storage(), 0
    first = start // found.element_size() + found.storage_offset()
    view = torch.empty(0, dtype=found.dtype, device=storage.device)
    view.set_(storage, first, found.size(), found.stride())
    if found.is_conj():
        view = torch._conj(view)
    return torch._neg_view(view) if found.is_neg() else view
