"""`Store`: one interface, with the same errors, to the stores of all clients."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from stillframe import _core
from stillframe._base import threads
from stillframe._base.event import Event
from stillframe._base.urls import Url
from stillframe._remote.redact import failure, secrets_of
from stillframe.errors import ForkError

log = logging.getLogger("stillframe")

T = TypeVar("T")
Client = Literal["obstore", "fsspec"]
Buffer: TypeAlias = Any  # collections.abc.Buffer, since Python 3.12

MIB = 1 << 20
PART_BYTES = 16 * MIB
MOST_PARTS = 9_500  # of one object; a little below the 10,000 that S3 allows
SLOW_S = 10.0  # a longer wait for the store is logged
STALE_S = 24 * 3600.0  # an unfinished upload of this age was left by a killed process


class Found(NamedTuple):
    """An object in a store."""

    key: str
    nbytes: int
    modified_s: float  # the time of the last change in seconds since 1970; 0.0: not known
    version: str = ""  # the ETag, which every change changes; "": not known


class KeyGroup(NamedTuple):
    """All keys in one directory with one suffix, such as those of one training's checkpoints."""

    directory: str
    suffix: str  # such as ".pt"


def key_group_of(key: str) -> KeyGroup:
    directory, _, name = key.rpartition("/")
    return KeyGroup(directory, os.path.splitext(name)[1])


