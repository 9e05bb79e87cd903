"""Stores of objects: obstore for S3, Google Cloud Storage and Azure, fsspec for other schemes.

An object is the old one or the new one, never a mixture. A *put* uploads the pieces of an iterator
and makes the object visible at the end. If the iterator raises, nothing is left of the upload.

obstore tries a failed request again by itself, with growing pauses: `RETRIES` times within
`RETRY_S`. It reports the number of tries only in the error of the last one, and offers no hook or
log, so single tries cannot be logged. fsspec's file systems have rules of their own.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from stillframe import _core
from stillframe._base import urls
from stillframe._base.urls import Url
from stillframe._remote.options import config_of
from stillframe._remote.redact import failure, redact, secrets_of
from stillframe.errors import ForkError, StillframeError

T = TypeVar("T")
Client = Literal["obstore", "fsspec"]
Buffer: TypeAlias = Any  # collections.abc.Buffer is Python 3.12's

log = logging.getLogger("stillframe")

MIB = 1 << 20
PART_BYTES = 16 * MIB
MAX_PARTS = 9_500  # S3 takes 10,000
PARTS_AT_A_TIME = 4
WHOLE_BYTES = MIB  # an object up to this size goes up in one request
RETRIES = 10
RETRY_S = 180.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 15.0
REQUEST_S = 120.0  # for a request of PART_BYTES; larger parts have more time
KEPT = 8  # open stores

_OBSTORE = ("s3", "gs", "az")
_EXTRA = 'pip install "stillframe[remote]"'
_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.stillframe-tmp$")


class Found(NamedTuple):
    """An object in a store.

    Attributes:
        modified_s: The time of its last change in seconds since 1970; 0.0 if the store tells none.
        version: What changes with the object: its ETag, or "" if the client tells none.
    """

    key: str
    nbytes: int
    modified_s: float
    version: str = ""


def part_bytes(nbytes: int | None) -> int:
    """Return the size of the parts of an object of `nbytes`, or of unknown size."""
    if nbytes is None:
        return PART_BYTES
    return max(PART_BYTES, math.ceil(math.ceil(nbytes / MAX_PARTS) / MIB) * MIB)


class Store(ABC):
    """A bucket, or another root of objects, with its options. Several threads may use it.

    Each error is an OSError that names the URL, the operation and the client's reason, without
    credentials: FileNotFoundError, PermissionError, or else OSError.

    Attributes:
        client: The library behind it, "obstore" or "fsspec".
    """

    client: Client

    def __init__(self, url: Url, options: Mapping[str, Any]) -> None:
        self._root = url.root
        self._secrets = secrets_of(options, url.user)
        self._generation = _core.fork_generation()

    def put(self, key: str, pieces: Iterable[Buffer], nbytes: int | None = None) -> None:
        """Upload an object: all of `pieces`, or nothing.

        The pieces are read on this thread. Each is held until the store has acknowledged it; with
        obstore these are at most `PARTS_AT_A_TIME` + 1 parts.

        Args:
            pieces: One-dimensional buffers of bytes.
            nbytes: The size of the object, if it is known: larger objects need larger parts.

        Raises:
            Exception: An exception of `pieces` is raised as it is. The object is the old one.
            OSError: See the class.
        """
        feed = _Feed(pieces)
        try:
            self._do("uploading it", key, lambda: self._put(key, feed, nbytes))
        except BaseException:
            if feed.error is None:
                raise
        finally:
            feed.close()
        if feed.error is not None:
            raise feed.error

    def get(self, key: str, start: int, end: int, version: str = "") -> Buffer:
        """Return the bytes from `start` to `end` of an object, exactly `end - start` of them.

        Args:
            version: Of `find`: another version of the object is an error, with `errno.ESTALE`.
        """
        if end <= start:
            return b""
        doing = f"reading its bytes {start} to {end}"
        data = self._do(doing, key, lambda: self._get(key, start, end, version))
        if memoryview(data).nbytes != end - start:
            n = memoryview(data).nbytes
            raise OSError(errno.EIO, f"{doing}: the store sent {n} bytes", self.shown(key))
        return data

    def find(self, key: str) -> Found:
        """Return what the store tells of an object."""
        return self._do("looking for it", key, lambda: self._find(key))

    def size(self, key: str) -> int:
        """Return the number of bytes of an object."""
        return self.find(key).nbytes

    def list(self, prefix: str) -> Iterator[Found]:
        """Yield the objects below a prefix, which is a directory: "a" holds "a/b" but not "ab"."""
        pages = self._do("listing it", prefix, lambda: iter(self._list(prefix)))
        while page := self._do("listing it", prefix, lambda: next(pages, None)):
            yield from page

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. A missing one is no error."""
        some = list_of(keys)
        if some:
            self._do("deleting it", some[0], lambda: self._delete(some))

    def shown(self, key: str) -> str:
        """Return the URL of an object for messages."""
        return f"{self._root}/{key}"

    @abstractmethod
    def _put(self, key: str, feed: _Feed, nbytes: int | None) -> None: ...

    @abstractmethod
    def _get(self, key: str, start: int, end: int, version: str) -> Buffer: ...

    @abstractmethod
    def _find(self, key: str) -> Found: ...

    @abstractmethod
    def _list(self, prefix: str) -> Iterable[Iterable[Found]]: ...

    @abstractmethod
    def _delete(self, keys: Iterable[str]) -> None: ...

    def _do(self, doing: str, key: str, call: Callable[[], T]) -> T:
        """Call the client. Its error is raised as one of ours, without a reference to the client's:
        that may hold credentials."""
        if self._generation != _core.fork_generation():
            raise _fork_error()
        try:
            return call()
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            failed = failure(doing, self.shown(key), error, self._secrets)
        raise failed


