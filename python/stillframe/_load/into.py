"""The plan of `load(into=)`: which part of a file goes where in a tree of tensors and objects.

`match` compares the user's tree with the file's tree, before a byte is written. The plan can be
carried out in two ways: straight from the file's records (fill.py), or by copying from a tree that
was loaded into new memory (`copy`). Here a `target` is in the user's tree, and a `file_tensor` or
`file_value` in the file's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.storage import TypedStorage, UntypedStorage

from stillframe._load import restore, stateful
from stillframe._tree.rebuild import (
    ATOMS,
    attributes_of,
    find_opaque_object_with_tensors,
    is_array,
    is_atom,
    reach,
)

_MAX_SHOWN = 8  # problems that an error lists
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # tensors of these types wrap no other tensors
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_OVERLAPS = 1  # torch's at::MemOverlap::Yes
WAS_FREED = "its memory was freed or shrunk when it was saved"


@dataclass(slots=True)
class Plan:
    """The tensors, values and calls that fill a tree.

    Attributes:
        tensors: The tensors to fill: (path in the tree, target, the file's tensor).
        values: The values to set when all tensors are filled: (container, key, the file's value).
        calls: The calls to make after the values are set, in this order.
        problems: Sentences about parts of the tree that do not fit the file.
    """

    tensors: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)
    values: list[tuple[Any, Any, Any]] = field(default_factory=list)
    calls: list[stateful.Call] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def refuse_problems(self) -> None:
        """Raise ValueError if there are problems."""
        if self.problems:
            shown = self.problems[:_MAX_SHOWN]
            if len(self.problems) > _MAX_SHOWN:
                shown.append(f"and {len(self.problems) - _MAX_SHOWN} more")
            raise ValueError("the file does not fit what into= names: " + "; ".join(shown))

    def refuse_short_records(self, sizes: list[int]) -> None:
        """Raise ValueError if there are problems, or if a record is too short for its tensor.
        `sizes` has the bytes of each record."""
        for path, _, file_tensor in self.tensors:
            index = restore.record_number_of(file_tensor)
            if index is not None and reach(file_tensor) > sizes[index]:
                self.problems.append(f"{path} is cut short in the file: {WAS_FREED}")
        self.refuse_problems()

    def new_tensors(self, sizes: list[int]) -> list[Tensor] | None:
        """Return the file's tensors that get new memory: those in `values` and in arguments of
        `calls`. `sizes` has the bytes of each record.

        Return None if the plan cannot be carried out straight from the records:

        - A tensor of the file wraps other tensors, is inside an object that is no container, or is
          longer than its record.
        - Targets share memory, and get different bytes.
        """
        if any(restore.record_number_of(file_tensor) is None for _, _, file_tensor in self.tensors):
            return None
        if _has_conflicting_overlaps(self.tensors):
            return None
        trees = [value for _, _, value in self.values]
        for call in self.calls:
            trees += call.trees
        if find_opaque_object_with_tensors(trees) is not None:
            return None
        new: list[Tensor] = []
        for leaf in _leaves(trees):
            if isinstance(leaf, (UntypedStorage, TypedStorage)):
                return None
            if isinstance(leaf, Tensor):
                if not _is_plain_view_of_record(leaf, sizes):
                    return None
                new.append(leaf)
        return new

    def finish(self) -> None:
        """Set the values and make the calls. All tensors must be filled before."""
        for container, key, value in self.values:
            container[key] = value
        for call in self.calls:
            try:
                call.function(call.argument)
            except Exception as error:
                where = f" ({call.path})" if call.path else ""
                error.add_note(f"What into= names is partly filled: this object{where} refused it.")
                raise


def _leaves(trees: list[Any]) -> Iterator[Any]:
    """Yield each object in the trees that is not a container, once. Walk attributes of containers
    and tensors too."""
    stack, seen = [*trees], set()
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, (*_CONTAINERS, Tensor)):
            stack.extend(attributes_of(node).values())
        if isinstance(node, _CONTAINERS):
            stack.extend(node)
            if isinstance(node, dict):
                stack.extend(node.values())
        else:
            yield node


def _has_conflicting_overlaps(tensors: list[tuple[str, Tensor, Tensor]]) -> bool:
    """Return whether some targets share memory, but get different bytes of the file.

    Such memory has to get the bytes of the last target in the tree, but records are not read in
    that order. Targets count as sharing memory if their address ranges overlap.
    """
    spans = [
        _memory_range_and_source(target, file_tensor)
        for _, target, file_tensor in tensors
        if type(target) in _PLAIN and target.numel()
    ]
    spans.sort(key=lambda span: span[:3])  # by device and address
    last_device, last_end = "", 0
    last_source: object = None
    for device, first, end, source in spans:
        if device == last_device:
            if first < last_end and source != last_source:
                return True
            last_end = max(last_end, end)
        else:
            last_end = end
        last_device, last_source = device, source
    return False


def _memory_range_and_source(target: Tensor, file_tensor: Tensor) -> tuple[str, int, int, object]:
    """Return the device, first byte and end of a target's memory, and the *source* of its bytes.

    If the sources of two targets are equal, an address in both gets the same byte of the file from
    both.
    """
    first = target.data_ptr()
    offset = int(target.storage_offset()) * target.element_size()
    end = first + reach(target) - offset
    # An address plus `distance` is the offset, in the record, of the byte that the address gets.
    distance = int(file_tensor.storage_offset()) * file_tensor.element_size() - first
    order: object = None  # of the elements; None if it is the same in the record
    if target.stride() != file_tensor.stride():
        order = (target.stride(), file_tensor.stride(), target.shape)
    sign = file_tensor.is_conj(), file_tensor.is_neg()
    source = (restore.record_number_of(file_tensor), distance, order, sign)
    return str(target.device), first, end, source


def _is_plain_view_of_record(file_tensor: Tensor, sizes: list[int]) -> bool:
    """Return whether a tensor of the file is a plain view of the bytes of one record."""
    if type(file_tensor) not in _PLAIN or not _is_strided(file_tensor) or file_tensor.is_quantized:
        return False
    index = restore.record_number_of(file_tensor)
    return index is not None and reach(file_tensor) <= sizes[index]


def match(into: Any, file_tree: Any) -> Plan:
    """Find which part of a file goes to which part of `into`, by its path in the two trees.

    All parts of `into` must be in the file; the file may have more. A value in a dictionary or list
    is replaced by the file's value if it is not a tensor, a container or an object with a
    state_dict. A container or object that is in `into` several times is filled once, from its first
    path.
    """
    plan = Plan()
    stack: list[tuple[str, Any, Any]] = [("", into, file_tree)]
    seen: set[int] = set()  # containers and objects that were visited
    while stack:
        path, node, file_node = stack.pop()
        if isinstance(node, Tensor):
            _match_tensor(plan, path or "the object itself", node, file_node)
            continue
        if id(node) in seen:
            continue
        seen.add(id(node))
        if stateful.is_stateful(node):
            _match_stateful(plan, path, node, file_node)
            continue
        for name, value in reversed(list(_items(node))):
            item_path = f"{path}.{name}" if path else str(name)
            try:
                file_value = _item(file_node, name)
            except (KeyError, IndexError, TypeError):
                plan.problems.append(f"{item_path} is not in the file")
                continue
            if _is_filled_in_place(value):
                stack.append((item_path, value, file_value))
            elif why := _why_not_replaced(value, file_value):
                plan.problems.append(f"{item_path} {why}")
            elif not isinstance(node, tuple):  # values in a tuple stay as they are
                plan.values.append((node, name, file_value))
    return plan


def _item(file_node: Any, name: Any) -> Any:
    """Return an item of a container in the file. Raise KeyError, IndexError or TypeError if there
    is no such item."""
    if isinstance(file_node, (Tensor, str, bytes)) or is_array(file_node):
        raise TypeError  # an index would be accepted, but these are no containers here
    if isinstance(file_node, dict) and name not in file_node:
        raise KeyError(name)  # a defaultdict would make an item
    return file_node[name]


def _is_filled_in_place(value: Any) -> bool:
    """Return whether a value is filled in place, at least in part. Otherwise the file's value
    replaces it."""
    if isinstance(value, tuple):
        return any(map(_is_filled_in_place, value))
    return isinstance(value, (dict, list, Tensor)) or stateful.is_stateful(value)


def _why_not_replaced(value: Any, file_value: Any) -> str:
    """Return why the file's value cannot replace `value` in the user's tree, or "" if it can."""
    if lacking := stateful.missing_method(value):
        return f"is a {type(value).__name__}, which cannot be filled: it has no {lacking}"
    is_data = value is None or type(value) in ATOMS or is_atom(value) or is_array(value)
    if is_data or type(value) is type(file_value) or isinstance(value, (*_CONTAINERS, bytearray)):
        return ""
    return f"is a {type(value).__name__}, which cannot be filled: it has no load_state_dict"


def _items(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the keys or indices of a container, with their values. Raise TypeError if `node` is no
    container."""
    if isinstance(node, dict):
        yield from node.items()
    elif isinstance(node, (list, tuple)):
        yield from enumerate(node)
    else:
        raise TypeError(
            "into= takes a tensor, an object with state_dict and load_state_dict, or dictionaries,"
            f" lists and tuples of them, not {type(node)!r}"
        )


def _match_stateful(plan: Plan, path: str, node: Any, file_value: Any) -> None:
    """Add the tensors and calls that fill an object with a state_dict."""
    filling = stateful.filling(path, node, file_value)
    plan.problems += filling.problems
    plan.calls += filling.calls
    for item_path, target, file_tensor in filling.pairs:
        _match_tensor(plan, item_path, target, file_tensor)


def _match_tensor(plan: Plan, path: str, target: Tensor, file_value: Any) -> None:
    """Add a tensor to the plan, or the problem why it cannot be filled."""
    if not isinstance(file_value, Tensor):
        plan.problems.append(f"{path} is a tensor, and {type(file_value).__name__} in the file")
    elif not (_is_strided(target) and _is_strided(file_value)):
        plan.problems.append(f"{path} is not strided")
    elif (target.shape, target.dtype) != (file_value.shape, file_value.dtype):
        plan.problems.append(
            f"{path} is {_type_and_shape(target)}, and {_type_and_shape(file_value)} in the file"
        )
    elif why := _why_not_written_to(target):
        plan.problems.append(f"{path} {why}")
    else:
        plan.tensors.append((path, target, file_value))


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _why_not_written_to(target: Tensor) -> str:
    """Return why the target cannot be written to, or "" if it can."""
    if target.is_meta:
        return "has no memory"
    if type(target) not in _PLAIN:
        return ""  # a subclass: its `copy_` raises if it cannot be written to
    if reach(target) > target.untyped_storage().nbytes():
        return "reaches beyond its memory: somebody has freed or shrunk that"
    if torch._debug_has_internal_overlap(target) == _OVERLAPS:
        return "is expanded: its elements share memory"
    return ""


def _type_and_shape(tensor: Tensor) -> str:
    """Return the type and shape for a message, such as "float32 (2, 3)"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def copy(plan: Plan) -> None:
    """Fill the targets by copying from tensors that were loaded. The caller then calls `finish`."""
    for _, target, file_tensor in plan.tensors:
        copy_tensor(target, file_tensor)


def copy_tensor(target: Tensor, file_tensor: Tensor) -> None:
    """Copy `file_tensor` to the target, unseen by autograd."""
    # Not `torch.no_grad()`: a Ctrl-C at the end of its block would leave gradients off for good.
    # detach() only if necessary, because it returns a copy of some kinds of tensors.
    if target.requires_grad:
        target = target.detach()
    target.copy_(file_tensor.detach())
