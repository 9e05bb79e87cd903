"""Rebuilds a tree over other storages, after `walk.Tree` has found its storages and tensors.

`TreeBuilder.build` walks the tree as `Tree` did and makes each container and each tensor once. The
new plain tensors exist already, made by C code. `build` only puts them into the new containers.
"""

from __future__ import annotations

import copy
import copyreg
import datetime
import decimal
import enum
import fractions
import functools
import operator
import pathlib
import re
import sys
import types
import uuid
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.storage import TypedStorage, UntypedStorage

from stillframe import _core

# Types whose objects the walk does not enter: the new tree has the very same objects.
ATOMS: frozenset[type[Any]] = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, type, range, slice, type(...)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
        *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial),
        *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, uuid.UUID),
        *(decimal.Decimal, fractions.Fraction, re.Pattern),
    }
)
# The walk does not enter instances of these types and of their subclasses either.
ATOM_BASES = (type, enum.Enum, pathlib.PurePath, int, float, str, bytes, complex)
PLAIN = (Tensor, Parameter)  # tensors of exactly these types need no code of a subclass

getstate = object.__getstate__  # returns a tensor's attributes; None if it has none


def is_array(node: object) -> bool:
    """Return whether a node is a NumPy array. It is none if no code has imported NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(node, numpy.ndarray)


def is_atom(node: object) -> bool:
    """Return whether the walk does not enter a node for a reason other than `ATOMS`."""
    numpy = sys.modules.get("numpy")
    return isinstance(node, ATOM_BASES) or (
        numpy is not None and isinstance(node, (numpy.generic, numpy.dtype))
    )


def attributes_of(node: object) -> dict[str, Any]:
    return getattr(node, "__dict__", None) or {}


def attributes_from_state(state: Any) -> dict[str, Any]:
    """Return the attributes that users have set on a plain tensor, from `state = getstate(it)`."""
    return state if isinstance(state, dict) else {}


_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_WITH_BYTES = (Tensor, UntypedStorage, TypedStorage)


def _slot_values_of(node: object) -> list[Any]:
    names = copyreg._slotnames(type(node))  # type: ignore[attr-defined]
    return [getattr(node, name) for name in names if hasattr(node, name)]


def find_opaque_object_with_tensors(parts: list[Any], opaque: Any = None) -> object | None:
    """Return an *opaque* object that has tensors inside, or None.

    The walk does not enter an opaque object: the new tree has the same object, and would keep the
    memory of the old tensors in it. The search enters containers and attributes at any depth.

    Args:
        parts: The parts of a tensor.
        opaque: The opaque object that holds all `parts`, if there is one.
    """
    # Nodes to search, each with the outermost opaque object that holds it, or None.
    stack: list[tuple[Any, Any]] = [(part, opaque) for part in parts]
    seen: set[int] = set()
    while stack:
        node, holder = stack.pop()
        if isinstance(node, _WITH_BYTES):
            if holder is not None:
                return holder  # type: ignore[no-any-return]
            continue
        if id(node) in seen or type(node) in ATOMS or is_atom(node) or is_array(node):
            continue
        seen.add(id(node))
        inner = list(attributes_of(node).values())
        if isinstance(node, _CONTAINERS):
            inner += node.values() if isinstance(node, dict) else node
        else:
            holder = node if holder is None else holder
            inner += _slot_values_of(node)
        stack.extend((each, holder) for each in inner)
    return None


def reach(tensor: Tensor) -> int:
    """Return the offset in bytes at which the last element of a strided tensor ends."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    return int(last + 1) * tensor.element_size()


class Reduced:
    """The function, arguments and state from which a pickle would make a tensor."""

    __slots__ = ("args", "function", "state")

    def __init__(self, tensor: Tensor) -> None:
        reduced: Any = tensor.__reduce_ex__(2)  # type: ignore[no-untyped-call]
        self.function: Callable[..., Any] = reduced[0]
        self.args: tuple[Any, ...] = reduced[1]
        self.state: Any = reduced[2] if len(reduced) > 2 else None


class Flattened:
    """The inner tensors of a tensor of a wrapper subclass, and the context with which
    `__tensor_unflatten__` puts it together again."""

    __slots__ = ("context", "inner", "size", "stride", "tensor")

    def __init__(self, tensor: Any) -> None:
        names, self.context = tensor.__tensor_flatten__()
        self.inner = {name: getattr(tensor, name) for name in names}
        self.size, self.stride = tensor.size(), tensor.stride()
        self.tensor = tensor


