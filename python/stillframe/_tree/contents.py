"""What is in a checkpoint's pickle: its tensors and the other values, by key path.

The pickle is read by `keypaths`' stubs: nothing that it names is imported or called, so it is safe
on any file and works without the classes.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch import serialization

from stillframe._tree import keypaths
from stillframe._tree.keypaths import Storage, Stub

_TENSORS = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_qtensor")
_PARAMETERS = ("_rebuild_parameter", "_rebuild_parameter_with_state")
_PLAIN = (str, bytes, int, float, complex, bool, type(None))


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as a pickle describes it; `nbytes` is of its elements, `storage` a record's key."""

    path: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    device: str
    nbytes: int
    storage: str
    storage_nbytes: int


@dataclass(frozen=True, slots=True)
class Value:
    """Anything else; `kind` is its type's name."""

    path: str
    kind: str


def read(file: IO[bytes], *, legacy: bool = False) -> Any:
    """The object of a pickle, made of stubs; of the legacy format the fourth is it.

    Raises:
        pickle.UnpicklingError: It is none, or it is cut.
    """
    try:
        for _ in range(3 if legacy else 0):
            keypaths.Reader(file).load()
        return keypaths.Reader(file).load()
    except MemoryError:
        raise
    except Exception as error:  # damaged pickles raise nearly anything
        raise pickle.UnpicklingError(f"its pickle cannot be read: {error}") from None


def walk(root: Any) -> Iterator[Tensor | Value]:
    """Everything in the tree once, in its order; containers themselves are not told."""
    seen: set[int] = set()
    stack: list[tuple[str, Any]] = [("", root)]
    while stack:
        path, node = stack.pop()
        name = path.removeprefix(".")
        if isinstance(node, _PLAIN):
            yield Value(name, type(node).__name__)
            continue
        if isinstance(node, type):
            yield Value(name, getattr(node, "_name", "type"))
            continue
        if id(node) in seen and not isinstance(node, Storage):
            continue
        seen.add(id(node))
        if (tensor := _as_tensor(name, node)) is not None:
            yield tensor
            continue
        if isinstance(node, Storage):
            yield Value(name, "storage")
            continue
        if isinstance(node, Stub) and node._name != "collections.OrderedDict":
            yield Value(name, node._name.removeprefix("__builtin__."))
        children = keypaths.children(node)
        stack.extend(
            reversed(
                [
                    (path + suffix, child)
                    for suffix, child in children
                    if suffix or isinstance(child, (Stub, Storage, dict, list, tuple))
                ]
            )
        )


def _as_tensor(path: str, node: Any) -> Tensor | None:
    """The node as a tensor, if it is one."""
    if not isinstance(node, (Storage, Stub)):
        return None
    try:
        if isinstance(node, Storage):
            return _tensor(path, "storage", node, (node.numel,), None)
        function = node._name.rpartition(".")[2]
        if function in _PARAMETERS:
            inner = _as_tensor(path, node.args[0])
            return inner and _renamed(inner, "parameter")
        if function == "_rebuild_from_type_v2":
            made = Stub(*node.args[2])
            made._name = node.args[0]._name
            inner = _as_tensor(path, made)
            return inner and _renamed(inner, node.args[1]._name)
        if function in _TENSORS:
            storage, _, size = node.args[:3]
            dtype = node.args[6] if function == "_rebuild_tensor_v3" else None
            kind = "quantized" if function == "_rebuild_qtensor" else "tensor"
            return _tensor(path, kind, storage, size, dtype)
    except (AttributeError, IndexError, TypeError, ValueError):
        pass  # not as torch writes it: it is shown as the call that it is
    return None


def _renamed(tensor: Tensor, kind: str) -> Tensor:
    return Tensor(tensor.path, kind, *[getattr(tensor, name) for name in Tensor.__slots__[2:]])


def _tensor(path: str, kind: str, storage: Storage, size: Any, dtype: Any) -> Tensor:
    name = storage.kind if dtype is None else dtype._name
    type_of_storage = _dtype(storage.kind)
    type_of_it = _dtype(name)
    shape = tuple(int(extent) for extent in (size.args[0] if isinstance(size, Stub) else size))
    return Tensor(
        path,
        kind,
        str(type_of_it).removeprefix("torch."),
        shape,
        str(storage.location),
        math.prod(shape) * type_of_it.itemsize,
        str(storage.key),
        int(storage.numel) * type_of_storage.itemsize,
    )


def _dtype(name: str) -> torch.dtype:
    """The type of a storage's class, or of the name of one: ``torch.FloatStorage``, ``torch.int8``.

    Raises:
        ValueError: There is none.
    """
    name = name.rpartition(".")[2]
    if name == "UntypedStorage":
        return torch.uint8
    found = getattr(torch, name, None)
    if isinstance(found, torch.dtype):
        return found
    try:
        return serialization.StorageType(name).dtype  # type: ignore[no-any-return, no-untyped-call]
    except KeyError:
        raise ValueError(f"there is no type {name}") from None
