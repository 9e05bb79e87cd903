"""Where the files of a checkpoint are: in a local directory, or below a URL in a store.

A save uses both in the same way:

    Directory    writes the metadata under a temporary name; the commit is a rename
    Prefix       keeps the metadata in memory; the commit sends it as one object
"""

from __future__ import annotations

import contextlib
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from stillframe._base import paths, steps, urls
from stillframe._base.paths import CheckpointPath
from stillframe._dcp.uploads import FileUpload, Uploads
from stillframe._remote.file import Object
from stillframe._remote.store import Buffer, part_bytes
from stillframe._remote.stores import open_store
from stillframe._save.api import engine_or_default
from stillframe._save.engine import Engine
from stillframe._save.handle import SaveHandle
from stillframe._save.parts import Parts, submit_parts
from stillframe._save.report import IoMode

log = logging.getLogger("stillframe")

StorageOptions = Mapping[str, Any] | None
# Starts writing a file: (parts, name, owners). The owners keep the memory of the parts alive.
Submit = Callable[[Parts, str, Sequence[object]], SaveHandle | FileUpload]


class Location(ABC):
    """The files of one checkpoint, by their names. The methods raise OSError."""

    shown: str  # the path or URL for messages and reports
    io_mode: IoMode  # for the report of a rank that has written no file
    failed_commit_is_over: bool  # a commit that has failed cannot take effect later

    @abstractmethod
    def begin(self, *, durable: bool) -> None:
        """Make the directory and its parents if they are missing."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Return whether there is a file of this name."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return the bytes of a file."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all files, also of files that are not the checkpoint's."""

    @abstractmethod
    def make_submit_function(self, *, durable: bool, engine: Engine | None) -> Submit:
        """Return the function that starts writing one of a rank's files."""

    @abstractmethod
    def prepare(self, temporary: str, content: bytes, *, durable: bool) -> None:
        """Keep the content of a file under a temporary name, for `commit`."""

    @abstractmethod
    def commit(self, temporary: str, name: str, *, durable: bool) -> None:
        """Make the prepared file appear, in place of an old one.

        Raises:
            OSError: The old file stays, unless `failed_commit_is_over` is False, or only the sync
                of a directory has failed.
        """

    @abstractmethod
    def discard(self, temporary: str) -> None:
        """Drop a prepared file."""

    @abstractmethod
    def remove(self, names: Iterable[str]) -> None:
        """Remove files. A missing file is no error, and errors are only logged."""

    @abstractmethod
    def remove_if_empty(self) -> None:
        """Remove the directory of a failed save unless it has files."""


def location_of(path: CheckpointPath, storage_options: StorageOptions = None) -> Location:
    """Return the location that a path or a URL names.

    Raises:
        TypeError, ValueError: `path` is neither, or the options are invalid; see `open_store`.
        StillframeError: No client for the URL's scheme is installed.
    """
    if path.remote:
        return Prefix(path.text, storage_options)
    urls.refuse_storage_options(path.given, storage_options)
    return Directory(os.path.abspath(paths.parse_local_path(path.given)))


def is_location(path: object) -> bool:
    """Return whether an argument is a path or a URL. Nothing has to exist there."""
    try:
        if not CheckpointPath.of(path).remote:
            paths.parse_local_path(path)
    except (TypeError, ValueError):
        return False
    return True


