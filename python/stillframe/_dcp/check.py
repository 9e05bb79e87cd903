"""Checks that a DCP checkpoint is intact: every item is a zip archive whose records have CRCs.

The metadata is a pickle, which may be malicious. It is read without importing or calling anything
that it names.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import IO, Any

from stillframe import _core
from stillframe._base import file_kinds
from stillframe._base.disk import LOCAL, Disk
from stillframe._tree.keypaths import Stub
from stillframe.errors import CorruptCheckpointError


def damage_of_item(fd: int, offset: int, length: int) -> str | None:
    """Return what is wrong with an item of a data file, or None. The CRC of every record is
    compared, except of records without a CRC, which torch writes on request."""
    wrong = _find_range_error(fd, offset, length)
    if wrong is not None:
        return wrong
    found = _core.check(fd, True, offset=offset, nbytes=length)  # True: compare the CRCs
    for name, reason in found["bad_records"]:
        return f"{name}: {reason}"  # the first one is enough
    if found["format"] == "legacy":
        return "it is in torch's legacy format, which has no checksums"
    if found["error"] is not None:
        return str(found["error"])
    if found["num_compressed"]:
        return "it has compressed records, whose bytes cannot be checked"
    if found["num_trailing"]:
        return f"{found['num_trailing']} bytes follow its end"
    return None


def _find_range_error(fd: int, offset: int, length: int) -> str | None:
    """Return why an item cannot be in the file, or None if the file is long enough for it."""
    end = os.fstat(fd).st_size
    if offset < 0 or length < 0:
        return f"it cannot have {length} bytes from byte {offset} on"
    if offset + length > end:
        return f"it should reach to byte {offset + length}, and the file ends at {end}"
    return None


@dataclass
class Checked:
    """The result of checking a directory."""

    nr_items: int  # items that the metadata names
    nr_unchecked: int  # items whose CRCs cannot be compared: an extension has transformed them
    nbytes: int  # of all data files
    bad: list[tuple[str, str]]  # the name of an item or a file, and a description of its damage


def check(
    directory: str,
    read: Callable[[IO[bytes]], Any],
    disk: Disk = LOCAL,
    *,
    thorough: bool = True,
) -> Checked:
    """Compare every CRC of a checkpoint, and its metadata with its files.

    Args:
        read: Reads a pickle and returns its object, with a `Stub` for each object of a class.
        thorough: With False no CRC is compared: the files only have to be there, and long enough.

    Raises:
        CorruptCheckpointError: A metadata file does not describe items.
        OSError: The directory or a metadata file cannot be read.
    """
    found = Checked(nr_items=0, nr_unchecked=0, nbytes=0, bad=[])
    by_file: dict[str, list[_ItemRange]] = {}
    metadata_files = [name for name in disk.names(directory) if file_kinds.is_sharded([name])]
    for name in sorted(metadata_files):
        for item in _read_metadata_items(os.path.join(directory, name), read, disk):
            by_file.setdefault(item.file, []).append(item)
            found.nr_items += 1
            if item.is_transformed:
                found.nr_unchecked += 1
    for file, items in sorted(by_file.items()):
        _check_file(os.path.join(directory, file), items, found, thorough, disk)
    return found


def shortened(names: list[str]) -> str:
    """Return the first of some names, and how many more there are."""
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def _check_file(
    path: str, items: list[_ItemRange], found: Checked, thorough: bool, disk: Disk
) -> None:
    """Check the items of one file: every byte, or only that the file is long enough."""
    content = f"it holds {shortened([item.name for item in items])}"
    damage_of = damage_of_item if thorough else _find_range_error
    try:
        with disk.open(path, peek=not thorough) as file:
            found.nbytes += os.fstat(file.fileno()).st_size
            for item in sorted(items, key=lambda item: item.offset):
                if thorough and item.is_transformed:
                    continue
                wrong = damage_of(file.fileno(), item.offset, item.length)
                if wrong is not None:
                    found.bad.append((item.name, wrong))
    except FileNotFoundError:
        found.bad.append((os.path.basename(path), f"the file is missing: {content}"))
    except OSError as error:
        if disk.is_remote:
            raise  # the store does not answer
        found.bad.append((os.path.basename(path), f"{error.strerror}: {content}"))


@dataclass(frozen=True)
class _ItemRange:
    """An item and its range of a data file, in bytes."""

    name: str
    file: str
    offset: int
    length: int
    is_transformed: bool  # an extension of DCP has changed the bytes


def _read_metadata_items(
    path: str, read: Callable[[IO[bytes]], Any], disk: Disk
) -> list[_ItemRange]:
    """Return the items that a metadata file names. Raise CorruptCheckpointError if the file does
    not describe items."""
    file = io.BytesIO(disk.read(path))
    try:
        root = read(file)
        return [
            _ItemRange(
                name=_format_item_name(index.state),
                file=os.fspath(info.state["relative_path"]),
                offset=int(info.state["offset"]),
                length=int(info.state["length"]),
                is_transformed=bool(info.state.get("transform_descriptors")),
            )
            for index, info in root.state["storage_data"].items()
        ]
    except (
        pickle.UnpicklingError,
        AttributeError,
        IndexError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:
        raise CorruptCheckpointError(f"{path} cannot be read: {error}") from None


def _format_item_name(index: dict[str, Any]) -> str:
    """Return an item's name for messages, with the position of a shard in its tensor."""
    offset = index.get("offset")
    if offset is None:
        return str(index["fqn"])
    # `read` returns a `Stub` for a torch.Size.
    numbers = offset.args[0] if isinstance(offset, Stub) else offset
    return f"{index['fqn']} from {tuple(numbers)}"


def refuse_damaged_items(directory: str, items: Iterable[tuple[str, str, int, int]]) -> None:
    """Compare the CRCs of items in a local directory. Raise CorruptCheckpointError if an item is
    damaged, or its file is missing. An item is (name, file, offset, length)."""
    by_file: dict[str, list[tuple[str, int, int]]] = {}
    for name, file, offset, length in items:
        by_file.setdefault(file, []).append((name, offset, length))
    for file, ranges in by_file.items():
        path = os.path.join(directory, file)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            content = shortened([name for name, _, _ in ranges])
            raise CorruptCheckpointError(f"{path} is missing: it holds {content}") from None
        try:
            for name, offset, length in ranges:
                wrong = damage_of_item(fd, offset, length)
                if wrong is not None:
                    raise CorruptCheckpointError(f"{path}: {name} is damaged: {wrong}")
        finally:
            os.close(fd)
