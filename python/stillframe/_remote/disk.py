"""`RemoteDisk`: a store that is read as if it were a disk with directories.

The first question about a directory lists all objects below it. Later questions use that list.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, cast

from stillframe._base import paths, urls
from stillframe._base.disk import LOCAL, Disk, OpenFile, Walk
from stillframe._remote.file import Fetcher, Object, RemoteFile
from stillframe._remote.store import Found
from stillframe._remote.stores import open_store

_Directory: TypeAlias = "dict[str, Found | _Directory]"


def resolve_disk_and_path(
    path: object, storage_options: Mapping[str, Any] | None = None
) -> tuple[Disk, str]:
    """Return the disk of a path or URL, and the path to give to the disk and to show in messages.
    The disk is a context manager, which closes the files at the end.

    Raises:
        TypeError, ValueError: `path` is no path, or the options are wrong.
        StillframeError: No client for such a URL is installed.
    """
    if urls.is_remote(path):
        text = os.fsdecode(cast("str", path))
        return RemoteDisk(text, storage_options), urls.shown(text)
    if storage_options is not None:
        raise ValueError("storage_options= is for URLs (scheme://), and this is a local path")
    if isinstance(path, str):
        path = urls.local_path_of_file_url(path)
    return LOCAL, paths.parse_local_path(path)


class RemoteDisk(Disk):
    """The store of a URL. Its paths are URLs without credentials. For errors see `open_store`."""

    is_remote = True

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None) -> None:
        self._store, _ = open_store(url, storage_options)
        shown = urls.shown(url)
        self._root = shown.removesuffix(urls.Url.parse(shown).path)  # the URL up to the key
        self._fetcher = Fetcher()
        self._listed: dict[str, _Directory] = {}  # the listed directories, by key
        self._found: dict[str, Found] = {}  # the objects that were looked up or listed, by key

    def __exit__(self, *error: object) -> None:
        self._fetcher.end()

    # ---- files ----

    def open(self, path: str, *, peek: bool = False) -> RemoteFile:
        remote = Object(self._store, self._find(self._key(path)))
        return RemoteFile(self._fetcher, remote, peek=peek)

    def forget(self, path: str) -> None:
        self._found.pop(self._key(path), None)

    def release_memory(self, file: OpenFile) -> None:
        cast("RemoteFile", file).release_memory()

    def read(self, path: str, nbytes: int = -1) -> bytes:
        found = self._find(self._key(path))
        end = found.nbytes if nbytes < 0 else min(nbytes, found.nbytes)
        return bytes(Object(self._store, found).get(0, end))

    def nbytes(self, path: str) -> int:
        return self._find(self._key(path)).nbytes

    def _find(self, key: str) -> Found:
        """Return `Store.find` of an object, and ask the store only once."""
        if key not in self._found:
            self._found[key] = self._store.find(key)
        return self._found[key]

    # ---- directories ----

    def is_directory(self, path: str) -> bool:
        key = self._key(path)
        parent = self._known(os.path.dirname(key))
        if parent is not None:
            return isinstance(parent.get(os.path.basename(key)), dict)
        may_be_object = key and not path.endswith("/")
        if may_be_object:  # asking for one object is cheaper than a listing
            try:
                self._find(key)
                return False
            except FileNotFoundError:
                pass
        return bool(self._directory(key))  # a store has no empty directories

    def exists(self, path: str) -> bool:
        try:
            self._find(self._key(path))
        except FileNotFoundError:
            return self.is_directory(path)
        return True

    def names(self, path: str) -> list[str]:
        """Return the names in a directory; [] if there is none."""
        return [*self._directory(self._key(path))]

    def names_without_local_links(self, path: str) -> Iterator[str]:
        return iter(self.names(path))

    def walk(self, path: str, on_error: Callable[[OSError], object]) -> Walk:
        try:
            inside = self._directory(self._key(path))
        except OSError as error:
            on_error(error)
            return
        directories = [name for name, each in inside.items() if isinstance(each, dict)]
        files = [name for name in inside if name not in directories]
        yield path, directories, files
        for name in directories:
            yield from self.walk(os.path.join(path, name), on_error)

    def modified_s(self, path: str) -> float:
        """Return the latest time of what was listed at a path; 0.0 if nothing was listed."""
        key = self._key(path)
        parent = self._known(os.path.dirname(key)) or {}
        listed = parent.get(os.path.basename(key), {})
        return max(_modification_times(listed), default=0.0)

    def _key(self, path: str) -> str:
        """Return the key of a path, which is a URL."""
        return path.removeprefix(self._root).strip("/")

    def _known(self, key: str) -> _Directory | None:
        """Return a directory that was listed, itself or with a directory above it; else None."""
        if key in self._listed:
            return self._listed[key]
        if not key:
            return None
        parent = self._known(os.path.dirname(key))
        if parent is None:
            return None
        inside = parent.get(os.path.basename(key), {})  # {}: no object is below it
        return inside if isinstance(inside, dict) else None

    def _directory(self, key: str) -> _Directory:
        """Return a directory; list it if it was not listed."""
        directory = self._known(key)
        if directory is None:
            directory = self._listed[key] = {}
            for found in self._store.list(key):
                _add(directory, found.key[len(key) :].strip("/").split("/"), found)
                # Objects without a version are left out. `Object.refuse_changed` compares them with
                # a later `Store.find`, from which a listing may differ.
                if found.version:
                    self._found[found.key] = found
        return directory


def _add(directory: _Directory, path: list[str], found: Found) -> None:
    """Add an object to a directory. `path` is its path below the directory, split at slashes."""
    *above, name = path
    for parent in above:
        inside = directory.setdefault(parent, {})
        if not isinstance(inside, dict):
            return  # an object of this name hides what is below it
        directory = inside
    if name:  # the key of an object that only marks a directory ends with a slash
        directory.setdefault(name, found)


def _modification_times(node: Found | _Directory) -> Iterator[float]:
    """Yield the times of the last change of an object, or of all objects below a directory."""
    if isinstance(node, Found):
        yield node.modified_s
    else:
        for each in node.values():
            yield from _modification_times(each)
