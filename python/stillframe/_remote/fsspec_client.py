"""Stores of all schemes that obstore does not serve, through fsspec."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from stillframe._base.urls import Url
from stillframe._remote.redact import failure, redact
from stillframe._remote.store import STALE_S, Buffer, Found, PieceIterator, Store, part_bytes
from stillframe.errors import StillframeError

T = TypeVar("T")

log = logging.getLogger("stillframe")

_TEMPORARY = ".stillframe-tmp"


class FsspecStore(Store):
    """A store behind fsspec.

    An object is written under a temporary name, and then renamed, or copied in the store.
    """

    client = "fsspec"

    def __init__(self, url: Url, options: Mapping[str, Any], user_url: str) -> None:
        """Open the store. `user_url` is the URL as the user gave it."""
        super().__init__(url, options)
        scheme, _, rest = user_url.partition("://")
        host = f"{url.user}@{url.bucket}" if url.user else url.bucket
        if url.account:  # az://container@account.dfs.core.windows.net/...
            account_host = rest.partition("@")[2].partition("/")[0]
            host = f"{url.bucket}@{account_host}"
        self._base = f"{scheme}://{host}"
        self._query = f"?{url.query}" if url.query else ""
        self._fs = self._open(options)
        # File systems without async calls, such as FTP, may take only one call at a time.
        self._call_lock = contextlib.nullcontext() if self._fs.async_impl else threading.RLock()

    def _open(self, options: Mapping[str, Any]) -> Any:
        import fsspec

        failed: Exception
        try:
            url = f"{self._base}/{self._query}"
            return fsspec.core.url_to_fs(url, skip_instance_cache=True, **options)[0]
        except ImportError as error:
            failed = StillframeError(f"{self._root}: {redact(str(error), self._secrets)}")
        except (TypeError, ValueError) as error:
            failed = ValueError(f"{self._root}: {redact(str(error), self._secrets)}")
        except Exception as error:
            failed = failure("opening the store", self._root, error, self._secrets)
        # Raised outside the handlers, so that it does not refer to fsspec's error with credentials.
        raise failed

    def _call(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Call fsspec, one call at a time if the file system needs that."""
        with self._call_lock:
            return function(*args, **options)

    def _path(self, key: str) -> str:
        """Return the path by which fsspec knows an object."""
        return str(self._fs._strip_protocol(f"{self._base}/{key}{self._query}"))

    def _put(self, key: str, feed: PieceIterator, nbytes: int | None) -> None:
        path = self._path(key)
        temporary = f"{path}.{uuid.uuid4().hex}{_TEMPORARY}"
        parent = self._fs._parent(path)
        with contextlib.suppress(Exception):  # a store may have no directories
            self._call(self._fs.makedirs, parent, exist_ok=True)
        try:
            file = self._call(self._fs.open, temporary, "wb", block_size=part_bytes(nbytes))
            try:
                for piece in feed:
                    self._call(file.write, piece)
                    del piece  # the next piece may need its memory
            finally:
                self._call(file.close)
            self._move(temporary, path)
        except BaseException:
            with contextlib.suppress(Exception):
                self._call(self._fs.rm_file, temporary)
            raise

    def _move(self, source: str, target: str) -> None:
        """Move an object in the store, by a rename if the file system can, else by a copy."""
        from fsspec import AbstractFileSystem

        can_rename = type(self._fs).mv is not AbstractFileSystem.mv
        if can_rename:
            self._call(self._fs.mv, source, target)
            return
        # The default `mv` would take brackets in a name for a pattern.
        self._call(self._fs.cp_file, source, target)
        self._call(self._fs.rm_file, source)

    def _get(self, key: str, start: int, end: int, version: str) -> Buffer:
        return self._call(self._fs.cat_file, self._path(key), start=start, end=end)

    def _find(self, key: str) -> Found:
        self._fs.invalidate_cache()
        info = self._call(self._fs.info, self._path(key))
        if info.get("type") == "directory":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return _parse_object_info(info, key)

    def _list(self, prefix: str) -> Iterator[Sequence[Found]]:
        self._fs.invalidate_cache()
        root = self._path("").rstrip("/") + "/"
        directory = f"{self._path(prefix).rstrip('/')}/" if prefix else root
        found: dict[str, Any] = {}  # fsspec's descriptions, by path
        with contextlib.suppress(FileNotFoundError):
            found = self._call(self._fs.find, directory.rstrip("/"), detail=True)
        yield [
            _parse_object_info(info, path.removeprefix(root))
            for path, info in sorted(found.items())
            if path.startswith(directory) and not path.endswith(_TEMPORARY)
        ]

    def _delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                self._call(self._fs.rm_file, self._path(key))

    def _remove_stale_uploads(self, key: str) -> None:
        directory = self._fs._parent(self._path(key))
        for info in self._call(self._fs.ls, directory, detail=True):
            path = info["name"]
            modified_s = _parse_object_info(info, path).modified_s
            is_stale = 0 < modified_s < time.time() - STALE_S  # 0.0: the time is not known
            if is_stale and path.endswith(_TEMPORARY):
                self._call(self._fs.rm_file, path)
                log.info("stillframe: removed %s, left by a killed process", path)


def _parse_object_info(info: Mapping[str, Any], key: str) -> Found:
    """Return the `Found` for fsspec's description of an object."""
    # Each file system has its own name for the time, and may give it as seconds.
    names = ("mtime", "LastModified", "last_modified", "modified", "created")
    times = [info[name] for name in names if info.get(name)]
    modified = times[0] if times else None
    modified_s = 0.0  # not known
    if isinstance(modified, datetime):
        modified_s = modified.timestamp()
    elif isinstance(modified, (int, float)):
        modified_s = float(modified)
    return Found(key, int(info.get("size") or 0), modified_s)
