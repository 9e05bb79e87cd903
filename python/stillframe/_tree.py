"""A tree of containers and tensors: which storages are under it, and the same tree over others.

`Tree(root)` walks the tree once and numbers its storages; `rebuild` walks it again and puts tensors
over new storages into new containers. In between somebody copies the bytes. What belongs together
stays together: a storage is copied once, tensors over one storage are so again, a container or
tensor that stands at two places does so again.

What is walked into: dicts, lists, tuples and their subclasses (namedtuple, OrderedDict with its
attributes, defaultdict), deques, sets; tensors of every kind, storages, attributes of tensors.
NumPy arrays are copied. Every other object is left whole: the very same object is in the new tree.

Plain tensors are described by offset, size and stride. All others (sparse, quantized, nested,
subclasses) reduce themselves as they do for `torch.save`, and the storages in what they reduce to
are exchanged; wrapper subclasses that can be flattened (DTensor) are flattened.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import decimal
import enum
import fractions
import functools
import gc
import pathlib
import re
import struct
import sys
import types
import uuid
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.storage import TypedStorage, UntypedStorage
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stillframe import _device

_ROW = struct.Struct("=QQII")  # struct sfr_source: addr, nbytes, lane, device

# Objects nothing can change, or that nobody would call custom: they are not even mentioned.
_ATOMS: frozenset[type[Any]] = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, type, range, slice, type(...)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
        *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial),
        *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, uuid.UUID),
        *(decimal.Decimal, fractions.Fraction, re.Pattern),
    }
)
_ATOM_BASES = (type, enum.Enum, pathlib.PurePath, int, float, str, bytes, complex)
_PLAIN = (Tensor, Parameter)
_getstate = object.__getstate__


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Many thousand new objects, none of them garbage, would have the collector of garbage look
    through the whole process again and again: it took twice as long as making them."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _can_be_flattened(tensor: Tensor) -> bool:
    return bool(is_traceable_wrapper_subclass(tensor))


def _is_array(node: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(node, numpy.ndarray)


def _is_atom(node: object) -> bool:
    numpy = sys.modules.get("numpy")
    return isinstance(node, _ATOM_BASES) or (
        numpy is not None and isinstance(node, (numpy.generic, numpy.dtype))
    )


def _attributes(node: object) -> dict[str, Any]:
    return getattr(node, "__dict__", None) or {}


def _dict_of(state: Any) -> dict[str, Any]:
    """What somebody has hung onto a plain tensor, out of its state."""
    return state if isinstance(state, dict) else {}


class _Reduced:
    """A tensor that is made by calling a function, as pickle would."""

    __slots__ = ("args", "function", "state")

    def __init__(self, tensor: Tensor) -> None:
        reduced: Any = tensor.__reduce_ex__(2)  # type: ignore[no-untyped-call]
        self.function: Callable[..., Any] = reduced[0]
        self.args: tuple[Any, ...] = reduced[1]
        self.state: Any = reduced[2] if len(reduced) > 2 else None


class _Flattened:
    """A wrapper subclass, as its inner tensors and what it needs to be put together again."""

    __slots__ = ("context", "inner", "size", "stride", "tensor")

    def __init__(self, tensor: Any) -> None:
        names, self.context = tensor.__tensor_flatten__()
        self.inner = {name: getattr(tensor, name) for name in names}
        self.size, self.stride = tensor.size(), tensor.stride()
        self.tensor = tensor


class Tree:
    """The storages under a tree, and a way to make the tree again over others.

    Attributes:
        storages: The storages, each once; they are alive as long as this object.
        identities: Addresses of their StorageImpls.
        rows: One ``struct sfr_source`` for each, every lane 0. The address is 0 where a storage is
            neither in host memory nor on a CUDA device.
        elsewhere: Numbers of those.
        devices: Numbers of the CUDA devices that storages live on.
        reads_bytes: Whether making the tree anew looks at the copied bytes: what reduces itself
            may check them.
        left_whole: Objects that are neither containers nor tensors nor plain values, in the order
            in which they were met.
    """

    def __init__(self, root: object, *, lanes: bool = True) -> None:
        """With `lanes` False, storages on CUDA devices are "elsewhere" too."""
        self._root = root
        self._lanes = lanes
        self._places: set[int] = set()
        self.reads_bytes = False
        self.storages: list[UntypedStorage] = []
        self.identities: list[int] = []
        self.rows = bytearray()
        self.elsewhere: list[int] = []
        self.left_whole: list[object] = []
        self._number_of: dict[int, int] = {}
        # By id of the tensor: the number of a plain one's storage, or what another is made from. An
        # int is no work for the collector of garbage, of which there may be many thousand.
        self._tensors: dict[int, Any] = {}
        self._held: list[Tensor] = []  # an id is a tensor's as long as that lives
        with torch._C.DisableTorchFunction(), _no_collections():
            self._find(root)
        self.devices = tuple(sorted(place - 1 for place in self._places if place > 0))

    def _find(self, root: object) -> None:
        seen: set[int] = set()
        stack: list[Any] = [root]
        atoms, plain = _ATOMS, _PLAIN
        while stack:
            node = stack.pop()
            kind = type(node)
            if kind in plain:
                self._meet(node, stack)
                continue
            if kind in atoms or id(node) in seen:
                continue
            seen.add(id(node))
            inner = []
            for child in self._children(node, kind):
                if type(child) in plain:
                    self._meet(child, stack)
                else:
                    inner.append(child)
            inner.reverse()  # in the order of the tree: what was made so is copied so
            stack.extend(inner)

    def _children(self, node: Any, kind: type[Any]) -> Collection[Any]:
        if kind is dict:
            return tuple(node.values())
        if kind is list or kind is tuple:
            return tuple(node)
        if isinstance(node, Tensor):
            return self._meet_other(node)
        if isinstance(node, dict):
            return [*node.values(), *_attributes(node).values()]
        if isinstance(node, (list, tuple)):
            return [*node, *_attributes(node).values()]
        if isinstance(node, (set, frozenset, deque)):
            return list(node)
        if isinstance(node, (UntypedStorage, TypedStorage)):
            storage = node if isinstance(node, UntypedStorage) else node._untyped_storage
            self._enter(storage, _device.place_of(storage.device))
        elif not (_is_array(node) or _is_atom(node) or kind is bytearray):
            self.left_whole.append(node)
        return []

    def _meet(self, tensor: Tensor, stack: list[Any]) -> None:
        key = id(tensor)
        if key in self._tensors:
            return
        if tensor.layout is torch.strided and not (
            tensor.is_quantized or tensor.is_nested or tensor.is_meta
        ):
            self._held.append(tensor)
            self._tensors[key] = self._enter(
                tensor.untyped_storage(), _device.place_of_tensor(tensor)
            )
            state = _getstate(tensor)  # asking for __dict__ would make one
            if state is not None:
                stack.extend(_dict_of(state).values())
        else:
            stack.extend(self._meet_other(tensor))

    def _meet_other(self, tensor: Tensor) -> list[Any]:
        key = id(tensor)
        if key in self._tensors:
            return []
        self._held.append(tensor)
        if tensor.is_meta and type(tensor) in _PLAIN:
            self._tensors[key] = tensor  # it has no bytes
            return []
        if _can_be_flattened(tensor):
            flattened = _Flattened(tensor)
            self._tensors[key] = flattened
            return [*flattened.inner.values(), *_attributes(tensor).values()]
        reduced = _Reduced(tensor)
        self.reads_bytes = True
        self._tensors[key] = reduced
        return [*reduced.args, reduced.state]

    def _enter(self, storage: UntypedStorage, place: int) -> int:
        """The number of a storage, new or known; `place` as `_device.place_of` says it."""
        identity = storage._cdata
        number = self._number_of.get(identity)
        if number is None:
            number = self._number_of[identity] = len(self.storages)
            nbytes = storage.nbytes()
            self.storages.append(storage)
            self.identities.append(identity)
            if place > 0:
                if not self._lanes:
                    place = -1
                elif nbytes:
                    self._places.add(place)
            addr = storage.data_ptr() if place >= 0 and nbytes else 0
            self.rows += _ROW.pack(addr, nbytes, 0, max(place, 0))
            if place < 0:
                self.elsewhere.append(number)
        return number

    def sources(self) -> Iterator[tuple[int, int, int, int]]:
        """The rows as (address, bytes, lane, device)."""
        return _ROW.iter_unpack(self.rows)

    def nbytes(self) -> int:
        """Bytes of all storages."""
        return sum(nbytes for _, nbytes, _, _ in self.sources())

    def rebuild(
        self, memory: Any, offsets: list[int], *, identities: bool = False
    ) -> tuple[Any, list[int]]:
        """The tree over new host storages, and the addresses of their StorageImpls if wanted.

        Args:
            memory: An object with the buffer protocol that holds their bytes.
            offsets: Where each begins.

        Storages elsewhere are copied here, by torch.
        """
        # Inference mode would make tensors that cannot be used outside it.
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch._C.DisableTorchFunction(),
            _no_collections(),
        ):
            builder = _Builder(self._tensors, self._number_of, memory, offsets, self.rows)
            for number in self.elsewhere:
                builder.fetch(number, self.storages[number])
            built = builder.build(self._root)
            if self.reads_bytes:
                # torch lists sparse tensors that were made anew, which would keep the memory.
                torch._utils._validate_loaded_sparse_tensors()  # type: ignore[no-untyped-call]
            return built, builder.identities() if identities else []

    def num_tensors(self) -> int:
        """Distinct tensors of the tree; those inside others count too."""
        return len(self._tensors)

    def forget(self) -> None:
        """Lets go of the tree's tensors; the storages stay."""
        self._root = None
        self._tensors = {}
        self._held = []


