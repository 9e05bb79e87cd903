"""The contents of a checkpoint's pickle: its tensors and the other values, by key path.

The pickle is read by `keypaths`' stubs: nothing that it names is imported or called. So this is
safe on any file and works without the classes. torch is not needed either, because the names of its
types give their sizes.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import pickle
import re
import resource
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

from stillframe import _core
from stillframe._base import records
from stillframe._tree import keypaths
from stillframe._tree.keypaths import Storage, Stub

_TENSORS = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_qtensor")
_PARAMETERS = ("_rebuild_parameter", "_rebuild_parameter_with_state")
_PLAIN = (str, bytes, int, float, complex, bool, type(None))
_MOST_BYTES = 1 << 63
# Bytes of memory a pickle may always take, and for each of its bytes; a tensor takes a fifth of it.
_ALWAYS, _FOR_A_BYTE = 256 << 20, 64
_STORAGES = {  # torch's storage classes, and the types of their elements
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "BFloat16Storage": "bfloat16",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "QUInt8Storage": "quint8",
    "QInt8Storage": "qint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": "uint8",
}
# Matches float32, bits2x4, float8_e4m3fn, float4_e2m1fn_x2. Types narrower than a byte are packed
# into one or fill one.
_DTYPE = re.compile(
    r"(?:b?float|complex|q?u?int|bits)(\d{1,3})(?:_e\d+m\d+[a-z]*)?(?:_?x\d)?", re.ASCII
)


class Tensor(NamedTuple):
    """A tensor as a pickle describes it; `nbytes` counts its elements, `storage` is a record's
    key."""

    path: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    device: str
    nbytes: int
    storage: str
    storage_nbytes: int


class Value(NamedTuple):
    """A value that is not a tensor; `kind` is its type's name."""

    kind: str


# The errors of zipfile for archives that it cannot read.
UNZIPPABLE = (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, EOFError)

_Path: TypeAlias = "tuple[_Path, str] | None"  # (the parent's path, the last part)


def read(file: IO[bytes], *, legacy: bool = False) -> Any:
    """Return the object of a pickle, made of stubs.

    In the legacy format the object is in the fourth pickle.

    Raises:
        pickle.UnpicklingError: It is no pickle, or it is cut short.
        MemoryError: It needs more memory than a pickle of its length should.
    """
    return _read(file, legacy)[0]


def lacking(fd: int) -> list[tuple[str, str]]:
    """Return the records that an archive's pickle names and that are missing or too short.

    Each comes with what is wrong. A pickle with other references than torch's gives nothing.

    Raises:
        MemoryError: As `read`.
        OSError: The file cannot be read.
    """
    core = _core.restore(fd, False)[1]
    try:
        if core is not None:
            (data,) = records.read(core, ("data.pkl",))
            return _lacking(data, functools.partial(_nbytes_in, core))
        # Another program has packed the archive.
        with open(os.dup(fd), "rb") as file, zipfile.ZipFile(file) as archive:
            sizes = {each.filename.partition("/")[2]: each.file_size for each in archive.infolist()}
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            return _lacking(archive.read(name), sizes.get)
    except (pickle.UnpicklingError, records.RestoreFailed, *UNZIPPABLE):
        return []
    finally:
        if core is not None:
            core.close()


def _lacking(data: bytes, nbytes_of: Callable[[str], int | None]) -> list[tuple[str, str]]:
    wrong = []
    for key, storage in _read(io.BytesIO(data), False)[1].items():
        nbytes, least = nbytes_of(f"data/{key}"), _storage_nbytes(storage)
        if nbytes is None:
            wrong.append((f"data/{key}", "it is missing"))
        elif nbytes < least:
            wrong.append((f"data/{key}", f"it has {nbytes} bytes of {least}"))
    return wrong


def _nbytes_in(core: _core.Restore, name: str) -> int | None:
    number = core.find(name)
    return None if number < 0 else core.sizes(number, 1)[0]


def _storage_nbytes(storage: Storage) -> int:
    try:
        return min(int(storage.numel) * _dtype(storage.kind)[1], _MOST_BYTES)
    except (TypeError, ValueError):
        return 0  # a type that is not torch's


def _read(file: IO[bytes], legacy: bool) -> tuple[Any, dict[str, Storage]]:
    here, end = file.tell(), file.seek(0, os.SEEK_END)
    file.seek(here)
    try:
        with _bounded(end - here):
            for _ in range(3 if legacy else 0):
                keypaths.Reader(file).load()
            reader = keypaths.Reader(file)
            return reader.load(), reader.storages
    except MemoryError:
        raise
    except Exception as error:  # damaged pickles raise nearly anything
        raise pickle.UnpicklingError(f"its pickle cannot be read: {error}") from None