class Directory(Location):
    """A local directory, by its absolute path."""

    io_mode: IoMode = "buffered"
    failed_commit_is_over = True

    def __init__(self, path: str) -> None:
        self.path = self.shown = path

    def _join(self, name: str) -> str:
        return os.path.join(self.path, name)

    def begin(self, *, durable: bool) -> None:
        paths.make_directories(self.path, durable)

    def exists(self, name: str) -> bool:
        return os.path.exists(self._join(name))

    def read(self, name: str) -> bytes:
        with open(self._join(name), "rb") as file:
            return file.read()

    def names(self) -> list[str]:
        return steps.names(self.path)

    def make_submit_function(self, *, durable: bool, engine: Engine | None) -> Submit:
        def submit(parts: Parts, name: str, owners: Sequence[object]) -> SaveHandle:
            path, chosen_engine = self._join(name), engine_or_default(engine)
            return submit_parts(chosen_engine, parts, path, owners=owners, durable=durable)

        return submit

    def prepare(self, temporary: str, content: bytes, *, durable: bool) -> None:
        todo = [steps.write(self._join(temporary), content, durable=durable)]
        if durable:  # the directory may be new; its entry is in its parent
            todo.append(steps.sync(os.path.dirname(os.path.abspath(self.path))))
        steps.take(todo)

    def commit(self, temporary: str, name: str, *, durable: bool) -> None:
        rename_step = steps.rename(self._join(temporary), self._join(name))
        sync_step = steps.sync(self.path)
        # The first sync makes the entries of all ranks' data files durable before the rename.
        steps.take([sync_step, rename_step, sync_step] if durable else [rename_step])

    def discard(self, temporary: str) -> None:
        self.remove([temporary])

    def remove(self, names: Iterable[str]) -> None:
        for error in steps.carry_out_all_steps([steps.unlink(self._join(name)) for name in names]):
            _log_not_removed(error.filename, error)

    def remove_if_empty(self) -> None:
        with contextlib.suppress(OSError):  # such as ENOTEMPTY
            os.rmdir(self.path)


class Prefix(Location):
    """The objects directly below a URL."""

    # A request may still take effect after the client has given up.
    failed_commit_is_over = False

    def __init__(self, url: str, storage_options: StorageOptions) -> None:
        self._arguments = url, storage_options
        self._store, key = open_store(url, storage_options)
        self._key = key.rstrip("/")
        self.shown = urls.shown(url)
        self.io_mode: IoMode = self._store.client
        self._prepared: dict[str, bytes] = {}  # contents, by temporary name

    def __reduce__(self) -> tuple[object, ...]:
        """Have the process that unpickles this open the store again."""
        return type(self), self._arguments

    def _join(self, name: str) -> str:
        return f"{self._key}/{name}" if self._key else name

    def format_object_url(self, name: str) -> str:
        """Return an object's URL for messages."""
        return self._store.shown(self._join(name))

    def object(self, name: str) -> Object:
        """Look up an object, and return it for reading."""
        return Object(self._store, self._store.find(self._join(name)))

    def begin(self, *, durable: bool) -> None:
        """Do nothing: a store has no directories."""

    def exists(self, name: str) -> bool:
        return self._store.exists(self._join(name))

    def read(self, name: str) -> bytes:
        whole = self.object(name)
        nbytes = whole.found.nbytes
        part = part_bytes(nbytes)
        parts = [whole.get(at, min(at + part, nbytes)) for at in range(0, nbytes, part)]
        whole.refuse_changed()
        return b"".join(parts)

    def names(self) -> list[str]:
        prefix = self._join("")
        return [each.key.removeprefix(prefix) for each in self._store.list(self._key)]

    def make_submit_function(self, *, durable: bool, engine: Engine | None) -> Submit:
        uploads = Uploads()

        def submit(parts: Parts, name: str, owners: Sequence[object]) -> FileUpload:
            key, chosen_engine = self._join(name), engine_or_default(engine)
            return uploads.add(FileUpload(uploads, chosen_engine, parts, self._store, key, owners))

        return submit

    def prepare(self, temporary: str, content: bytes, *, durable: bool) -> None:
        self._prepared[temporary] = content

    def commit(self, temporary: str, name: str, *, durable: bool) -> None:
        content = self._prepared.pop(temporary)
        self._store.put(self._join(name), _parts_of(content), len(content))

    def discard(self, temporary: str) -> None:
        self._prepared.pop(temporary, None)

    def remove(self, names: Iterable[str]) -> None:
        try:
            self._store.delete([self._join(name) for name in names])
        except OSError as error:
            _log_not_removed(self.shown, error)

    def remove_if_empty(self) -> None:
        """Do nothing: a store has no directories."""


def _parts_of(content: bytes) -> Iterator[Buffer]:
    """Yield the content in parts, as `Store.put` takes it."""
    part = part_bytes(len(content))
    for at in range(0, len(content), part):
        yield memoryview(content)[at : at + part]


def _log_not_removed(what: object, error: OSError) -> None:
    """Log that a file, or files below a URL, could not be removed."""
    log.warning("stillframe: %s is not needed and could not be removed: %s", what, error)