class TreeBuilder:
    """Rebuilds one tree.

    Args:
        memo: id of an old object -> the new object. Has the new objects that exist already; `build`
            adds the others.
        tensor_of: For each storage, by number, a new tensor over it; None if there is none yet.
        views: id of an old tensor that is a plain view of a storage -> the storage's number.
        others: id of any other old tensor -> what the new one is made from. A Tensor here is the
            old tensor, which the new tree keeps.
        numbers: Numbers of the old storages, by the addresses of their StorageImpls.
        memory: An object with the buffer protocol that holds the bytes of the new storages.
        offsets, nbytes: Where each new storage is in `memory`, and its length.
    """

    def __init__(
        self,
        memo: dict[int, Any],
        tensor_of: list[Tensor | None],
        views: dict[int, int],
        others: dict[int, Flattened | Reduced | Tensor],
        numbers: _core.Numbers,
        memory: Any,
        offsets: list[int],
        nbytes: Sequence[int],
    ) -> None:
        self._memo = memo
        self._tensor_of = tensor_of
        self._views = views
        self._others = others
        self._numbers = numbers
        self._memory = memory
        self._offsets = offsets
        self._nbytes = nbytes

    # ---- storages ----

    def storage(self, number: int) -> UntypedStorage:
        """Return the new storage of this number. Make it over `memory` at the first call."""
        tensor = self._tensor_of[number]
        if tensor is None:
            count, dtype = self._nbytes[number], torch.uint8
            if count == 0:  # torch refuses a buffer without bytes
                tensor = torch.empty(0, dtype=dtype, device="cpu")
            else:
                offset = self._offsets[number]
                tensor = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset)
            self._tensor_of[number] = tensor
        return tensor.untyped_storage()

    def _new_storage(self, old: UntypedStorage) -> UntypedStorage:
        """Return the new storage for an old one, or raise KeyError if the walk did not find it."""
        number = self._numbers.get(old._cdata)
        if number is None:
            raise KeyError(old._cdata)
        return self.storage(number)

    def copy_storage(self, number: int, storage: UntypedStorage) -> None:
        """Copy the bytes of an old storage, which is not on the CPU, into the new storage."""
        source = torch.empty(0, dtype=torch.uint8, device=storage.device)
        source.set_(storage)
        target = torch.empty(0, dtype=torch.uint8, device="cpu")
        target.set_(self.storage(number))
        target.copy_(source)

    def address(self) -> int:
        """Return the address of `memory`; 0 if no new tensor has bytes."""
        rows = zip(self._tensor_of, self._offsets, self._nbytes, strict=True)
        for tensor, offset, nbytes in rows:
            if tensor is not None and nbytes:
                return tensor.untyped_storage().data_ptr() - offset
        return 0

    # ---- tensors ----

    def _rebuild_tensor(self, tensor: Tensor) -> Tensor:
        number = self._views.get(id(tensor))
        if number is None:
            return self._rebuild_non_view_tensor(tensor)
        nbytes = self._nbytes[number]
        if nbytes and reach(tensor) > nbytes:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} reaches beyond its memory, which somebody"
                f" has shrunk to {nbytes} bytes: it cannot be copied; async_save can save it"
            )
        new = torch.empty(0, dtype=tensor.dtype, device="cpu")
        new.set_(self.storage(number), tensor.storage_offset(), tensor.size(), tensor.stride())
        if not nbytes:
            # FSDP frees the memory of gathered parameters. The new storage must be empty too, but
            # set_ has grown it to the tensor's size.
            new.untyped_storage().resize_(0)
        if tensor.dtype.is_complex and tensor.is_conj():
            torch._C._set_conj(new, True)
        if tensor.is_neg():
            torch._C._set_neg(new, True)
        if type(tensor) is Parameter:
            new = Parameter(new, tensor.requires_grad)
        elif tensor.requires_grad:
            new.requires_grad_(True)
        self._memo[id(tensor)] = new
        state = getstate(tensor)  # reading __dict__ would create a dict for every tensor
        if state is not None:
            attributes = attributes_from_state(state).items()
            new.__dict__.update({name: self.build(value) for name, value in attributes})
        return new

    def _rebuild_non_view_tensor(self, tensor: Tensor) -> Tensor:
        """Return the new tensor for an old one that is not in `views`."""
        parts = self._others.get(id(tensor))
        if parts is None:  # another thread has changed the tree
            raise RuntimeError("a tensor came into the tree while it was copied")
        if isinstance(parts, Flattened):
            new = self._rebuild_flattened(parts)
        elif isinstance(parts, Reduced):
            new = self._rebuild_reduced(parts)
        else:
            new = tensor  # a tensor without bytes
        self._memo[id(tensor)] = new
        return new

    def _rebuild_flattened(self, parts: Flattened) -> Tensor:
        """Return a new tensor of a wrapper subclass, around new inner tensors."""
        old = parts.tensor
        inner = {name: self.build(part) for name, part in parts.inner.items()}
        kind: Any = type(old)
        new: Tensor = kind.__tensor_unflatten__(inner, parts.context, parts.size, parts.stride)
        for name, value in attributes_of(old).items():
            if name not in attributes_of(new):
                new.__dict__[name] = self.build(value)
        if old.requires_grad != new.requires_grad and new.is_leaf:  # only leaves allow it
            new.requires_grad_(old.requires_grad)
        return new

    def make_dtensors(
        self,
        kind: Any,
        wrapped: dict[int, tuple[Any, Tensor]],
        with_attributes: list[tuple[Any, dict[str, Any]]],
    ) -> None:
        """Make DTensors over the new local tensors. They share the old DTensors' specifications,
        which never change.

        Args:
            kind: The class DTensor, or None if there are no DTensors.
            wrapped: id of an old DTensor -> (the old DTensor, its local tensor).
            with_attributes: DTensors on which users have set attributes, with these attributes.
        """
        memo = self._memo
        # Call only __new__: __init__ does nothing, but its wrapper costs more than all the rest.
        make: Any = getattr(kind, "__new__", None)  # not called if `kind` is None
        for key, (old, local) in wrapped.items():
            new_local = memo.get(id(local))
            if new_local is None:
                new_local = self.build(local)
            memo[key] = make(kind, new_local, old._spec, requires_grad=old.requires_grad)
        for old, attributes in with_attributes:
            new = memo[id(old)]
            new.__dict__.update({name: self.build(value) for name, value in attributes.items()})

    def _rebuild_reduced(self, reduced: Reduced) -> Tensor:
        """Return a new tensor, made as by an unpickler, but from new arguments and a new state."""
        args = [self.build(arg) for arg in reduced.args]
        with warnings.catch_warnings():  # torch's own functions use its deprecated TypedStorage
            warnings.simplefilter("ignore", UserWarning)
            new: Any = reduced.function(*args)
        if reduced.state is not None:
            state = self.build(reduced.state)
            if hasattr(type(new), "__setstate__"):
                new.__setstate__(state)
            else:
                torch._utils._set_obj_state(new, state)  # type: ignore[no-untyped-call]
        return new  # type: ignore[no-any-return]

    # ---- the rest of the tree ----

    def build(self, node: Any) -> Any:
        """Return the new object for an old one. C code makes plain dicts and lists."""
        return _core.rebuilt(node, self._memo, self._rebuild_non_plain_node)

    def _rebuild_non_plain_node(self, node: Any) -> Any:
        """Return the new object for anything that is no plain dict or list."""
        kind = type(node)
        if kind in ATOMS:
            return node
        key = id(node)
        new: Any
        if isinstance(node, Tensor):
            return self._rebuild_tensor(node)
        if isinstance(node, tuple):
            new = self._rebuild_tuple(node, kind)
            self._memo[key] = new
        elif isinstance(node, (dict, list, deque, set)):
            new = self._rebuild_container(node)
        elif isinstance(node, UntypedStorage):
            new = self._memo[key] = self._new_storage(node)
        elif isinstance(node, TypedStorage):
            storage = self._new_storage(node._untyped_storage)
            new = TypedStorage(wrap_storage=storage, dtype=node.dtype, _internal=True)  # type: ignore[no-untyped-call]
            self._memo[key] = new
        elif is_array(node) or kind is bytearray:
            new = self._memo[key] = node.copy()
        else:
            new = node
        return new

    def _rebuild_tuple(self, node: tuple[Any, ...], kind: type[Any]) -> Any:
        parts = [self.build(value) for value in node]
        attributes = attributes_of(node)
        if not attributes and all(map(operator.is_, parts, node)):
            return node  # no part is new, so the same tuple will do
        if kind is tuple:
            return tuple(parts)
        try:
            new: Any = tuple.__new__(kind, parts)
        except TypeError:  # a struct sequence, such as time.struct_time
            new = kind(parts)
        if attributes:
            new.__dict__.update({name: self.build(value) for name, value in attributes.items()})
        return new

    def _rebuild_container(self, node: Any) -> Any:
        """Return a copy, with new parts, of a container that is not a plain dict, list or tuple."""
        kind = type(node)
        if kind is OrderedDict:
            new: Any = OrderedDict()
        elif kind is defaultdict:
            new = defaultdict(node.default_factory)
        elif kind is set:  # needs none of the steps below
            new = self._memo[id(node)] = set()
            new.update([self.build(value) for value in node])
            return new
        else:  # a subclass: copy the object; its parts are replaced below
            new = copy.copy(node)
            if type(new) is not kind or new is node:  # an unusual subclass: keep the old object
                return node
        self._memo[id(node)] = new
        if isinstance(node, dict):
            for name, value in list(node.items()):
                # A subclass may override __setitem__, so call dict's own method. OrderedDict needs
                # its own method, which records the order.
                if kind is OrderedDict:
                    new[name] = self.build(value)
                else:
                    dict.__setitem__(new, name, self.build(value))
        else:
            parts = [self.build(value) for value in node]
            if isinstance(node, list):
                list.__setitem__(new, slice(None), parts)
            elif isinstance(node, deque):
                for index, part in enumerate(parts):
                    deque.__setitem__(new, index, part)
            else:  # a subclass of set
                new.clear()
                new.update(parts)
        attributes = attributes_of(node)
        if attributes:
            new.__dict__.update({name: self.build(value) for name, value in attributes.items()})
        return new
