"""Where checkpoints are: the local file system, or a store that is read as if it were one.

Code that looks for checkpoints uses a `Disk`. In both cases, paths are joined by slashes.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol, Self

Walk = Iterator[tuple[str, list[str], list[str]]]


class OpenFile(Protocol):
    """An open file."""

    def fileno(self) -> int: ...


class Disk:
    """The local file system, and the base class of stores. The methods raise OSError.

    An OSError of a store means that the store does not answer, not that a checkpoint is damaged.
    """

    is_remote = False  # True for stores

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def is_directory(self, path: str) -> bool:
        return os.path.isdir(path)

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def names(self, path: str) -> list[str]:
        """Return the names in a directory."""
        return os.listdir(path)

    def names_without_local_links(self, path: str) -> Iterator[str]:
        """Yield the names in a directory, except links to another name in the same directory."""
        with os.scandir(path) as entries:
            for each in entries:
                target = os.readlink(each.path) if each.is_symlink() else None
                is_local_link = target is not None and os.path.dirname(target) in ("", ".")
                if not is_local_link:
                    yield each.name

    def walk(self, path: str, on_error: Callable[[OSError], object]) -> Walk:
        """Iterate over a directory and its subdirectories, as `os.walk` does."""
        return os.walk(path, onerror=on_error)

    def modified_s(self, path: str) -> float:
        """Return the time of the last change, or 0.0 if the time is unknown."""
        try:
            return os.stat(path).st_mtime
        except OSError:
            return 0.0

    def nbytes(self, path: str) -> int:
        return os.stat(path).st_size

    def read(self, path: str, nbytes: int = -1) -> bytes:
        """Return the first `nbytes` bytes of a file, or all bytes if `nbytes` is negative. Return
        b"" for a pipe or a device."""
        with self.open(path) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return b""
            with open(file.fileno(), "rb", closefd=False) as reader:
                return reader.read(nbytes)

    def open(self, path: str, *, peek: bool = False) -> AbstractContextManager[OpenFile]:
        """Open a file for reading, without waiting for the writer of a pipe. With `peek`, only a
        small part of the file will be read for now."""
        return open(path, "rb", buffering=0, opener=_open_nonblocking)

    def forget(self, path: str) -> None:
        """Forget a file's size and version. The next `open` asks the store for them."""

    def release_memory(self, file: OpenFile) -> None:
        """Give back the memory of a file that stays open and is not read for a while."""


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


LOCAL = Disk()
