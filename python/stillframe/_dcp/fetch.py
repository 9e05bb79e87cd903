"""Items of a checkpoint in a store, fetched before they are needed.

A *stretch* is a range of one object with one item, or with several that are close to each other. It
is fetched into a file in memory, which the check of CRCs and torch.load read.

    fetched, checked ──▶ kept ──read──▶ freed                          while memory is left
                    └──▶ freed ··· fetched and checked again ──read──▶ freed      otherwise
"""

from __future__ import annotations

import contextlib
import io
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from stillframe import _core
from stillframe._base import budget
from stillframe._dcp.check import damage_of_item, shortened
from stillframe._dcp.location import Prefix
from stillframe._remote.file import THREADS, Fetcher, Object, Range
from stillframe.errors import CorruptCheckpointError

_File: TypeAlias = io.FileIO | io.BytesIO

_RANGE_BYTES = 16 << 20  # the length of one request
_STRETCH_BYTES = 16 << 20  # the longest stretch of several items
_GAP_BYTES = 64 << 10  # the longest gap between two items of a stretch
_AHEAD_BYTES = 256 << 20  # the most bytes that are fetched ahead
_AHEAD_FILES = 64  # the most stretches that are fetched ahead; each has a descriptor


@dataclass(frozen=True, order=True)
class Item:
    """An item of a data file. Items sort by file and offset."""

    file: str  # the name of the file, below the checkpoint's URL
    offset: int  # in the file, in bytes
    length: int  # in bytes
    name: str  # for messages
    is_checkable: bool  # no extension of DCP has transformed the item's archive

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass
class MergedItemRange:
    """Bytes `start` to `end` of a data file, with the items in them."""

    items: list[Item]
    start: int = field(init=False)
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self.start, self.end = self.items[0].offset, self.items[0].end

    @property
    def file(self) -> str:
        return self.items[0].file

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    def try_to_add(self, item: Item) -> bool:
        """Add an item that is close enough. Return whether the item was added."""
        end = max(self.end, item.end)
        is_near = item.file == self.file and item.offset - self.end <= _GAP_BYTES
        if not is_near or end - self.start > _STRETCH_BYTES:
            return False
        self.items.append(item)
        self.end = end
        return True


def merge_nearby_items(items: Iterable[Item]) -> list[MergedItemRange]:
    """Return the stretches of all items, sorted by file and offset."""
    made: list[MergedItemRange] = []
    for item in sorted(items):
        was_added = bool(made) and made[-1].try_to_add(item)
        if not was_added:
            made.append(MergedItemRange([item]))
    return made


class ItemPrefetcher:
    """The items that one load needs, as a context manager. The end of the block frees the memory,
    and raises OSError if an object was replaced meanwhile. With `verify`, compare all CRCs."""

    def __init__(self, location: Prefix, items: Iterable[Item], *, verify: bool) -> None:
        self._location = location
        self._stretches = merge_nearby_items(items)
        self._verify = verify
        self._kept: dict[int, io.BytesIO] = {}  # fetched stretches, by number
        self._fetcher = Fetcher()
        # The threads that look up sizes and versions of objects.
        self._lookup_threads = ThreadPoolExecutor(THREADS, thread_name_prefix="sf-look-up")
        self._objects: dict[str, Future[Object]] = {}  # by file

    def __enter__(self) -> ItemPrefetcher:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._kept.clear()
        self._fetcher.end()
        self._lookup_threads.shutdown(wait=False, cancel_futures=True)
        if kind is None:  # the block has raised no error
            self._refuse_changed()

    def check(self) -> None:
        """Check every item. Keep the first stretches, in at most a quarter of the free memory.

        Raises:
            CorruptCheckpointError: An item is damaged, or its file is missing.
            OSError: The store does not answer.
        """
        half_of_free = budget.measure(held=0).shared  # `measure` leaves half to other uses
        room = half_of_free // 2
        all_numbers = list(range(len(self._stretches)))
        for number, file in self._fetch(all_numbers):
            room -= self._stretches[number].nbytes
            if room >= 0:
                self._kept[number] = io.BytesIO(file.readall())  # a BytesIO needs no descriptor
        self._refuse_changed()

    def open(self, file: str) -> io.RawIOBase:
        """Return a data file of which only the items can be read, in the order of their offsets."""
        numbers = [n for n, stretch in enumerate(self._stretches) if stretch.file == file]
        return _PartialDataFile(self._read(numbers))

    def _read(self, numbers: list[int]) -> Iterator[tuple[MergedItemRange, _File]]:
        """Yield each stretch with a file of its bytes, which is valid until the next one."""
        missing = [number for number in numbers if number not in self._kept]
        with contextlib.closing(self._fetch(missing)) as fetching:
            for number in numbers:
                file: _File | None = self._kept.pop(number, None)
                if file is None:
                    _, file = next(fetching)
                yield self._stretches[number], file

    def _fetch(self, numbers: list[int]) -> Generator[tuple[int, io.FileIO]]:
        """Fetch stretches ahead. Yield the number of each stretch with a file of its bytes, which
        is valid until the next one."""
        not_requested = deque(numbers)
        # The requested stretches, each with the results of `_request`.
        requested: deque[tuple[MergedItemRange, int, int]] = deque()
        requested_nbytes = 0
        # Look up all objects at the same time.
        for file in {self._stretches[number].file for number in numbers}:
            if file not in self._objects:
                self._objects[file] = self._lookup_threads.submit(self._location.object, file)
        try:
            for number in numbers:
                # Request at least one stretch, and more up to the limits.
                while not_requested:
                    is_full = requested_nbytes >= _AHEAD_BYTES or len(requested) >= _AHEAD_FILES
                    if requested and is_full:
                        break
                    stretch = self._stretches[not_requested.popleft()]
                    file_number, fd = self._request(stretch)
                    requested.append((stretch, file_number, fd))
                    requested_nbytes += stretch.nbytes
                stretch, file_number, fd = requested[0]
                self._wait(stretch, fd)
                with io.FileIO(fd, closefd=False) as memory:  # the fetcher owns `fd`
                    yield number, memory
                self._fetcher.close(file_number)
                requested.popleft()
                requested_nbytes -= stretch.nbytes
        finally:
            for _, file_number, _ in requested:
                self._fetcher.close(file_number)

    def _request(self, stretch: MergedItemRange) -> tuple[int, int]:
        """Have a stretch fetched into a file. Return the file's number, for `Fetcher.close`, and
        its descriptor. Raise CorruptCheckpointError like `_get_checked_object`."""
        data = _get_checked_object(self._location, stretch, self._objects[stretch.file])
        wanted = Range(data, stretch.start, stretch.end, _RANGE_BYTES)
        number, fd = self._fetcher.open(wanted)
        _core.arrive(fd, 0)  # requests all bytes, without waiting for them
        return number, fd

    def _wait(self, stretch: MergedItemRange, fd: int) -> None:
        """Wait until a stretch is fetched, and with `verify=True` compare its CRCs. Raise OSError
        if the store did not give the bytes, and CorruptCheckpointError if an item is damaged."""
        try:
            _core.arrive(fd)
        except OSError as error:
            # prefer the error of the failed request, which says more than the core's
            raise self._objects[stretch.file].result().failure or error from None
        if self._verify:
            _refuse_damaged(self._location, stretch, fd)

    def _refuse_changed(self) -> None:
        """Raise OSError if an object was replaced while it was read."""
        for data in self._objects.values():
            data.result().refuse_changed()


