"""Uploads one local file, or the files of a directory and a marker after them.

The marker is one more object below the directory's key: JSON with the names of the files and their
sizes. It is written last and deleted first. So if the marker exists, all files are there and belong
together. Before the marker is written, objects that the local directory does not have are deleted:
they are left from an older directory of the same name.
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

_OURS = ".stillframe"  # names of temporaries, journals and markers begin so: not uploaded
_LAST = ".metadata"  # torch.distributed.checkpoint takes a directory with this file for complete
_PIECE = 4 << 20  # bytes that are read at a time


class LocalError(Exception):
    """The local file cannot be read; `__cause__` is the error."""


def send(store: Store, key: str, path: str, check: Callable[[], object]) -> int:
    """Upload a file to the key, or a directory to keys below it; return the bytes sent.

    Args:
        check: Called before each piece of a file; an exception that it raises ends the upload.

    Raises:
        LocalError: The file or directory cannot be read.
        OSError: The store's errors, see `Store`.
    """
    with _reading():
        is_directory = stat.S_ISDIR(os.lstat(path).st_mode)
    if is_directory:
        return _send_directory(store, key, path, check)
    return send_file(store, key, path, check)


def send_file(store: Store, key: str, path: str, check: Callable[[], object]) -> int:
    """Upload one file; for arguments, result and errors see `send`."""
    with _reading():
        file = FileIO(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW))
    with file:
        nbytes = os.fstat(file.fileno()).st_size
        store.put(key, _pieces(file, nbytes, check), nbytes)
    return nbytes


def _pieces(file: FileIO, nbytes: int, check: Callable[[], object]) -> Iterator[memoryview]:
    """Yield the first `nbytes` bytes of a file; raise LocalError if it has fewer. For `check` see
    `send`."""
    left = nbytes
    while left:
        check()
        piece = bytearray(min(left, _PIECE))
        with _reading():
            length = file.readinto(piece)
            if not length:
                raise OSError(f"it became shorter while it was read: {left} bytes are missing")
        left -= length
        yield memoryview(piece)[:length]


def _send_directory(store: Store, key: str, path: str, check: Callable[[], object]) -> int:
    """Upload a directory; for arguments, result and errors see `send`."""
    files = files_of(path)
    marker = f"{key}/{MARKER}"
    last = [f"{key}/{name}" for name in files if os.path.basename(name) == _LAST]
    # Without the marker and .metadata, nobody takes objects of two versions for a checkpoint.
    store.delete([marker])
    store.delete(last)
    for name in files:
        where = f"{key}/{name}"
        if where in last:
            _refuse_changed(path, files)
        send_file(store, where, os.path.join(path, name), check)
    _refuse_changed(path, files)
    sizes = {name: info.st_size for name, info in files.items()}
    listed = [each.key for each in store.list(key)]
    store.delete(each for each in listed if each.removeprefix(f"{key}/") not in sizes)
    put_marker(store, marker, sizes)
    return sum(sizes.values())


def put_marker(store: Store, key: str, sizes: dict[str, int]) -> None:
    """Make several objects one checkpoint: write the object with their names and sizes.

    Args:
        key: The key of the marker itself.
        sizes: The bytes of each object, by its name below the checkpoint's prefix.
    """
    content = json.dumps({"files": sizes}).encode()
    store.put(key, [content], len(content))


def _refuse_changed(path: str, files: dict[str, os.stat_result]) -> None:
    """Refuse a directory that has changed since `files_of` returned `files`.

    Raises:
        LocalError: A file was added, removed or changed.
    """
    versions = [
        {name: (info.st_ino, info.st_size, info.st_mtime_ns) for name, info in each.items()}
        for each in (files, files_of(path))
    ]
    if versions[0] != versions[1]:
        raise LocalError from FileNotFoundError("the directory changed while it was uploaded")


def files_of(path: str) -> dict[str, os.stat_result]:
    """Return the files of a directory by their relative names, in the order of their upload.
    Symbolic links are left out.

    Raises:
        LocalError: The directory cannot be read, or a name is not UTF-8.
    """
    found: dict[str, os.stat_result] = {}

    def refuse(error: OSError) -> None:
        raise error

    with _reading():
        for above, directories, names in os.walk(path, onerror=refuse):
            directories[:] = [each for each in directories if not each.startswith(_OURS)]
            for name in names:
                full = os.path.join(above, name)
                info = os.lstat(full)
                if stat.S_ISREG(info.st_mode) and not name.startswith(_OURS):
                    full.encode()
                    found[os.path.relpath(full, path)] = info
    return {
        name: found[name]
        for name in sorted(found, key=lambda each: (os.path.basename(each) == _LAST, each))
    }


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Raise errors of the local file as LocalError, to distinguish them from the store's."""
    try:
        yield
    except (OSError, UnicodeError) as error:
        raise LocalError(str(error)) from error
