"""`Store`: one interface and one kind of errors for the stores of all clients."""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
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
MOST_PARTS = 9_500  # S3 takes 10,000
SLOW_S = 10.0  # a longer wait for the store is logged


class Found(NamedTuple):
    """An object in a store.

    Attributes:
        modified_s: The time of its last change in seconds since 1970; 0.0 if the store has none.
        version: The ETag, which every change of the object changes; "" if the client has none.
    """

    key: str
    nbytes: int
    modified_s: float
    version: str = ""


def part_bytes(nbytes: int | None) -> int:
    """Return the size of an object's parts in bytes, a multiple of a MiB.

    Args:
        nbytes: The size of the object; None if it is not known.
    """
    least = -(-(nbytes or 0) // MOST_PARTS)  # -(-a // b) is a / b rounded up
    return max(PART_BYTES, -(-least // MIB) * MIB)


class Store(ABC):
    """A bucket, or another root of objects, with its options. Several threads may use it.

    An error of the store is a FileNotFoundError, a PermissionError or another OSError. It names the
    URL, the operation and the reason, without credentials. In the main thread, Ctrl-C ends the wait
    for every operation at once. `put` is an exception: it notices Ctrl-C only when the client takes
    the next piece.

    Attributes:
        client: The library behind it: "obstore" or "fsspec".
    """

    client: Client

    def __init__(self, url: Url, options: Mapping[str, Any]) -> None:
        self._root = url.root
        self._secrets = secrets_of(options, url.user)
        self._generation = _core.fork_generation()

    def put(self, key: str, pieces: Iterable[Buffer], nbytes: int | None = None) -> None:
        """Upload an object: all of `pieces`, or nothing.

        The calling thread iterates over `pieces`, which must not start another upload. obstore does
        not copy a piece, but holds it until the store has acknowledged it: at most five parts.

        Args:
            pieces: Contiguous buffers of bytes.
            nbytes: The size of the object, if it is known: large objects need larger parts.

        Raises:
            Exception: What `pieces` raises, unchanged. The object is the old one.
            OSError: The store refused; see the class. The object is the old one, except if only the
                answer to the last request was lost and the store cannot be asked again.
        """
        feed = Feed(pieces, self.shown(key))
        _this_thread.uploads += 1
        try:
            self._do("the upload", key, lambda: self._put(key, feed, nbytes))
        except BaseException:
            if feed.error is None:  # otherwise the client reports the error of `pieces`
                raise
        finally:
            _this_thread.uploads -= 1
            feed.close()
        if feed.error is not None:
            raise feed.error

    def get(self, key: str, start: int, end: int, version: str = "") -> Buffer:
        """Return the bytes from `start` to `end`, exactly `end - start` of them.

        Args:
            version: The object's version, from `find`; "" if it is not known. If the object has
                another version, OSError with the errno ESTALE is raised.
        """
        if end <= start:
            return b""
        doing = f"reading bytes {start} to {end}"
        read = partial(self._get, key, start, end, version)
        data = self._do(doing, key, lambda: apart(read))
        if (got := memoryview(data).nbytes) != end - start:
            raise OSError(errno.EIO, f"{doing}: the store sent {got} bytes", self.shown(key))
        return data

    def find(self, key: str) -> Found:
        """Return what the store knows of an object; FileNotFoundError if there is none."""
        return self._do("looking it up", key, lambda: apart(partial(self._find, key)))

    def exists(self, key: str) -> bool:
        """Return whether there is an object."""
        try:
            self.find(key)
        except FileNotFoundError:
            return False
        return True

    def list(self, prefix: str) -> Iterator[Found]:
        """Yield the objects below a prefix, which is a directory: "a/b" is below "a", but "ab" is
        not."""
        pages = self._list(prefix.strip("/"))
        while True:
            page = self._do("listing", prefix, lambda: apart(partial(next, pages, None)))
            if page is None:
                return
            yield from page

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. A missing object is no error."""
        some = tuple(keys)
        if some:
            self._do("deleting", some[0], lambda: apart(partial(self._delete, some)))

    def shown(self, key: str) -> str:
        """Return an object's URL for messages, without credentials."""
        return f"{self._root}/{key}"

    # The next methods call the client, and may raise its own errors. `_list` yields pages.

    @abstractmethod
    def _put(self, key: str, feed: Feed, nbytes: int | None) -> None: ...

    @abstractmethod
    def _get(self, key: str, start: int, end: int, version: str) -> Buffer: ...

    @abstractmethod
    def _find(self, key: str) -> Found: ...

    @abstractmethod
    def _list(self, prefix: str) -> Iterator[Sequence[Found]]: ...

    @abstractmethod
    def _delete(self, keys: Iterable[str]) -> None: ...

    def _do(self, doing: str, key: str, call: Callable[[], T]) -> T:
        """Call the client, and translate its error.

        The raised error has no reference to the client's error, whose text may hold credentials.

        Args:
            doing: The operation, for the message.
        """
        if self._generation != _core.fork_generation():
            raise fork_error()
        try:
            return call()
        except BaseException as error:
            # A panic in obstore's Rust code is a BaseException.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            failed = failure(doing, self.shown(key), error, self._secrets)
        raise failed


class Feed:
    """The pieces of an object, which a client takes one after the other.

    Attributes:
        error: The exception that the iterator of the pieces raised; None if it raised none.
        ended: The client has taken the last piece.
    """

    def __init__(self, pieces: Iterable[Buffer], shown: str) -> None:
        self._iterator = iter(pieces)
        self._shown = shown
        # The monotonic time at which the client took the last piece; before the first piece `inf`,
        # so that no wait is counted.
        self._given_at = math.inf
        self.error: BaseException | None = None
        self.ended = False

    def __iter__(self) -> Iterator[Buffer]:
        return self

    def __next__(self) -> Buffer:
        waited_s = time.monotonic() - self._given_at
        if waited_s > SLOW_S:
            # This is logged here because no client reports the requests that it retries.
            log.info(
                "stillframe: %s: the store acknowledged no part for %.0f s; failed requests are"
                " tried again",
                self._shown,
                waited_s,
            )
        try:
            piece = next(self._iterator)
            self._given_at = time.monotonic()
            return piece
        except StopIteration:
            self.ended = True
            raise
        except BaseException as error:
            self.error = error
            raise

    def close(self) -> None:
        """End the iterator, if it is a generator, so that it releases its pieces."""
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()


class _ThisThread(threading.local):
    uploads = 0  # the number of calls of `Store.put` that this thread is in


_this_thread = _ThisThread()


def apart(call: Callable[[], T]) -> T:
    """Make a call, on another thread if needed, and return its result.

    Another thread is needed in the main thread, so that Ctrl-C ends the wait at once. It is also
    needed inside an upload: obstore cannot be called on a thread on which it is asking for a piece.
    """
    if threading.current_thread() is not threading.main_thread() and not _this_thread.uploads:
        return call()
    over = Event()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)
        finally:
            over.set()

    try:
        threads.start(threading.Thread(target=run, name="sf-store", daemon=True))
    except (OSError, RuntimeError):  # the interpreter is exiting, or there are too many threads
        return call()
    over.wait()
    if errors:
        raise errors.pop()
    return results.pop()


def fork_error() -> ForkError:
    """Return the error for a client whose threads are in the parent process."""
    return ForkError(
        "the process that this one was forked from has used object stores, and the threads of their"
        " client do not exist here. Start this process with multiprocessing's 'spawn' or"
        " 'forkserver'"
    )