def _get_checked_object(
    location: Prefix, stretch: MergedItemRange, found: Future[Object]
) -> Object:
    """Return the object that a stretch is in, from the future of its look-up. Raise
    CorruptCheckpointError if the object is missing, or ends before the stretch does."""
    path = location.format_object_url(stretch.file)
    try:
        data = found.result()
    except FileNotFoundError:
        content = shortened([item.name for item in stretch.items])
        raise CorruptCheckpointError(f"{path} is missing: it holds {content}") from None
    for item in stretch.items:
        if item.offset < 0 or item.length < 0 or item.end > data.found.nbytes:
            wrong = f"it should reach to byte {item.end}, and the file ends at {data.found.nbytes}"
            raise CorruptCheckpointError(f"{path}: {item.name} is damaged: {wrong}")
    return data


def _refuse_damaged(location: Prefix, stretch: MergedItemRange, fd: int) -> None:
    """Raise CorruptCheckpointError if an item is damaged. The file `fd` begins with the stretch."""
    for item in stretch.items:
        if not item.is_checkable:
            continue
        wrong = damage_of_item(fd, item.offset - stretch.start, item.length)
        if wrong is not None:
            path = location.format_object_url(stretch.file)
            raise CorruptCheckpointError(f"{path}: {item.name} is damaged: {wrong}")


class _PartialDataFile(io.RawIOBase):
    """A data file of which only the stretches can be read, in order."""

    def __init__(self, stretches: Iterator[tuple[MergedItemRange, _File]]) -> None:
        super().__init__()
        self._stretches = stretches
        self._current: tuple[MergedItemRange, _File] | None = None  # the stretch that was read last
        self._offset = 0  # the offset of the next read, in the whole data file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_END:
            raise io.UnsupportedOperation("the end of the file is not fetched")
        self._offset = offset if whence == os.SEEK_SET else self._offset + offset
        return self._offset

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        nr_read = 0
        while nr_read < len(view):
            stretch, file = self._advance_to_current_range()
            nr_left = stretch.end - self._offset
            file.seek(self._offset - stretch.start)
            got = file.readinto(view[nr_read : nr_read + nr_left])
            self._offset += got
            nr_read += got
        return nr_read

    def _advance_to_current_range(self) -> tuple[MergedItemRange, _File]:
        """Return the stretch with the byte at `_offset`, and its file. Drop earlier stretches."""
        while True:
            if self._current is not None:
                stretch, _ = self._current
                if stretch.start <= self._offset < stretch.end:
                    return self._current
            self._current = next(self._stretches)

    def close(self) -> None:
        close = getattr(self._stretches, "close", None)  # a generator's `close` frees its files
        if close is not None:
            close()
        super().close()
