"""A remote object, or a range of one, as an open file for the code that reads checkpoints.

The core makes a file in memory whose bytes are still missing (`_core.Arrivals`). Threads of this
module ask the core which bytes a reader needs, and fetch them.

    the core's readers --> Arrivals.next --> Store.get, on a few threads --> Arrivals.put

If an object is replaced meanwhile, the load raises an error and never mixes two versions. Each
request names the version that was found first. If the client knows no versions, the object is
looked up again at the end.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from typing import NamedTuple, Self

from stillframe import _core
from stillframe._base import threads
from stillframe._remote.store import Buffer, Found, Store

log = logging.getLogger("stillframe")

CHUNK_BYTES = 8 << 20  # the length of a request
PEEK_BYTES = 1 << 20  # the length of a request while little of the file is read
THREADS = 8  # a `Fetcher` starts at most this many threads
SLOW_S = 10.0  # longer requests are logged
PATIENCE_S = 1.0  # how long `Fetcher.end` waits for requests under way


class Object:
    """A remote object that is read, in the version that was found first."""

    def __init__(self, store: Store, found: Found) -> None:
        self.found = found  # the object's size and version before the first request
        self.failure: Exception | None = None  # the first error of a request
        self._store = store

    def get(self, start: int, end: int) -> Buffer:
        """Return the bytes from `start` to `end`. Raise OSError if the object was replaced."""
        begun = time.monotonic()
        data = self._store.get(self.found.key, start, end, self.found.version)
        took_s = time.monotonic() - begun
        if took_s > SLOW_S:  # no client reports its own retries
            shown = self._store.shown(self.found.key)
            text = "stillframe: %s: bytes %d to %d took %.0f s; failed requests are tried again"
            log.info(text, shown, start, end, took_s)
        return data

    def refuse_changed(self) -> None:
        """Raise OSError if the object was replaced."""
        if self.found.version:
            return  # each request names the version, so the store refuses it for another object
        if self._store.find(self.found.key) != self.found:
            words = "the object was replaced while it was read: read it again"
            raise OSError(errno.ESTALE, words, self._store.shown(self.found.key))


class Range(NamedTuple):
    """The bytes from `start` to `end` of an object. They are the content of a file in memory."""

    remote: Object
    start: int
    end: int
    chunk_bytes: int  # the length of a request, a multiple of a page

    @property
    def nr_requests(self) -> int:
        return -(-(self.end - self.start) // self.chunk_bytes)  # rounded up


class Fetcher:
    """Threads that fetch the bytes of objects. They start when they are needed."""

    def __init__(self) -> None:
        self._arrivals = _core.Arrivals()
        self._ranges: dict[int, Range] = {}  # the range of each open file, by the file's number
        self._threads: list[threading.Thread] = []

    def __del__(self) -> None:
        self._arrivals.end()

    def open(self, content: Range) -> tuple[int, int]:
        """Open a file in memory. Return its number, which `close` takes, and its descriptor.

        Bytes are fetched when the core needs them. Call `_core.arrive`, which waits for all bytes,
        before other code reads the descriptor.
        """
        number, fd = self._arrivals.open(content.end - content.start, content.chunk_bytes)
        self._ranges[number] = content
        if len(self._threads) < THREADS:
            nr_requests = sum(each.nr_requests for each in self._ranges.values())
            self._start_threads(min(THREADS, nr_requests))
        return number, fd

    def close(self, number: int) -> None:
        self._arrivals.close(number)
        self._ranges.pop(number, None)

    def end(self) -> None:
        """Close all files and end the threads. A thread in a request ends after its answer, for
        which this call does not wait longer than PATIENCE_S."""
        self._arrivals.end()
        deadline = time.monotonic() + PATIENCE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start_threads(self, count: int) -> None:
        """Start threads until there are `count` of them."""
        while len(self._threads) < count:
            # A thread that referred to this object would keep `__del__` from ending the threads.
            arguments = self._arrivals, self._ranges
            thread = threading.Thread(target=_fetch, args=arguments, name="sf-fetch", daemon=True)
            try:
                threads.start(thread)
            except OSError:
                if not self._threads:
                    raise
                return  # fewer threads are enough
            self._threads.append(thread)


def _fetch(arrivals: _core.Arrivals, ranges: dict[int, Range]) -> None:
    """Fetch the bytes that readers wait for, until `Arrivals.end` is called."""
    while (request := arrivals.next()) is not None:
        number, start, end = request  # the file's number, and the wanted range of its bytes
        content = ranges.get(number)
        if content is None:  # the file was closed after `Arrivals.next`
            continue
        remote = content.remote
        try:
            arrivals.put(number, start, remote.get(content.start + start, content.start + end))
        except Exception as error:
            if remote.failure is None:
                remote.failure = error
            arrivals.fail(number)


class RemoteFile:
    """A remote object that is open to read; a context manager. If a request failed, `__exit__`
    raises the error of the request in place of a later error.

    Args:
        peek: Make short requests until `release_memory` is called.
    """

    def __init__(self, fetcher: Fetcher, remote: Object, *, peek: bool = False) -> None:
        nbytes = remote.found.nbytes
        self._fetcher = fetcher
        self._object = remote
        self._range = Range(remote, 0, nbytes, CHUNK_BYTES)
        first_range = Range(remote, 0, nbytes, PEEK_BYTES) if peek else self._range
        # The file's number and descriptor; None after `release_memory`.
        self._opened: tuple[int, int] | None = fetcher.open(first_range)

    def fileno(self) -> int:
        if self._opened is None:
            self._opened = self._fetcher.open(self._range)
        _, fd = self._opened
        return fd

    def release_memory(self) -> None:
        """Give back the memory. Bytes that are read later are fetched again."""
        opened, self._opened = self._opened, None
        if opened is not None:
            number, _ = opened
            self._fetcher.close(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.release_memory()
        if error is not None and not isinstance(error, Exception):
            return  # Ctrl-C ends the block as it is
        try:
            if self._object.failure is not None:
                raise self._object.failure
            self._object.refuse_changed()
        except Exception as object_error:  # raised in place of `error`, if there is one
            for note in getattr(error, "__notes__", ()):  # `error` may be None or without notes
                object_error.add_note(note)
            raise object_error from None