@contextlib.contextmanager
def _bounded(nbytes: int) -> Iterator[None]:
    """Limit this process's new memory to what a pickle of so many bytes needs.

    A flipped bit in an index of the unpickler's list of objects makes CPython fill a list of any
    length: 64 GB. The limit is for the whole process, so only commands may use this.
    """
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    in_use = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    most = in_use + _ALWAYS + _FOR_A_BYTE * nbytes
    if limits[0] == resource.RLIM_INFINITY or most < limits[0]:
        resource.setrlimit(resource.RLIMIT_DATA, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)


def walk(root: Any) -> Iterator[Tensor | Value]:
    """Iterate over every value in the tree once, in its order, without the containers."""
    seen: set[int] = set()
    stack: list[tuple[_Path, Any]] = [(None, root)]
    while stack:
        path, node = stack.pop()
        if isinstance(node, _PLAIN):
            yield Value(type(node).__name__)
            continue
        if isinstance(node, type):
            yield Value(getattr(node, "_name", "type"))
            continue
        if id(node) in seen and not isinstance(node, Storage):
            continue
        seen.add(id(node))
        if (tensor := _as_tensor(node)) is not None:
            yield tensor._replace(path=_joined(path))
            continue
        if isinstance(node, Storage):
            yield Value("storage")
            continue
        if isinstance(node, Stub) and node._name != "collections.OrderedDict":
            yield Value(node._name.removeprefix("__builtin__."))
        parts = [
            ((path, suffix) if suffix else path, child)
            for suffix, child in keypaths.children(node)
            if suffix or isinstance(child, (Stub, Storage, dict, list, tuple))
        ]
        stack.extend(reversed(parts))


def _joined(path: _Path) -> str:
    """Join a path's parts. Only tensors' paths are joined: a tree may be as deep as its pickle is
    long."""
    parts: list[str] = []
    while path is not None:
        path, part = path
        parts.append(part)
    return "".join(reversed(parts)).removeprefix(".")


def _as_tensor(node: Any) -> Tensor | None:
    """Return the node as a tensor without a path, or None if it is no tensor."""
    if not isinstance(node, (Storage, Stub)):
        return None
    try:
        if isinstance(node, Storage):
            return _tensor("storage", node, (node.numel,), None)
        function = node._name.rpartition(".")[2]
        if function in _PARAMETERS:
            inner = _as_tensor(node.args[0])
            return inner and inner._replace(kind="parameter")
        if function == "_rebuild_from_type_v2":
            made = Stub(*node.args[2])
            made._name = node.args[0]._name
            inner = _as_tensor(made)
            return inner and inner._replace(kind=node.args[1]._name)
        if function in _TENSORS:
            storage, _, size = node.args[:3]
            dtype = node.args[6] if function == "_rebuild_tensor_v3" else None
            kind = "quantized" if function == "_rebuild_qtensor" else "tensor"
            return _tensor(kind, storage, size, dtype)
    except (AttributeError, IndexError, TypeError, ValueError):
        pass  # not as torch writes it: it is shown as a call
    return None


def _tensor(kind: str, storage: Storage, size: Any, dtype: Any) -> Tensor:
    of_storage, storage_itemsize = _dtype(storage.kind)
    name, itemsize = (of_storage, storage_itemsize) if dtype is None else _dtype(dtype._name)
    shape = tuple(map(int, size.args[0] if isinstance(size, Stub) else size))
    nbytes, storage_nbytes = math.prod(shape) * itemsize, int(storage.numel) * storage_itemsize
    if min(shape, default=0) < 0 or not 0 <= max(nbytes, storage_nbytes) < _MOST_BYTES:
        raise ValueError("no memory is that large")
    location, key = str(storage.location), str(storage.key)
    return Tensor("", kind, name, shape, location, nbytes, key, storage_nbytes)


@functools.lru_cache(maxsize=128)
def _dtype(name: str) -> tuple[str, int]:
    """Return the type named by a storage's class or a dtype, and the bytes of its elements.

    Such names are ``torch.FloatStorage`` and ``torch.int8``.

    Raises:
        ValueError: There is no such type.
    """
    name = name.rpartition(".")[2]
    name = _STORAGES.get(name, name)
    if name == "bool":
        return name, 1
    match = _DTYPE.fullmatch(name)
    if match is None:
        raise ValueError(f"there is no type {name}")
    return name, -(-int(match[1]) // 8)
