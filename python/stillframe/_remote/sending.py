"""Uploads one local file, or the files of a directory and then a marker.

The marker is an object with the names and sizes of the files as JSON. It is written last and
deleted first. So if the marker exists, all files are there and belong together. Objects of an older
directory of the same name are deleted before the marker is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from io import FileIO

from stillframe._base.file_kinds import MARKER
from stillframe._remote.store import Store

_OUR_PREFIX = ".stillframe"  # files whose names begin with it are not uploaded
_METADATA = (
    ".metadata"  # torch.distributed.checkpoint takes a directory with this file for complete
)
_PIECE = 4 << 20  # the bytes that are read at a time


class LocalReadError(Exception):
    """The local file cannot be read; `__cause__` is the error."""


def send(store: Store, key: str, path: str, check: Callable[[], object]) -> int:
    """Upload a file to the key, or a directory to keys below it. Return the bytes sent.

    Args:
        check: Called before each piece of a file. An exception that it raises ends the upload.

    Raises:
        LocalReadError: The file or directory cannot be read.
        OSError: The store refused; see `Store`.
    """
    with _raising_local_errors():
        is_directory = stat.S_ISDIR(os.lstat(path).st_mode)
    if is_directory:
        return _send_directory(store, key, path, check)
    return send_file(store, key, path, check)


def send_file(store: Store, key: str, path: str, check: Callable[[], object]) -> int:
    """Upload one file, as `send` does."""
    with _raising_local_errors():
        file = FileIO(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW))
    with file:
        nbytes = os.fstat(file.fileno()).st_size
        store.put(key, _read_pieces(file, nbytes, check), nbytes)
    return nbytes


def _read_pieces(file: FileIO, nbytes: int, check: Callable[[], object]) -> Iterator[memoryview]:
    """Yield the first `nbytes` bytes of a file. Raise LocalReadError if it has fewer."""
    left = nbytes
    while left:
        check()
        piece = bytearray(min(left, _PIECE))
        with _raising_local_errors():
            length = file.readinto(piece)
            if not length:
                raise OSError(f"it became shorter while it was read: {left} bytes are missing")
        left -= length
        yield memoryview(piece)[:length]


def _send_directory(store: Store, key: str, path: str, check: Callable[[], object]) -> int:
    """Upload a directory, as `send` does."""
    files = files_of(path)
    marker = f"{key}/{MARKER}"
    metadata_keys = [f"{key}/{name}" for name in files if os.path.basename(name) == _METADATA]
    # Without the marker and .metadata, nobody takes a mix of old and new files for a checkpoint.
    store.delete([marker])
    store.delete(metadata_keys)
    for name in files:
        object_key = f"{key}/{name}"
        if object_key in metadata_keys:  # it comes last, and makes the checkpoint complete for DCP
            _raise_if_directory_changed(path, files)
        send_file(store, object_key, os.path.join(path, name), check)
    _raise_if_directory_changed(path, files)
    sizes = {name: info.st_size for name, info in files.items()}
    present = [each.key for each in store.list(key)]
    old_keys = [each for each in present if each.removeprefix(f"{key}/") not in sizes]
    store.delete(old_keys)
    put_marker(store, marker, sizes)
    return sum(sizes.values())


def put_marker(store: Store, key: str, sizes: dict[str, int]) -> None:
    """Write the marker of a checkpoint. `sizes`: the bytes of each object, by its name below the
    checkpoint's prefix."""
    content = json.dumps({"files": sizes}).encode()
    store.put(key, [content], len(content))


def _raise_if_directory_changed(path: str, files: dict[str, os.stat_result]) -> None:
    """Raise LocalReadError if the directory has changed since `files_of` returned `files`."""

    def versions(infos: dict[str, os.stat_result]) -> dict[str, tuple[int, int, int]]:
        return {name: (info.st_ino, info.st_size, info.st_mtime_ns) for name, info in infos.items()}

    if versions(files) != versions(files_of(path)):
        # The mirror tries again after a FileNotFoundError, and only then.
        raise LocalReadError from FileNotFoundError("the directory changed while it was uploaded")


def files_of(path: str) -> dict[str, os.stat_result]:
    """Return the `lstat` results of a directory's files, by relative name, in the order of the
    upload. Raise LocalReadError if the directory cannot be read, or a name is not UTF-8."""
    found: dict[str, os.stat_result] = {}

    def raise_error(error: OSError) -> None:
        raise error

    with _raising_local_errors():
        for above, directories, names in os.walk(path, onerror=raise_error):
            directories[:] = [each for each in directories if not each.startswith(_OUR_PREFIX)]
            for name in names:
                full = os.path.join(above, name)
                info = os.lstat(full)
                if stat.S_ISREG(info.st_mode) and not name.startswith(_OUR_PREFIX):
                    full.encode()  # raises UnicodeError, if it is not UTF-8
                    found[os.path.relpath(full, path)] = info
    # True sorts after False, so .metadata comes last.
    names = sorted(found, key=lambda each: (os.path.basename(each) == _METADATA, each))
    return {name: found[name] for name in names}


@contextlib.contextmanager
def _raising_local_errors() -> Iterator[None]:
    """Raise errors of the local file as LocalReadError."""
    try:
        yield
    except (OSError, UnicodeError) as error:
        raise LocalReadError(str(error)) from error