class _Builder:
    def __init__(
        self,
        tensors: dict[int, Any],
        number_of: dict[int, int],
        memory: Any,
        offsets: list[int],
        rows: bytearray,
    ) -> None:
        self._tensors = tensors
        self._number_of = number_of
        self._memory = memory
        self._offsets = offsets
        self._nbytes = [row[1] for row in _ROW.iter_unpack(rows)]
        self._first: dict[int, Tensor] = {}  # a tensor over each new storage
        self._memo: dict[int, Any] = {}

    # ---- storages ----

    def storage(self, number: int) -> UntypedStorage:
        first = self._first.get(number)
        if first is None:
            count, dtype = self._nbytes[number], torch.uint8
            if count == 0:  # a buffer without bytes is refused
                first = torch.empty(0, dtype=dtype, device="cpu")
            else:
                offset = self._offsets[number]
                first = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset)
            self._first[number] = first
        return first.untyped_storage()

    def fetch(self, number: int, storage: UntypedStorage) -> None:
        """Copies a storage of another device."""
        source = torch.empty(0, dtype=torch.uint8, device=storage.device)
        source.set_(storage)
        target = torch.empty(0, dtype=torch.uint8, device="cpu")
        target.set_(self.storage(number))
        target.copy_(source)

    def identities(self) -> list[int]:
        """Addresses of the new StorageImpls, 0 for one that no tensor is over."""
        first = self._first
        return [
            first[number].untyped_storage()._cdata if number in first else 0
            for number in range(len(self._nbytes))
        ]

    # ---- tensors ----

    def _tensor(self, tensor: Tensor) -> Tensor:
        known = self._memo.get(id(tensor))
        if known is not None:
            return known  # type: ignore[no-any-return]
        found = self._tensors.get(id(tensor))
        if found is None:
            raise RuntimeError("a tensor came into the tree while it was copied")
        if type(found) is int:
            new = self._memo[id(tensor)] = self._plain(tensor, found)
            state = _getstate(tensor)
            if state is not None:
                attributes = _dict_of(state).items()
                new.__dict__.update({name: self.build(value) for name, value in attributes})
            return new
        if type(found) is _Flattened:
            new = self._flattened(found)
        elif type(found) is _Reduced:
            new = self._reduced(found)
        else:
            new = tensor
        self._memo[id(tensor)] = new
        return new

    def _plain(self, tensor: Tensor, number: int) -> Tensor:
        dtype, size = tensor.dtype, tensor.size()
        count, nbytes = tensor.numel(), self._nbytes[number]
        if (
            nbytes
            and count * dtype.itemsize == nbytes
            and number not in self._first
            and tensor.is_contiguous()
        ):
            new = self._first[number] = torch.frombuffer(
                self._memory, dtype=dtype, count=count, offset=self._offsets[number]
            )
            if len(size) != 1:
                new.as_strided_(size, tensor.stride())
        else:
            new = torch.empty(0, dtype=dtype, device="cpu")
            new.set_(self.storage(number), tensor.storage_offset(), size, tensor.stride())
        if tensor.is_conj():
            torch._C._set_conj(new, True)
        if tensor.is_neg():
            torch._C._set_neg(new, True)
        if type(tensor) is Parameter:
            return Parameter(new, tensor.requires_grad)
        if tensor.requires_grad:
            new.requires_grad_(True)
        return new

    def _flattened(self, found: _Flattened) -> Tensor:
        inner = {name: self.build(part) for name, part in found.inner.items()}
        kind: Any = type(found.tensor)
        new: Tensor = kind.__tensor_unflatten__(inner, found.context, found.size, found.stride)
        for name, value in _attributes(found.tensor).items():
            if name not in _attributes(new):
                new.__dict__[name] = self.build(value)
        if found.tensor.requires_grad != new.requires_grad and new.is_leaf:
            new.requires_grad_(found.tensor.requires_grad)
        return new

    def _reduced(self, found: _Reduced) -> Tensor:
        args = [self.build(arg) for arg in found.args]
        with warnings.catch_warnings():  # torch's own functions use its deprecated TypedStorage
            warnings.simplefilter("ignore", UserWarning)
            new: Any = found.function(*args)
        if found.state is not None:
            state = self.build(found.state)
            if hasattr(type(new), "__setstate__"):
                new.__setstate__(state)
            else:
                torch._utils._set_obj_state(new, state)  # type: ignore[no-untyped-call]
        return new  # type: ignore[no-any-return]

    # ---- the rest of the tree ----

    def build(self, node: Any) -> Any:
        kind = type(node)
        if kind in _PLAIN:
            return self._tensor(node)
        if kind in _ATOMS:
            return node
        key = id(node)
        if key in self._memo:
            return self._memo[key]
        new: Any
        if kind is dict:
            new = self._memo[key] = {}
            self._fill(new, node)
        elif kind is list:
            new = self._memo[key] = []
            new.extend([self.build(value) for value in node])
        elif isinstance(node, Tensor):
            return self._tensor(node)
        elif isinstance(node, tuple):
            new = self._tuple(node, kind)
            self._memo[key] = new
        elif isinstance(node, (dict, list, deque, set)):
            new = self._container(node)
        elif isinstance(node, UntypedStorage):
            new = self._memo[key] = self.storage(self._number_of[node._cdata])
        elif isinstance(node, TypedStorage):
            storage = self.storage(self._number_of[node._untyped_storage._cdata])
            new = TypedStorage(wrap_storage=storage, dtype=node.dtype, _internal=True)  # type: ignore[no-untyped-call]
            self._memo[key] = new
        elif _is_array(node) or kind is bytearray:
            new = self._memo[key] = node.copy()
        else:
            new = node
        return new

    def _fill(self, new: dict[Any, Any], node: dict[Any, Any]) -> None:
        build = self.build
        for name, value in list(node.items()):
            dict.__setitem__(new, name, build(value))

    def _tuple(self, node: tuple[Any, ...], kind: type[Any]) -> Any:
        parts = [self.build(value) for value in node]
        attributes = _attributes(node)
        if not attributes and all(map(_same, parts, node)):
            return node
        if kind is tuple:
            return tuple(parts)
        try:
            new: Any = tuple.__new__(kind, parts)
        except TypeError:  # a struct sequence of C
            new = kind(parts)
        if attributes:
            new.__dict__.update({name: self.build(value) for name, value in attributes.items()})
        return new

    def _container(self, node: Any) -> Any:
        """A container other than a plain dict, list or tuple: emptied of the old parts, filled with
        new ones."""
        kind = type(node)
        if kind is OrderedDict:
            new: Any = OrderedDict()
        elif kind is defaultdict:
            new = defaultdict(node.default_factory)
        elif kind is set:
            new = self._memo[id(node)] = set()
            new.update([self.build(value) for value in node])
            return new
        else:
            new = copy.copy(node)
            if type(new) is not kind or new is node:
                return node
        self._memo[id(node)] = new
        if isinstance(node, dict):
            for name, value in list(node.items()):
                # OrderedDict keeps its order in its own __setitem__.
                if kind is OrderedDict:
                    new[name] = self.build(value)
                else:
                    dict.__setitem__(new, name, self.build(value))
        else:
            parts = [self.build(value) for value in node]
            if isinstance(node, list):
                list.__setitem__(new, slice(None), parts)
            elif isinstance(node, deque):
                for place, part in enumerate(parts):
                    deque.__setitem__(new, place, part)
            else:
                new.clear()
                new.update(parts)
        attributes = _attributes(node)
        if attributes:
            new.__dict__.update({name: self.build(value) for name, value in attributes.items()})
        return new


def _same(one: object, other: object) -> bool:
    return one is other


def paths(root: object, wanted: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Key paths (``optimizer_states.0.state``) of the objects in a tree that are `wanted`, each at
    its first place, with the object. Containers are walked as `Tree` does."""
    seen: set[int] = set()
    stack: list[tuple[str, Any]] = [("", root)]
    while stack:
        path, node = stack.pop()
        if wanted(node) and id(node) not in seen:
            seen.add(id(node))
            yield path.removeprefix("."), node
            continue
        if not isinstance(node, (dict, list, tuple, set, frozenset, deque)) or id(node) in seen:
            continue
        seen.add(id(node))
        pairs = node.items() if isinstance(node, dict) else enumerate(node)
        stack.extend(reversed([(f"{path}.{name}", value) for name, value in pairs]))