def list_of(keys: Iterable[str]) -> list[str]:
    return [*keys]


class _Feed:
    """The pieces of an object, and the exception that they ended with."""

    def __init__(self, pieces: Iterable[Buffer]) -> None:
        self._pieces = pieces
        self._iterator = iter(pieces)
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[Buffer]:
        return self

    def __next__(self) -> Buffer:
        try:
            return next(self._iterator)
        except StopIteration:
            raise
        except BaseException as error:
            self.error = error
            raise

    def close(self) -> None:
        """Let a generator go, with the buffers that it holds."""
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()


# ---- obstore ----


_runtime: int | None = None  # the fork generation in which obstore's threads were started


class _ObstoreStore(Store):
    client: Client = "obstore"

    def __init__(self, url: Url, options: Mapping[str, Any]) -> None:
        global _runtime
        super().__init__(url, options)
        if _runtime not in (None, self._generation):
            raise _fork_error()
        self._url = url.root if not url.account else f"az://{url.bucket}"
        self._config = config_of(url.scheme, options)
        if url.account:
            self._config.values.setdefault("account_name", url.account)
        self._lock = threading.Lock()
        self._clients: dict[int, Any] = {}
        self._client(PART_BYTES)
        _runtime = self._generation

    def _client(self, part: int) -> Any:
        """Return the client for requests of up to `part` bytes, which have time accordingly."""
        with self._lock:
            if part not in self._clients:
                self._clients[part] = self._open(part)
            return self._clients[part]

    def _open(self, part: int) -> Any:
        import obstore.store

        seconds = REQUEST_S * max(1.0, part / PART_BYTES)
        try:
            return obstore.store.from_url(
                self._url,
                config=self._config.values,
                client_options={"timeout": timedelta(seconds=seconds), **self._config.client},
                retry_config={
                    "max_retries": RETRIES,
                    "retry_timeout": timedelta(seconds=max(RETRY_S, seconds)),
                    "backoff": {
                        "init_backoff": timedelta(seconds=FIRST_PAUSE_S),
                        "max_backoff": timedelta(seconds=LONGEST_PAUSE_S),
                        "base": 2,
                    },
                },
                credential_provider=self._config.provider,
            )
        except Exception as error:
            cause = redact(str(error), self._secrets)
        raise ValueError(f"storage_options of {self._root}: {cause}")

    def _put(self, key: str, feed: _Feed, nbytes: int | None) -> None:
        import obstore

        if nbytes is not None and nbytes <= WHOLE_BYTES:
            obstore.put(self._client(PART_BYTES), key, b"".join(feed), use_multipart=False)
            return
        part = part_bytes(nbytes)
        obstore.put(
            self._client(part),
            key,
            feed,
            use_multipart=True,
            chunk_size=part,
            max_concurrency=PARTS_AT_A_TIME,
        )

    def _get(self, key: str, start: int, end: int, version: str) -> Buffer:
        import obstore

        client = self._client(PART_BYTES)
        if not version:
            return obstore.get_range(client, key, start=start, end=end)
        options: Any = {"range": (start, end), "if_match": version}
        try:
            return obstore.get(client, key, options=options).bytes()
        except obstore.exceptions.PreconditionError:
            pass
        raise OSError(errno.ESTALE, "the object was replaced while it was read")

    def _find(self, key: str) -> Found:
        import obstore

        return _found(obstore.head(self._client(PART_BYTES), key), key)

    def _list(self, prefix: str) -> Iterable[Iterable[Found]]:
        import obstore

        for page in obstore.list(self._client(PART_BYTES), prefix=prefix or None):
            yield [_found(each, each["path"]) for each in page]

    def _delete(self, keys: Iterable[str]) -> None:
        import obstore

        client = self._client(PART_BYTES)
        some = [*keys]
        try:
            obstore.delete(client, some)
        except FileNotFoundError:
            for key in some:
                with suppress(FileNotFoundError):
                    obstore.delete(client, key)


def _found(meta: Any, key: str) -> Found:
    return Found(key, meta["size"], meta["last_modified"].timestamp(), meta["e_tag"] or "")


# ---- fsspec ----


