"""Check that a DCP checkpoint is intact: every item is a zip archive whose records have CRCs.

The metadata is a pickle. Loading a checkpoint means trusting it, but checking one must not. So the
metadata is read here without importing or calling anything that it names.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import IO, Any, cast

from stillframe import _core
from stillframe._base import file_kinds
from stillframe._tree.keypaths import Stub
from stillframe.errors import CorruptCheckpointError

_CHUNK = 8 << 20

# The records at the end of an archive: zip64 end record, its locator, end record.
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
_CENTRAL = 46  # bytes of a record in the central directory, without its three strings
_NOT_AS_IT_IS = 0x2061  # flags: encrypted, patched, strongly encrypted, with hidden names
_DIRECTORY = 0x10  # MS-DOS attribute


class _BeforeBeginningError(OSError):
    """An archive refers to bytes before its beginning. zipfile expects an OSError."""


class _Slice(io.RawIOBase):
    """`length` bytes of a file from `offset` on, as a file object."""

    def __init__(self, fd: int, offset: int, length: int) -> None:
        self._fd, self._offset, self._length = fd, offset, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise _BeforeBeginningError("something in it would be before its beginning")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, min(len(view), self._length - self._at))]
        got = os.preadv(self._fd, [view], self._offset + self._at) if len(view) else 0
        self._at += got
        return got


def damage_of_item(fd: int, offset: int, length: int) -> str | None:
    """Describe the damage of an item in a data file; return None if it is intact.

    torch can be told to write records without a CRC. Of those only the structure is checked.

    Raises:
        OSError: The file cannot be read.
    """
    end = os.fstat(fd).st_size
    if offset + length > end:
        return f"it should reach to byte {offset + length}, and the file ends at {end}"
    item = _Slice(fd, offset, length)
    try:
        with zipfile.ZipFile(cast(Any, item)) as archive:
            for record in archive.infolist():
                wrong = _damage_of_record(item, record, length)
                if wrong is not None:
                    return f"{record.filename}: {wrong}"
            if not _directory_is_right(item, archive.start_dir, length, len(archive.infolist())):
                return "its directory does not end as it should"
    except (
        *(zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError, struct.error),
        _BeforeBeginningError,
    ) as error:
        return f"it is no archive: {error}"
    return None


def _directory_is_right(item: _Slice, start: int, length: int, nr: int) -> bool:
    """Tell whether the central directory has `nr` records and the end records agree with it.
    zipfile accepts a directory that does not, and torch refuses to read it."""
    end = start
    for _ in range(nr):
        item.seek(end + 28)
        end += _CENTRAL + sum(struct.unpack("<3H", item.read(6) or b""))
    item.seek(end)
    directory = (0, 0, nr, nr, end - start, start)
    if length - end == _END.size:
        return _END.unpack(item.read() or b"")[1:7] == directory
    if length - end != _END64.size + _LOCATOR.size + _END.size:
        return False
    _, nbytes, _, _, *found = _END64.unpack(item.read(_END64.size) or b"")
    _, *place = _LOCATOR.unpack(item.read(_LOCATOR.size) or b"")
    return nbytes == _END64.size - 12 and (*found,) == directory and place == [0, end, 1]


def _damage_of_record(item: _Slice, record: zipfile.ZipInfo, length: int) -> str | None:
    item.seek(record.header_offset)
    header = item.read(30) or b""
    name = record.orig_filename.encode()
    if len(header) < 30 or header[:4] != b"PK\3\4":
        return "its header is missing"
    name_length, extra_length = struct.unpack("<HH", header[26:])
    if item.read(name_length) != name:
        return "its header is of another record"
    start = record.header_offset + 30 + name_length + extra_length
    if (
        record.compress_type != zipfile.ZIP_STORED
        or record.compress_size != record.file_size
        or start + record.file_size > length
        or record.flag_bits & _NOT_AS_IT_IS
        or record.external_attr & _DIRECTORY
        or record.volume
    ):
        return "its bytes are not where they should be"
    item.seek(start)
    if _crc(item, record.file_size) != record.CRC and record.CRC != 0:
        return "its bytes do not match their CRC"
    return None


def _crc(item: _Slice, nbytes: int) -> int:
    value = 0
    buffer = memoryview(bytearray(min(nbytes, _CHUNK)))
    while nbytes:
        got = item.readinto(buffer[: min(nbytes, _CHUNK)])
        if not got:
            return ~value  # the file has become shorter; report a mismatch
        value = _core.crc32(buffer[:got], value)
        nbytes -= got
    return value


@dataclass
class Checked:
    """The result of checking a directory.

    Attributes:
        nr_items: The number of items that its metadata names.
        nr_unchecked: The number of those that only an extension could read.
        nbytes: The bytes of the files that hold them.
        bad: Pairs of an item or a file, and a description of its damage.
    """

    nr_items: int
    nr_unchecked: int
    nbytes: int
    bad: list[tuple[str, str]]


def check(directory: str, read: Callable[[IO[bytes]], Any]) -> Checked:
    """Compare every CRC of a checkpoint, and its metadata with its files.

    Args:
        read: Reads a pickle and returns its object, made of stubs. A command may bound its memory.

    Raises:
        CorruptCheckpointError: Its metadata cannot be read.
        OSError: The directory or its metadata cannot be read.
    """
    found = Checked(0, 0, 0, [])
    by_file: dict[str, list[_ItemRange]] = {}
    for name in sorted(each for each in os.listdir(directory) if file_kinds.is_sharded([each])):
        for place in _read_items(os.path.join(directory, name), read):
            by_file.setdefault(place.file, []).append(place)
            found.nr_items += 1
            found.nr_unchecked += place.transformed
    for file, places in sorted(by_file.items()):
        _check_file(os.path.join(directory, file), places, found)
    return found


def _check_file(path: str, places: list[_ItemRange], found: Checked) -> None:
    items = f"it holds {places[0].name}" + (f" and {len(places) - 1} more" if places[1:] else "")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        found.bad.append((os.path.basename(path), f"the file is missing: {items}"))
        return
    except OSError as error:
        found.bad.append((os.path.basename(path), f"{error.strerror}: {items}"))
        return
    try:
        found.nbytes += os.fstat(fd).st_size
        for place in places:
            if not place.transformed:
                wrong = damage_of_item(fd, place.offset, place.length)
                if wrong is not None:
                    found.bad.append((place.name, wrong))
    except OSError as error:
        found.bad.append((os.path.basename(path), f"{error.strerror}: {items}"))
    finally:
        os.close(fd)


@dataclass(frozen=True)
class _ItemRange:
    name: str
    file: str
    offset: int
    length: int
    transformed: bool


def _read_items(path: str, read: Callable[[IO[bytes]], Any]) -> list[_ItemRange]:
    """Read from a metadata file where the items are.

    Raises:
        CorruptCheckpointError: The file does not describe items.
    """
    with open(path, "rb") as file:
        try:
            root = read(file)
            return [
                _ItemRange(
                    _name_of(index.state),
                    os.fspath(info.state["relative_path"]),
                    int(info.state["offset"]),
                    int(info.state["length"]),
                    bool(info.state.get("transform_descriptors")),
                )
                for index, info in root.state["storage_data"].items()
            ]
        except (
            *(pickle.UnpicklingError, AttributeError, KeyError, TypeError, ValueError),
            IndexError,
        ) as error:
            raise CorruptCheckpointError(f"{path} cannot be read: {error}") from None


def _name_of(index: dict[str, Any]) -> str:
    offset = index.get("offset")
    if offset is None:
        return str(index["fqn"])
    numbers = offset.args[0] if isinstance(offset, Stub) else offset
    return f"{index['fqn']} from {tuple(numbers)}"


def refuse_damaged_items(directory: str, items: Iterable[tuple[str, str, int, int]]) -> None:
    """Check the given items.

    Args:
        items: Name, file, offset and length of each.

    Raises:
        CorruptCheckpointError: An item is damaged, or its file is missing.
    """
    by_file: dict[str, list[tuple[str, int, int]]] = {}
    for name, file, offset, length in items:
        by_file.setdefault(file, []).append((name, offset, length))
    for file, places in by_file.items():
        path = os.path.join(directory, file)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise CorruptCheckpointError(
                f"{path} is missing: it holds {places[0][0]}, and {len(places) - 1} more"
            ) from None
        try:
            for name, offset, length in places:
                wrong = damage_of_item(fd, offset, length)
                if wrong is not None:
                    raise CorruptCheckpointError(f"{path}: {name} is damaged: {wrong}")
        finally:
            os.close(fd)