def part_bytes(nbytes: int | None) -> int:
    """Return the size of the parts of an object of `nbytes` (None: not known), a multiple of a
    MiB."""
    least_mib = -(-(nbytes or 0) // (MOST_PARTS * MIB))  # rounded up
    return max(PART_BYTES, least_mib * MIB)


class Store(ABC):
    """A bucket, or another root of objects. Several threads may use it.

    An error of the store is a FileNotFoundError, a PermissionError or another OSError. It names the
    URL, the operation and the reason, without credentials.

    In the main thread, Ctrl-C ends every wait at once. Only `put` notices Ctrl-C later, when the
    client takes the next piece.
    """

    client: Client

    def __init__(self, url: Url, options: Mapping[str, Any]) -> None:
        self._root = url.root
        self._secrets = secrets_of(options, url.user)
        self._generation = _core.fork_generation()
        # the groups for which `_remove_stale_uploads` was called
        self._cleaned: set[KeyGroup] = set()

    def put(self, key: str, pieces: Iterable[Buffer], nbytes: int | None = None) -> None:
        """Upload an object: all of `pieces`, or nothing.

        The calling thread iterates over `pieces`, which must not start another upload. obstore does
        not copy a piece: it holds the piece until the store has acknowledged it, at most five parts
        at a time.

        The first upload to each `KeyGroup` is followed by `_remove_stale_uploads`.

        Args:
            pieces: Contiguous buffers of bytes.
            nbytes: The size of the object in bytes, if it is known.

        Raises:
            Exception: What `pieces` raises, unchanged. The store keeps the old object.
            OSError: The store refused. The store keeps the old object, except if its answer to the
                last request was lost and it cannot be asked again.
        """
        feed = PieceIterator(pieces, self.shown(key))
        _this_thread.uploads += 1
        try:
            self._call_client("the upload", key, lambda: self._put(key, feed, nbytes))
        except BaseException:
            # An error of `pieces` makes the client fail too. Then the error of `pieces` is raised.
            if feed.error is None:
                raise
        finally:
            _this_thread.uploads -= 1
            feed.close()
        if feed.error is not None:
            raise feed.error
        group = key_group_of(key)
        if group not in self._cleaned:
            self._cleaned.add(group)
            with contextlib.suppress(Exception):  # the upload has succeeded all the same
                self._remove_stale_uploads(key)

    def get(self, key: str, start: int, end: int, version: str = "") -> Buffer:
        """Return the bytes from `start` to `end`, exactly `end - start` of them.

        Args:
            version: The object's version, from `find`; "" if it is not known.

        Raises:
            OSError: The store refused, or the object has another version (errno ESTALE).
        """
        if end <= start:
            return b""
        doing = f"reading bytes {start} to {end}"
        data = self._call_client_interruptibly(
            doing, key, lambda: self._get(key, start, end, version)
        )
        nbytes = memoryview(data).nbytes
        if nbytes != end - start:
            raise OSError(errno.EIO, f"{doing}: the store sent {nbytes} bytes", self.shown(key))
        return data

    def find(self, key: str) -> Found:
        """Return the object of a key. Raise FileNotFoundError if there is none."""
        return self._call_client_interruptibly("looking it up", key, lambda: self._find(key))

    def exists(self, key: str) -> bool:
        try:
            self.find(key)
        except FileNotFoundError:
            return False
        return True

    def list(self, prefix: str) -> Iterator[Found]:
        """Yield the objects below a directory: "a/b" is below the prefix "a", "ab" is not."""
        pages = self._list(prefix.strip("/"))
        while True:
            page = self._call_client_interruptibly("listing", prefix, lambda: next(pages, None))
            if page is None:
                return
            yield from page

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. A missing object is no error."""
        to_delete = tuple(keys)
        if to_delete:
            self._call_client_interruptibly(
                "deleting", to_delete[0], lambda: self._delete(to_delete)
            )

    def shown(self, key: str) -> str:
        """Return the object's URL without credentials."""
        return f"{self._root}/{key}"

    # The next methods call the client and may raise its errors. `_list` yields pages.

    @abstractmethod
    def _put(self, key: str, feed: PieceIterator, nbytes: int | None) -> None: ...

    @abstractmethod
    def _get(self, key: str, start: int, end: int, version: str) -> Buffer: ...

    @abstractmethod
    def _find(self, key: str) -> Found: ...

    @abstractmethod
    def _list(self, prefix: str) -> Iterator[Sequence[Found]]: ...

    @abstractmethod
    def _delete(self, keys: Iterable[str]) -> None: ...

    @abstractmethod
    def _remove_stale_uploads(self, key: str) -> None:
        """Remove what killed processes have left of uploads to the key's group. May raise any
        error."""

    def _call_client_interruptibly(self, doing: str, key: str, call: Callable[[], T]) -> T:
        """Call the client like `_call_client`, on another thread if needed."""
        return self._call_client(doing, key, lambda: _call_on_other_thread_if_needed(call))

    def _call_client(self, doing: str, key: str, call: Callable[[], T]) -> T:
        """Call the client and translate its error. `doing` names the operation in the message."""
        if self._generation != _core.fork_generation():
            raise fork_error()
        try:
            return call()
        except BaseException as error:
            # obstore raises it for a panic in its Rust code, and it is no Exception.
            is_panic = type(error).__name__ == "PanicException"
            if not isinstance(error, Exception) and not is_panic:
                raise
            translated = failure(doing, self.shown(key), error, self._secrets)
        # Raised outside the handler, so that it does not refer to an error with credentials.
        raise translated


class PieceIterator:
    """The pieces of an object, which a client takes one after the other."""

    def __init__(self, pieces: Iterable[Buffer], shown: str) -> None:
        self._iterator = iter(pieces)
        self._shown = shown
        self._last_piece_s = math.inf  # when the client took a piece last, by time.monotonic()
        self.error: BaseException | None = None  # the exception that the iterator raised
        self.ended = False  # the client has taken all pieces

    def __iter__(self) -> Iterator[Buffer]:
        return self

    def __next__(self) -> Buffer:
        waited_s = time.monotonic() - self._last_piece_s
        if waited_s > SLOW_S:  # no client reports its own retries
            log.info(
                "stillframe: %s: the store acknowledged no part for %.0f s; failed requests are"
                " tried again",
                self._shown,
                waited_s,
            )
        try:
            piece = next(self._iterator)
            self._last_piece_s = time.monotonic()
            return piece
        except StopIteration:
            self.ended = True
            raise
        except BaseException as error:
            self.error = error
            raise

    def close(self) -> None:
        """Close a generator, so that it releases its pieces."""
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()


class _ThreadLocalUploads(threading.local):
    uploads = 0  # the number of `Store.put` calls that run on this thread


_this_thread = _ThreadLocalUploads()


def _call_on_other_thread_if_needed(call: Callable[[], T]) -> T:
    """Make a call, and return its result or raise its error.

    Another thread is needed:
    - in the main thread, so that Ctrl-C ends the wait at once
    - inside an upload, because obstore cannot be called while it asks this thread for a piece
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main and not _this_thread.uploads:
        return call()
    returned = Event()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)
        finally:
            returned.set()

    try:
        threads.start(threading.Thread(target=run, name="sf-store", daemon=True))
    except (OSError, RuntimeError):  # the interpreter is exiting, or there are too many threads
        return call()
    returned.wait()
    if errors:
        raise errors.pop()
    return results.pop()


def fork_error() -> ForkError:
    return ForkError(
        "the process that this one was forked from has used object stores, and the threads of their"
        " client do not exist here. Start this process with multiprocessing's 'spawn' or"
        " 'forkserver'"
    )
