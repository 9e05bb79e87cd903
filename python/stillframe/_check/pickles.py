"""Pickles of checkpoints, read into stubs: nothing that a pickle names is imported or called.

So any file can be read safely, and without the pickled classes.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import IO, Any, TypeAlias

from stillframe import _core
from stillframe._base import records
from stillframe._tree import keypaths
from stillframe._tree.keypaths import Storage

# Takes the length of a pickle, and returns a context manager that limits the new memory of the
# process to what such a pickle needs. CPython's unpickler has a table as long as the largest index
# in the pickle, so one flipped bit could make it allocate 64 GB. Only the shell's commands set a
# limit.
Bound: TypeAlias = Callable[[int], AbstractContextManager[None]]

MOST_BYTES = 1 << 63  # every tensor and storage is shorter
# The errors of zipfile for archives that it cannot read.
UNZIPPABLE = (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, EOFError)
_LENGTH_FIELD = 8  # bytes: the length before each storage in the legacy format
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
# Matches float32, bits2x4, float8_e4m3fn, float4_e2m1fn_x2; the group is the number of bits.
_DTYPE = re.compile(
    r"(?:b?float|complex|q?u?int|bits)(\d{1,3})(?:_e\d+m\d+[a-z]*)?(?:_?x\d)?", re.ASCII
)


def unbounded(_nbytes: int) -> AbstractContextManager[None]:
    """Return a context manager that sets no limit. This function is a `Bound`."""
    return contextlib.nullcontext()


class _RawFdReader(io.RawIOBase):
    """An open file for Python's BufferedReader. If the file is in a store, a read waits until the
    bytes are fetched."""

    def __init__(self, fd: int) -> None:
        self._file = _core.File(fd, os.fstat(fd).st_size)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: Any, /) -> int:
        return self._file.readinto(buffer)


def reading(fd: int) -> IO[bytes]:
    """Return a Python file over `fd`, at its beginning. The caller still owns `fd`."""
    return io.BufferedReader(_RawFdReader(fd))


def read(file: IO[bytes], *, legacy: bool = False, bound: Bound = unbounded) -> Any:
    """Return the object of the pickle at the file's position, made of stubs.

    With `legacy`, skip the three pickles that come first in torch's legacy format.

    Raises:
        pickle.UnpicklingError: There is no pickle at this position, or it is cut short.
        MemoryError: The pickle needs more memory than `bound` allows for its length.
    """
    return _read(file, legacy, bound)[0]


def _read(file: IO[bytes], legacy: bool, bound: Bound) -> tuple[Any, dict[str, Storage]]:
    """Return what `read` returns, and the storages that the pickle names, by key."""
    begin = file.tell()
    end = file.seek(0, os.SEEK_END)
    file.seek(begin)
    nr_skipped = 3 if legacy else 0  # magic number, protocol version, system information
    try:
        with bound(end - begin):
            for _ in range(nr_skipped):
                keypaths.Reader(file).load()
            reader = keypaths.Reader(file)
            return reader.load(), reader.storages
    except MemoryError:
        raise
    except Exception as error:  # damaged pickles raise nearly anything
        raise pickle.UnpicklingError(f"its pickle cannot be read: {error}") from None


def lacking(fd: int, bound: Bound = unbounded) -> list[tuple[str, str]]:
    """Return the records that an archive's pickle names and that are missing or too short, each
    with what is wrong. Return [] if the pickle cannot be read. Raise MemoryError like `read`."""
    _, core = _core.restore(fd, False)  # False: compare no CRCs
    try:
        if core is not None:
            (data,) = records.read(core, ("data.pkl",))
            return _find_missing_records(data, functools.partial(_find_record_nbytes, core), bound)
        # Another program has packed the archive, so `zipfile` reads it.
        with reading(fd) as file, zipfile.ZipFile(file) as archive:
            # The names are without the directory around all records, as in `data/0`.
            sizes = {each.filename.partition("/")[2]: each.file_size for each in archive.infolist()}
            # This raises ValueError unless there is exactly one such name.
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            return _find_missing_records(archive.read(name), sizes.get, bound)
    except (pickle.UnpicklingError, records.RestoreFailed, *UNZIPPABLE):
        return []
    finally:
        if core is not None:
            core.close()


def truncated(fd: int, bound: Bound = unbounded) -> str | None:
    """Return a sentence if a file of torch's legacy format is truncated, otherwise None. Raise
    MemoryError like `read`."""
    with reading(fd) as file:
        try:
            _, storages = _read(file, legacy=True, bound=bound)
            # The next pickle is the last one, and lists the storages' keys. Then each storage
            # follows: its length and its bytes.
            keys, _ = _read(file, legacy=False, bound=bound)
            end = file.tell() + sum(_LENGTH_FIELD + _storage_nbytes(storages[key]) for key in keys)
        except pickle.UnpicklingError as error:
            # Python's unpickler says in these words that its input has ended too early.
            is_cut = "truncated" in str(error) or "Ran out of input" in str(error)
            return f"it is truncated: {error}" if is_cut else None
        except (KeyError, TypeError):  # damaged in another way
            return None
        nbytes = os.fstat(fd).st_size
    return f"it is truncated: it has {nbytes} bytes of {end}" if nbytes < end else None


def _find_missing_records(
    data: bytes, nbytes_of: Callable[[str], int | None], bound: Bound
) -> list[tuple[str, str]]:
    """Return the result of `lacking` for the pickle in `data`. `nbytes_of` returns the length of a
    record, or None if the record is missing."""
    wrong = []
    _, storages = _read(io.BytesIO(data), legacy=False, bound=bound)
    for key, storage in storages.items():
        record = f"data/{key}"
        nbytes, needed_nbytes = nbytes_of(record), _storage_nbytes(storage)
        if nbytes is None:
            wrong.append((record, "it is missing"))
        elif nbytes < needed_nbytes:
            wrong.append((record, f"it has {nbytes} bytes of {needed_nbytes}"))
    return wrong


def _find_record_nbytes(core: _core.Restore, name: str) -> int | None:
    """Return the length of an archive's record, or None if the record is missing."""
    number = core.find(name)
    return None if number < 0 else core.sizes(number, 1)[0]


def _storage_nbytes(storage: Storage) -> int:
    """Return the bytes that a storage has according to its pickle."""
    try:
        _, element_bytes = dtype(storage.kind)
        return min(int(storage.numel) * element_bytes, MOST_BYTES)
    except (TypeError, ValueError):
        return 0  # an unknown type: a record of any length will do


@functools.lru_cache(maxsize=128)
def dtype(name: str) -> tuple[str, int]:
    """Return the element type of a storage class or a dtype, and the bytes of an element:
    ("float32", 4) for ``torch.FloatStorage``. Raise ValueError if there is no such type."""
    name = name.rpartition(".")[2]
    name = _STORAGES.get(name, name)
    if name == "bool":
        return name, 1
    match = _DTYPE.fullmatch(name)
    if match is None:
        raise ValueError(f"there is no type {name}")
    bits = int(match[1])
    return name, (bits + 7) // 8  # a smaller element is packed with others, or padded
