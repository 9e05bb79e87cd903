"""The contents of a checkpoint's pickle: its tensors and its other values, by key path.

The pickle is read into stubs (`_tree/keypaths.py`), so nothing is imported or called. This works
without the pickled classes, and without torch.
"""

from __future__ import annotations

import contextlib
import math
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

from stillframe._check import pickles
from stillframe._tree import keypaths
from stillframe._tree.keypaths import Storage, Stub

# The functions of torch that a pickle calls to make tensors and parameters.
_TENSORS = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_qtensor")
_PARAMETERS = ("_rebuild_parameter", "_rebuild_parameter_with_state")
_PLAIN_TYPES = (str, bytes, int, float, complex, bool, type(None))
# While a pickle of n bytes is read, the process may take _BASE_MEMORY + _MEMORY_PER_BYTE * n bytes
# of new memory. Pickles of tensors take a fifth of that.
_BASE_MEMORY = 256 << 20
_MEMORY_PER_BYTE = 64


class Tensor(NamedTuple):
    """A tensor as a pickle describes it."""

    path: str
    kind: str  # such as "parameter"
    dtype: str
    shape: tuple[int, ...]
    device: str
    nbytes: int  # of all elements
    storage: str  # the key of the storage
    storage_nbytes: int


class NonTensorValue(NamedTuple):
    """A value that is not a tensor."""

    kind: str  # the name of its type


_Path: TypeAlias = "tuple[_Path, str] | None"  # (the parent's path, the last part)


def read(file: IO[bytes], *, legacy: bool = False) -> Any:
    """Return the object of a pickle as `pickles.read` does, with a limit on its memory."""
    return pickles.read(file, legacy=legacy, bound=bounded)


@contextlib.contextmanager
def bounded(nbytes: int) -> Iterator[None]:
    """Limit the process's new memory inside the block, for a pickle of `nbytes` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    # The sixth field: the size of the process's data and stack, in pages.
    in_use = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    limit = in_use + _BASE_MEMORY + _MEMORY_PER_BYTE * nbytes
    if soft == resource.RLIM_INFINITY or limit < soft:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def walk(root: Any) -> Iterator[Tensor | NonTensorValue]:
    """Yield every tensor and value in a tree once, in the tree's order."""
    seen: set[int] = set()
    stack: list[tuple[_Path, Any]] = [(None, root)]
    while stack:
        path, node = stack.pop()
        if isinstance(node, _PLAIN_TYPES):
            yield NonTensorValue(type(node).__name__)
            continue
        if isinstance(node, type):  # a class or function that the pickle names
            yield NonTensorValue(getattr(node, "_name", "type"))
            continue
        if id(node) in seen and not isinstance(node, Storage):  # a storage is shown at each path
            continue
        seen.add(id(node))
        tensor = _as_tensor(node)
        if tensor is not None:
            yield tensor._replace(path=_joined(path))
            continue
        if isinstance(node, Storage):  # of an unknown kind
            yield NonTensorValue("storage")
            continue
        # An OrderedDict is a container: only its items are shown.
        if isinstance(node, Stub) and node._name != "collections.OrderedDict":
            yield NonTensorValue(node._name.removeprefix("__builtin__."))
        parts: list[tuple[_Path, Any]] = []
        for suffix, child in keypaths.children(node):
            if suffix:
                parts.append(((path, suffix), child))
            elif isinstance(child, (Stub, Storage, dict, list, tuple)):
                # A child without a name, such as the argument of a stub, has the path of its
                # parent. A plain value without a name is left out.
                parts.append((path, child))
        stack.extend(reversed(parts))


def _joined(path: _Path) -> str:
    """Return a path as text. (Joining every path of a deep tree would take too long.)"""
    parts: list[str] = []
    while path is not None:
        path, part = path
        parts.append(part)
    return "".join(reversed(parts)).removeprefix(".")


def _as_tensor(node: Any) -> Tensor | None:
    """Return the tensor that a node describes, without its path, or None."""
    if not isinstance(node, (Storage, Stub)):
        return None
    try:
        if isinstance(node, Storage):
            return _tensor("storage", node, (node.numel,), None)
        function = node._name.rpartition(".")[2]
        if function in _PARAMETERS:
            inner = _as_tensor(node.args[0])
            return None if inner is None else inner._replace(kind="parameter")
        if function == "_rebuild_from_type_v2":  # makes a tensor, then changes its class
            rebuild_function, tensor_class, rebuild_args = node.args[:3]
            call = Stub(*rebuild_args)
            call._name = rebuild_function._name
            inner = _as_tensor(call)
            return None if inner is None else inner._replace(kind=tensor_class._name)
        if function in _TENSORS:
            storage, _, size = node.args[:3]
            dtype = node.args[6] if function == "_rebuild_tensor_v3" else None
            kind = "quantized" if function == "_rebuild_qtensor" else "tensor"
            return _tensor(kind, storage, size, dtype)
    except (AttributeError, IndexError, TypeError, ValueError):
        pass  # the node has other arguments than torch writes
    return None


def _tensor(kind: str, storage: Storage, size: Any, dtype: Any) -> Tensor:
    """Return a tensor without its path. If `dtype` is None, the storage's class tells the dtype.
    Raise an error for a size that no tensor has."""
    dtype_name, storage_itemsize = pickles.dtype(storage.kind)
    itemsize = storage_itemsize
    if dtype is not None:
        dtype_name, itemsize = pickles.dtype(dtype._name)
    shape = tuple(map(int, size.args[0] if isinstance(size, Stub) else size))
    nbytes, storage_nbytes = math.prod(shape) * itemsize, int(storage.numel) * storage_itemsize
    if min(shape, default=0) < 0:
        raise ValueError("no size is negative")
    if not 0 <= max(nbytes, storage_nbytes) < pickles.MOST_BYTES:
        raise ValueError("no memory is that large")
    location, key = str(storage.location), str(storage.key)
    return Tensor("", kind, dtype_name, shape, location, nbytes, key, storage_nbytes)