class _FsspecStore(Store):
    client: Client = "fsspec"

    def __init__(self, url: Url, options: Mapping[str, Any], given: str) -> None:
        import fsspec

        super().__init__(url, options)
        self._given = given.partition("?")[0][: -len(url.path) or None].rstrip("/")
        self._query = f"?{url.query}" if url.query else ""
        try:
            self._fs, _ = fsspec.core.url_to_fs(given, skip_instance_cache=True, **options)
            return
        except ImportError as error:
            cause, kind = redact(str(error), self._secrets), "missing"
        except (ValueError, TypeError) as error:
            cause, kind = redact(str(error), self._secrets), "unknown"
        except Exception as error:
            raised = failure("opening the store", self._root, error, self._secrets)
            cause, kind = "", "failed"
        if kind == "missing":
            raise StillframeError(f"{self._root}: no client for this store: {cause}")
        if kind == "unknown":
            raise ValueError(f"{self._root}: {cause}")
        raise raised

    def _path(self, key: str) -> str:
        return str(self._fs._strip_protocol(f"{self._given}/{key}{self._query}"))

    def _put(self, key: str, feed: _Feed, nbytes: int | None) -> None:
        from fsspec.spec import AbstractFileSystem

        path = self._path(key)
        parent = path.rpartition("/")[0]
        with suppress(Exception):  # a store without directories needs none
            self._fs.makedirs(parent, exist_ok=True)
        temporary = f"{path}.{uuid.uuid4().hex}.stillframe-tmp"
        renames = type(self._fs).mv is not AbstractFileSystem.mv
        try:
            with self._fs.open(temporary, "wb", block_size=part_bytes(nbytes)) as file:
                for piece in feed:
                    file.write(piece)
            if renames:
                self._fs.mv(temporary, path)
            else:
                self._fs.cp_file(temporary, path)
                self._fs.rm_file(temporary)
        except BaseException:
            with suppress(Exception):
                self._fs.rm_file(temporary)
            raise

    def _get(self, key: str, start: int, end: int, version: str) -> Buffer:
        return self._fs.cat_file(self._path(key), start=start, end=end)

    def _find(self, key: str) -> Found:
        self._fs.invalidate_cache()
        info = self._fs.info(self._path(key))
        if info.get("type") == "directory":
            raise FileNotFoundError(key)
        return _described(info, key)

    def _list(self, prefix: str) -> Iterable[Iterable[Found]]:
        self._fs.invalidate_cache()
        base = self._path("").rstrip("/") + "/"
        found = self._fs.find(self._path(prefix), detail=True)
        yield [
            _described(info, path.removeprefix(base))
            for path, info in found.items()
            if not _TEMPORARY.search(path)
        ]

    def _delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with suppress(FileNotFoundError):
                self._fs.rm_file(self._path(key))


def _described(info: Mapping[str, Any], key: str) -> Found:
    names = ("mtime", "LastModified", "last_modified", "modified", "created")
    changed = next((info[name] for name in names if info.get(name)), 0.0)
    if isinstance(changed, datetime):
        changed = changed.timestamp()
    seconds = float(changed) if isinstance(changed, (int, float)) else 0.0
    return Found(key, int(info["size"] or 0), seconds)


# ---- open ----

_lock = threading.Lock()
_kept: list[tuple[Any, Store]] = []


def open_store(url: str, storage_options: Mapping[str, Any] | None = None) -> tuple[Store, str]:
    """Return the store that a URL is in, and the object's key there.

    The latest stores are kept, with their connections, while options and environment are the same.

    Args:
        storage_options: As fsspec's file systems for that scheme take them; obstore's own names are
            accepted too. Without them the environment's credentials are used.

    Raises:
        ValueError: It is not such a URL, or an option is unknown.
        StillframeError: No client for the scheme is installed.
        ForkError: The parent process used obstore before this process was forked.
    """
    options = dict(storage_options or {})
    parsed = Url.parse(url)
    shown = urls.shown(url)
    if not parsed.bucket and parsed.scheme in _OBSTORE:
        raise ValueError(f"{shown}: the URL names no bucket")
    given = url[: len(url) - len(parsed.path)] if not parsed.query else url
    wanted = (given, options, _environment(), _core.fork_generation())
    with _lock:
        store = next((store for for_, store in _kept if for_ == wanted), None)
        if store is None:
            store = _open(parsed, options, url)
            _kept.insert(0, (wanted, store))
            del _kept[KEPT:]
    return store, parsed.path


def _open(url: Url, options: Mapping[str, Any], given: str) -> Store:
    if url.scheme not in _OBSTORE:
        return _FsspecStore(url, options, given)
    try:
        import obstore  # noqa: F401
    except ImportError:
        pass
    else:
        return _ObstoreStore(url, options)
    try:
        return _FsspecStore(url, options, given)
    except StillframeError:
        pass
    raise StillframeError(f"{url.root}: no client for this store is installed: {_EXTRA}")


def _environment() -> dict[str, str]:
    names = ("AWS_", "AZURE_", "GOOGLE_", "GCS_")
    return {name: value for name, value in os.environ.items() if name.startswith(names)}


def _fork_error() -> ForkError:
    return ForkError(
        "the client of this object store was started before fork(), and its threads do not exist in"
        " a forked child. Start the child with multiprocessing's 'spawn' or 'forkserver'"
    )
