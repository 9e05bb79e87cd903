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
        plan: Which tensor of the file goes to which target. The file's tensors have no memory yet.
        new: The plan's `new_tensors`.
        first: The number of this file's first record in the plan, which may be for several files.
    """

    def __init__(self, core: _core.Restore, plan: Plan, new: list[Tensor], first: int = 0) -> None:
        self._core = core
        self._plan = plan
        self._sizes = core.sizes(0, restore.EVERYTHING)
        # The targets of each record, with the file's tensors for them.
        self._targets: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for _, target, file_tensor in plan.tensors:
            index = self._record_index(file_tensor, first)
            if index is not None and file_tensor.numel():
                self._targets.setdefault(index, []).append((target, file_tensor))
        # The new tensors that have a record in this file, with the record's number.
        self._new: list[tuple[int, Tensor]] = []
        for file_tensor in new:
            index = self._record_index(file_tensor, first)
            if index is not None:
                self._new.append((index, file_tensor))
        # The records that are read into the memory of a new tensor.
        self._records_of_new = {index for index, file_tensor in self._new if file_tensor.numel()}
        # The targets that records are read straight into: the first target of each such record.
        self._direct_targets: dict[int, Tensor] = {}
        for index, targets in self._targets.items():
            if index in self._records_of_new:  # the targets get copies from the new tensor
                continue
            target, file_tensor = targets[0]
            if _can_be_read_into(target, file_tensor, self._sizes[index]):
                self._direct_targets[index] = target
        # The CUDA devices of these targets. The core counts devices from 0, `_device` from 1.
        self._devices: dict[int, int] = {}
        for index, target in self._direct_targets.items():
            number = _device.device_number_of_tensor(target)
            if number > 0:
                self._devices[index] = number - 1
        # The memory from which records are copied to their targets.
        self._temporary: dict[int, torch.UntypedStorage] = {}
        self._new_memory: dict[int, torch.UntypedStorage] = {}  # the memory of the new tensors
        self._nr_assigned = 0  # how many records have a destination

    def _record_index(self, file_tensor: Tensor, first: int) -> int | None:
        """Return the number of a tensor's record in this file, or None if it is in another file."""
        index = restore.record_number_of(file_tensor)
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
            restore.prepare_copies_to_devices(self._core, set(self._devices.values()))
            for index in sorted(self._targets):
                # Records in one chunk are read together, so all of them need memory first.
                nr_needed = self._core.reach(index)
                self._assign_memory(nr_needed)
                records.wait(self._core, index)
                self._copy_to_targets(index)
            self._assign_memory(self._core.nr)
            records.wait(self._core, self._core.nr)
        finally:
            self._core.close()  # ends the threads before their memory is freed
        self._give_memory_to_new_tensors()

    def _assign_memory(self, least: int) -> None:
        """Give memory to the first `least` records, and to as many more as may be read ahead."""
        first, addresses = self._nr_assigned, []
        ahead = sum(storage.nbytes() for storage in self._temporary.values())
        while self._nr_assigned < self._core.nr:
            if self._nr_assigned >= least and ahead >= _AHEAD_BYTES:
                break
            index = self._nr_assigned
            address = 0  # no destination in host memory
            if index in self._devices:
                pass  # its memory is on a device, see below
            elif index in self._direct_targets:
                address = self._direct_targets[index].data_ptr()
            elif index in self._records_of_new:
                storage = self._new_memory[index] = restore.new_storage(self._sizes[index])
                address = storage.data_ptr()
            elif index in self._targets:
                storage = self._temporary[index] = restore.new_storage(self._sizes[index])
                address = storage.data_ptr()
                ahead += self._sizes[index]
            addresses.append(address)
            self._nr_assigned += 1
        self._core.into(first, addresses)
        for index in range(first, self._nr_assigned):
            if index in self._devices:
                address = _address(self._direct_targets[index])
                self._core.into_device(index, self._devices[index], address)
        self._core.go(self._nr_assigned)  # lets the threads read these records

    def _copy_to_targets(self, index: int) -> None:
        """Copy a record that has been read to all its targets."""
        targets = self._targets[index]
        if index in self._direct_targets:
            target = self._direct_targets[index]  # the first one, which has the bytes already
            torch.autograd.graph.increment_version(target)  # as torch's own writes do
            storage, start = target.untyped_storage(), _start(target)
            targets = targets[1:]
        elif index in self._new_memory:
            storage, start = self._new_memory[index], 0
        else:
            storage, start = self._temporary.pop(index), 0
        for target, file_tensor in targets:
            copy_tensor(target, _view_of(storage, start, file_tensor))

    def _give_memory_to_new_tensors(self) -> None:
        """Give the new tensors the memory of their records. The tensors have to stay the same
        objects, because the plan's values refer to them."""
        empty = restore.new_storage(0)  # for tensors without elements
        for index, file_tensor in self._new:
            storage = self._new_memory.get(index, empty)
            new = _view_of(storage, 0, file_tensor)
            if type(file_tensor) is torch.nn.Parameter:
                new = torch.nn.Parameter(new, file_tensor.requires_grad)
            else:
                new.requires_grad_(file_tensor.requires_grad)
            new.__dict__.update(file_tensor.__dict__)
            torch.utils.swap_tensors(file_tensor, new)  # type: ignore[no-untyped-call]


def _can_be_read_into(target: Tensor, file_tensor: Tensor, nbytes: int) -> bool:
    """Return whether a record of `nbytes` bytes is exactly the target's memory. `file_tensor` is
    over the record."""
    return (
        type(target) in _PLAIN
        and _device.device_number_of_tensor(target) >= 0
        and target.data_ptr() != 0
        and target.is_contiguous()
        and file_tensor.is_contiguous()
        and file_tensor.storage_offset() == 0
        and file_tensor.numel() * file_tensor.element_size() == nbytes
        and not (
            target.is_conj() or target.is_neg() or file_tensor.is_conj() or file_tensor.is_neg()
        )
    )


def _address(target: Tensor) -> int:
    """Return the address of the target's first byte for the CUDA driver."""
    return _device.address_of(target.untyped_storage()) + _start(target)


def _start(target: Tensor) -> int:
    """Return the offset in bytes of the target in its storage."""
    return int(target.storage_offset()) * target.element_size()


def _view_of(storage: torch.UntypedStorage, start: int, file_tensor: Tensor) -> Tensor:
    """Return a tensor like `file_tensor` over its record's bytes. They begin at `start` in
    `storage`."""
    if start % file_tensor.element_size():
        # Copy the bytes, because a tensor has to begin at a multiple of its element size. This is
        # for a record that was read into a target with smaller elements.
        record = torch.empty(0, dtype=torch.uint8, device=storage.device)
        record.set_(storage, start, (storage.nbytes() - start,), (1,))
        storage, start = record.clone().untyped_storage(), 0
    first = start // file_tensor.element_size() + file_tensor.storage_offset()
    view = torch.empty(0, dtype=file_tensor.dtype, device=storage.device)
    view.set_(storage, first, file_tensor.size(), file_tensor.stride())
    if file_tensor.is_conj():
        view = torch._conj(view)
    if file_tensor.is_neg():
        view = torch._neg_view(view)
    return view
