"""Loading into tensors that are there already, with no second copy of the state.

The pickle is read first, by torch's own unpickler and with storages that have no memory, so what
does not fit is told before a byte is written. Then the records are read in the file's order: one
that is a tensor's whole memory goes straight there, any other by way of memory that lives until it
is copied (strided views, devices, parts of a storage). What has no record of its own to be read
from (tensors that wrap others, and those that stand where the target has none) is loaded as a
whole and copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stillframe import _core
from stillframe._base import device as _device
from stillframe._base.records import Failure, RestoreFailed
from stillframe._save import restore
from stillframe._tree.rebuild import holder_of_tensors, reach

_AHEAD_BYTES = 128 << 20  # bytes of memory on its way, at most, but for a single longer storage
_MOST_TOLD = 8
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_OVERLAPS = 1  # at::MemOverlap::Yes
WAS_FREED = "its memory was freed or shrunk when it was saved"


@dataclass(slots=True)
class Plan:
    """What goes where: found by `match`, done by `fill` or `copy`."""

    # Path, target, as the file has it.
    tensors: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)
    values: list[tuple[Any, Any, Any]] = field(default_factory=list)  # container, key, value
    problems: list[str] = field(default_factory=list)

    def refuse_problems(self) -> None:
        """Raises ValueError when something does not fit."""
        if self.problems:
            more = len(self.problems) - _MOST_TOLD
            told = [*self.problems[:_MOST_TOLD], *([f"and {more} more"] if more > 0 else [])]
            raise ValueError("the file does not fit what into= names: " + "; ".join(told))

    def refuse_short(self, sizes: list[int]) -> None:
        """Raises ValueError when something does not fit, be it into its record; `sizes`: theirs."""
        for path, _, found in self.tensors:
            index = restore.record_of(found)
            if index is not None and reach(found) > sizes[index]:
                self.problems.append(f"{path} is cut short in the file: {WAS_FREED}")
        self.refuse_problems()

    def is_of_records(self) -> bool:
        """Whether the tensors as the file has them, those of `restore.Shapes`, tell where their
        bytes are, and no value has tensors in it, which there have none."""
        return all(restore.record_of(found) is not None for *_, found in self.tensors) and not any(
            holder_of_tensors([value], self) for _, _, value in self.values
        )

    def set_values(self) -> None:
        for container, key, value in self.values:
            container[key] = value


def match(target: Any, found: Any) -> Plan:
    """Which tensor of a file goes to which of `target`, by its place in the two trees.

    All that is in `target` must be in the file; what else is there is left. Dictionaries and lists
    get the file's value of what is neither a tensor nor a container. A container that `target`
    holds in several places, be it inside itself, is filled from the first of them.
    """
    plan = Plan()
    stack: list[tuple[str, Any, Any]] = [("", target, found)]
    seen: set[int] = set()  # containers: each is filled once, from its first place in the tree
    while stack:
        path, here, there = stack.pop()
        if isinstance(here, Tensor):
            _match_tensor(plan, path or "the object itself", here, there)
            continue
        if id(here) in seen:
            continue
        seen.add(id(here))
        for name, value in reversed(list(_items(here))):
            place = f"{path}.{name}" if path else str(name)
            try:
                its = there[name]
            except (KeyError, IndexError, TypeError):
                plan.problems.append(f"{place} is not in the file")
                continue
            if isinstance(value, (dict, list, tuple, Tensor)):
                stack.append((place, value, its))
            elif not isinstance(here, tuple):
                plan.values.append((here, name, its))
    return plan


def _items(node: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(node, dict):
        yield from node.items()
    elif isinstance(node, (list, tuple)):
        yield from enumerate(node)
    else:
        more = ": give its state_dict()" if hasattr(node, "state_dict") else ""
        raise TypeError(
            "into= takes a tensor, or dictionaries, lists and tuples of them, not"
            f" {type(node)!r}{more}"
        )


def _match_tensor(plan: Plan, path: str, target: Tensor, found: Any) -> None:
    if not isinstance(found, Tensor):
        plan.problems.append(f"{path} is a tensor, and {type(found).__name__} in the file")
    elif not (_is_strided(target) and _is_strided(found)):
        plan.problems.append(f"{path} is not strided")
    elif (target.shape, target.dtype) != (found.shape, found.dtype):
        plan.problems.append(f"{path} is {_words(target)}, and {_words(found)} in the file")
    elif why := _why_not_written_to(target):
        plan.problems.append(f"{path} {why}")
    else:
        plan.tensors.append((path, target, found))


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _why_not_written_to(target: Tensor) -> str:
    """Why nothing can be put into the target; "" where it can."""
    if target.is_meta:
        return "has no memory"
    if type(target) not in _PLAIN:
        return ""  # what it has is its own affair
    if reach(target) > target.untyped_storage().nbytes():
        return "reaches beyond its memory: somebody has freed or shrunk that"
    if torch._debug_has_internal_overlap(target) == _OVERLAPS:
        return "is expanded: its elements share memory"
    return ""


def _words(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def copy(plan: Plan) -> None:
    """Fills the targets from tensors that were loaded."""
    for _, target, found in plan.tensors:
        _copy(target, found)
    plan.set_values()


# ---- straight from the file -------------------------------------------------------------


class Fill:
    """Reads a file's records to their targets.

    Args:
        core: A restore of the file that has not begun.
        plan: One that `is_of_records`.
    """

    def __init__(self, core: _core.Restore, plan: Plan) -> None:
        self.failure: Failure | None = None
        self._core = core
        self._plan = plan
        self._sizes = core.sizes(0, restore.EVERYTHING)
        self._wanted: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for _, target, found in plan.tensors:
            index = restore.record_of(found)
            if index is not None and found.numel():
                self._wanted.setdefault(index, []).append((target, found))
        self._straight = {
            index: target
            for index, pairs in self._wanted.items()
            for target, found in pairs[:1]
            if _is_all_of_it(target, found, self._sizes[index])
        }
        places = {i: _device.place_of_tensor(target) for i, target in self._straight.items()}
        self._devices = {index: place for index, place in places.items() if place > 0}
        self._on_their_way: dict[int, torch.UntypedStorage] = {}
        self._placed = 0

    def run(self) -> None:
        """
        Raises:
            RestoreFailed: `failure` says why. The targets are half written.
        """
        try:
            restore.open_devices(self._core, {place - 1 for place in self._devices.values()})
            for index in sorted(self._wanted):
                self._place(self._core.reach(index))
                self._wait(index)
                self._hand_over(index)
            self._place(self._core.nr)
            self._wait(self._core.nr)
        finally:
            self.failure = Failure(*self._core.failure())
            # First the threads, then the memory that they write to.
            self._core.close()
        self._plan.set_values()

    def _wait(self, index: int) -> None:
        if not self._core.wait(index):
            raise RestoreFailed

    def _place(self, least: int) -> None:
        """Gives records their places: `least` of all, and those that may be read ahead."""
        first, addresses = self._placed, []
        ahead = sum(storage.nbytes() for storage in self._on_their_way.values())
        while self._placed < least or (self._placed < self._core.nr and ahead < _AHEAD_BYTES):
            index = self._placed
            address = 0  # of what nobody wants the bytes are only checked
            if index in self._straight and index not in self._devices:
                address = self._straight[index].data_ptr()
            elif index in self._wanted and index not in self._straight:
                storage = self._on_their_way[index] = restore.new_storage(self._sizes[index])
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
        """The record is there: its targets that it did not go to get copies."""
        pairs = self._wanted[index]
        if index in self._straight:
            target = pairs[0][0]
            torch.autograd.graph.increment_version(target)  # nothing else notices such a write
            storage, start, pairs = target.untyped_storage(), _start(target), pairs[1:]
        else:
            storage, start = self._on_their_way.pop(index), 0
        for target, found in pairs:
            _copy(target, _over(storage, start, found))


def _copy(target: Tensor, found: Tensor) -> None:
    """Without a trace in the graph. Not under `torch.no_grad()`: a Ctrl-C as that ends would leave
    it on for good. Of some kinds of tensors a detached one is a copy, or has a scale of its own."""
    (target.detach() if target.requires_grad else target).copy_(found.detach())


def _is_all_of_it(target: Tensor, found: Tensor, nbytes: int) -> bool:
    """Whether the record's bytes are the target's memory as they are."""
    return (
        type(target) in _PLAIN
        and _device.place_of_tensor(target) >= 0
        and target.data_ptr() != 0
        and target.is_contiguous()
        and found.is_contiguous()
        and found.storage_offset() == 0
        and found.numel() * found.element_size() == nbytes
        and not (target.is_conj() or target.is_neg() or found.is_conj() or found.is_neg())
    )


def _address(target: Tensor) -> int:
    """Of its first byte, as the driver is told."""
    return _device.address_of(target.untyped_storage()) + _start(target)


def _start(target: Tensor) -> int:
    """Where its first byte lies in its storage."""
    return int(target.storage_offset()) * target.element_size()


def _over(storage: torch.UntypedStorage, start: int, found: Tensor) -> Tensor:
    """The tensor as the file has it, over its record's bytes, which begin at `start`."""
    if start % found.element_size():
        # Its elements are larger than the target's, and would begin elsewhere.
        record = torch.empty(0, dtype=torch.uint8, device=storage.device)
        record.set_(storage, start, (storage.nbytes() - start,), (1,))
        storage, start = record.clone().untyped_storage(), 0
    first = start // found.element_size() + found.storage_offset()
    view = torch.empty(0, dtype=found.dtype, device=storage.device)
    view.set_(storage, first, found.size(), found.stride())
    if found.is_conj():
        view = torch._conj(view)
    return torch._neg_view(view) if found.is_neg() else view
