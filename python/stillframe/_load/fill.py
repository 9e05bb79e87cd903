"""Reads a file's records into the targets of `load(into=)`, without a second copy if possible.

The records are read in the file's order. A record that is a target's whole memory is read straight
into the target. Any other record is read into temporary memory and copied from there.

A tensor of the file without a target is *new*: the user's tree gets the tensor itself, over the
memory that its record is read into.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stillframe import _core
from stillframe._base import device as _device
from stillframe._base import records
from stillframe._load import restore
from stillframe._load.into import Plan, copy_tensor

_AHEAD_BYTES = 128 << 20  # most bytes of temporary memory, except for a single longer storage
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # tensors of these types wrap no other tensors


class Fill:
    """A reader of a file's records into their targets.

    The keys of the dicts here are numbers of records, in the file's order.

    Args:
        core: A restore of the file that has not begun.
        plan: Which tensor of the file goes to which target. The file's tensors have no memory.
        new: The plan's `new_tensors`.
        first: The number of this file's first record in the plan, which may be for several files.
    """

    def __init__(self, core: _core.Restore, plan: Plan, new: list[Tensor], first: int = 0) -> None:
        self._core = core
        self._plan = plan
        self._sizes = core.sizes(0, restore.EVERYTHING)
        # The targets of each record: (target, the file's tensor).
        self._wanted: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for _, target, found in plan.tensors:
            index = self._number(found, first)
            if index is not None and found.numel():
                self._wanted.setdefault(index, []).append((target, found))
        # The new tensors that have a record in this file, with the record's number.
        self._new: list[tuple[int, Tensor]] = []
        for found in new:
            index = self._number(found, first)
            if index is not None:
                self._new.append((index, found))
        # The records that are read into the memory of a new tensor.
        self._kept = {index for index, found in self._new if found.numel()}
        # The records that are read straight into their first target, with that target.
        self._straight: dict[int, Tensor] = {}
        for index, pairs in self._wanted.items():
            target, found = pairs[0]
            if index not in self._kept and _can_be_read_into(target, found, self._sizes[index]):
                self._straight[index] = target
        # The CUDA devices of these targets. The core counts devices from 0, `_device` from 1.
        self._devices: dict[int, int] = {}
        for index, target in self._straight.items():
            number = _device.number_of_tensor(target)
            if number > 0:
                self._devices[index] = number - 1
        # The memory from which records are copied to their targets.
        self._temporary: dict[int, torch.UntypedStorage] = {}
        self._made: dict[int, torch.UntypedStorage] = {}  # the memory of the new tensors
        self._placed = 0  # how many records have a destination

    def _number(self, found: Tensor, first: int) -> int | None:
        """Return the number of a tensor's record in this file, or None."""
        index = restore.record_of(found)
        if index is None or not first <= index < first + len(self._sizes):
            return None
        return index - first

    def run(self) -> None:
        """Read every record into its targets. The caller then calls the plan's `finish`.

        Raises:
            records.RestoreFailed: A record is damaged or could not be read. After any exception,
                the targets may be half written.
        """
        try:
            restore.open_devices(self._core, set(self._devices.values()))
            for index in sorted(self._wanted):
                self._assign_memory(self._core.reach(index))
                records.wait(self._core, index)
                self._hand_over(index)
            self._assign_memory(self._core.nr)
            records.wait(self._core, self._core.nr)
        finally:
            self._core.close()  # ends the threads before their memory is freed
        self._adopt_memory()

    def _assign_memory(self, least: int) -> None:
        """Give memory to the first `least` records, and to as many more as may be read ahead."""
        first, addresses = self._placed, []
        ahead = sum(storage.nbytes() for storage in self._temporary.values())
        while self._placed < least or (self._placed < self._core.nr and ahead < _AHEAD_BYTES):
            index = self._placed
            address = 0  # no destination in host memory
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
                address = _address(self._straight[index])
                self._core.into_device(index, self._devices[index], address)
        self._core.go(self._placed)

    def _hand_over(self, index: int) -> None:
        """Copy a record that has been read to all its targets."""
        pairs = self._wanted[index]
        if index in self._straight:
            target = pairs[0][0]  # has the bytes already
            torch.autograd.graph.increment_version(target)  # as torch's own writes do
            storage, start, pairs = target.untyped_storage(), _start(target), pairs[1:]
        elif index in self._made:
            storage, start = self._made[index], 0
        else:
            storage, start = self._temporary.pop(index), 0
        for target, found in pairs:
            copy_tensor(target, _view_of(storage, start, found))

    def _adopt_memory(self) -> None:
        """Give the new tensors the memory of their records. The tensors have to stay the same
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
    """Return whether a record of `nbytes` bytes is exactly the target's memory. `found` is the
    file's tensor over the record."""
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
    """Return the address of the target's first byte for the CUDA driver."""
    return _device.address_of(target.untyped_storage()) + _start(target)


def _start(target: Tensor) -> int:
    """Return the offset in bytes of the target in its storage."""
    return int(target.storage_offset()) * target.element_size()


def _view_of(storage: torch.UntypedStorage, start: int, found: Tensor) -> Tensor:
    """Return a tensor like `found` over its record's bytes, which begin at `start` in `storage`."""
    if start % found.element_size():
        # Copy the bytes, because a tensor has to begin at a multiple of its element size. This is
        # for a record that was read into a target with smaller elements.
        record = torch.empty(0, dtype=torch.uint8, device=storage.device)
        record.set_(storage, start, (storage.nbytes() - start,), (1,))
        storage, start = record.clone().untyped_storage(), 0
    first = start // found.element_size() + found.storage_offset()
    view = torch.empty(0, dtype=found.dtype, device=storage.device)
    view.set_(storage, first, found.size(), found.stride())
    if found.is_conj():
        view = torch._conj(view)
    return torch._neg_view(view) if found.is_neg() else view
