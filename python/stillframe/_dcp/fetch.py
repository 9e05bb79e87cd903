"""Items of a checkpoint in a store, fetched before they are needed.

Items that are close to each other in one object are fetched together, as a *stretch* of it. Several
threads fetch, and share long stretches. They write the bytes to a file in memory, which the check
of CRCs and torch.load read like any other file.

    fetched ──checked──▶ kept ──read──▶ freed          while there is memory for all items
               └──▶ freed ··· fetched again ──checked, read──▶ freed
"""

from __future__ import annotations

import contextlib
import io
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from stillframe._base import budget
from stillframe._dcp.check import damage_of_item
from stillframe._dcp.location import Prefix
from stillframe._remote.file import Object
from stillframe.errors import CorruptCheckpointError

_THREADS = 8
_RANGE_BYTES = 16 << 20
_STRETCH_BYTES = 16 << 20  # of several items
_GAP_BYTES = 64 << 10  # fetched although nobody needs them: it is faster than another request
_AHEAD_BYTES = 256 << 20


@dataclass(frozen=True, order=True)
class Item:
    """An item of a data file.

    Attributes:
        is_checkable: It is a plain archive, which no extension has transformed.
    """

    file: str
    offset: int
    length: int
    name: str
    is_checkable: bool

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass
class Stretch:
    """Bytes of a data file that are fetched together, with the items in them."""

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
        """Add an item unless it is too far away. Return whether it was added."""
        end = max(self.end, item.end)
        near = item.file == self.file and item.offset - self.end <= _GAP_BYTES
        if not near or end - self.start > _STRETCH_BYTES:
            return False
        self.items.append(item)
        self.end = end
        return True


def stretches_of(items: Iterable[Item]) -> list[Stretch]:
    """Return the stretches of all items, in the order of the files."""
    made: list[Stretch] = []
    for item in sorted(items):
        if not (made and made[-1].try_to_add(item)):
            made.append(Stretch([item]))
    return made


class Fetched:
    """The items that one load needs.

    Args:
        verify: Compare the CRCs of everything that is read.
    """

    def __init__(self, location: Prefix, items: Iterable[Item], *, verify: bool) -> None:
        self._location = location
        self._stretches = stretches_of(items)
        self._verify = verify
        self._kept: dict[int, int] = {}  # descriptors, by the number of the stretch
        self._objects: dict[str, Future[Object]] = {}  # by file

    def __enter__(self) -> Fetched:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for fd in self._kept.values():
            os.close(fd)
        self._kept.clear()
        if kind is None:
            self._refuse_changed()

    def check(self) -> None:
        """Check every item, and keep as many as there is memory for.

        Raises:
            CorruptCheckpointError: An item is damaged, or its file is missing.
            OSError: The store does not answer.
        """
        room = budget.measure(0).shared // 2
        for number, fd in self._fetch([*range(len(self._stretches))]):
            room -= self._stretches[number].nbytes
            if room >= 0:
                self._kept[number] = os.dup(fd)
        self._refuse_changed()

    def open(self, file: str) -> io.RawIOBase:
        """Return a data file that can be read at its items only, in their order."""
        numbers = [n for n, stretch in enumerate(self._stretches) if stretch.file == file]
        return _Stream(self._read(numbers))

    def _read(self, numbers: list[int]) -> Iterator[tuple[Stretch, int]]:
        """Yield stretches with a descriptor of each, which is valid until the next one."""
        missing = [number for number in numbers if number not in self._kept]
        with contextlib.closing(self._fetch(missing)) as fetching:
            for number in numbers:
                if number in self._kept:
                    fd = self._kept.pop(number)
                    try:
                        yield self._stretches[number], fd
                    finally:
                        os.close(fd)
                else:
                    yield self._stretches[number], next(fetching)[1]

    def _fetch(self, numbers: list[int]) -> Generator[tuple[int, int]]:
        """Fetch stretches ahead, and yield the number of each with a descriptor, which is valid
        until the next one."""
        waiting = deque(numbers)
        ahead: deque[tuple[int, int, list[Future[None]]]] = deque()
        nbytes = 0
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="sf-fetch")
        try:
            for file in {self._stretches[number].file for number in numbers}:
                if file not in self._objects:
                    self._objects[file] = pool.submit(self._location.object, file)
            while waiting or ahead:
                while waiting and (not ahead or nbytes < _AHEAD_BYTES):
                    number = waiting.popleft()
                    stretch = self._stretches[number]
                    _refuse_short(self._location, stretch, self._objects[stretch.file])
                    fd = os.memfd_create("stillframe", os.MFD_CLOEXEC)
                    ahead.append((number, fd, []))
                    for at in range(stretch.start, stretch.end, _RANGE_BYTES):
                        end = min(at + _RANGE_BYTES, stretch.end)
                        data = self._objects[stretch.file].result()
                        each = pool.submit(_copy, data, at, end, fd, at - stretch.start)
                        ahead[-1][2].append(each)
                    nbytes += stretch.nbytes
                number, fd, copies = ahead[0]
                for each in copies:
                    each.result()
                if self._verify:
                    _refuse_damaged(self._location, self._stretches[number], fd)
                yield number, fd
                ahead.popleft()
                os.close(fd)
                nbytes -= self._stretches[number].nbytes
        finally:
            pool.shutdown(cancel_futures=True)  # nothing writes to the memory any more
            for _, fd, _ in ahead:
                os.close(fd)

    def _refuse_changed(self) -> None:
        for data in self._objects.values():
            data.result().refuse_changed()


def _copy(data: Object, start: int, end: int, fd: int, offset: int) -> None:
    """Fetch bytes of an object, and write them to memory at `offset`."""
    view = memoryview(data.get(start, end)).cast("B")
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _refuse_short(location: Prefix, stretch: Stretch, data: Future[Object]) -> None:
    path, first = location.shown_of(stretch.file), stretch.items[0].name
    try:
        nbytes = data.result().found.nbytes
    except FileNotFoundError:
        others = len(stretch.items) - 1
        raise CorruptCheckpointError(
            f"{path} is missing: it holds {first}, and {others} more"
        ) from None
    for item in stretch.items:
        if item.offset < 0 or item.length < 0 or item.end > nbytes:
            wrong = f"it should reach to byte {item.end}, and the file ends at {nbytes}"
            raise CorruptCheckpointError(f"{path}: {item.name} is damaged: {wrong}")


def _refuse_damaged(location: Prefix, stretch: Stretch, fd: int) -> None:
    for item in stretch.items:
        if item.is_checkable:
            wrong = damage_of_item(fd, item.offset - stretch.start, item.length)
            if wrong is not None:
                path = location.shown_of(stretch.file)
                raise CorruptCheckpointError(f"{path}: {item.name} is damaged: {wrong}")


class _Stream(io.RawIOBase):
    """A data file of which only the stretches can be read, in their order."""

    def __init__(self, stretches: Iterator[tuple[Stretch, int]]) -> None:
        super().__init__()
        self._stretches = stretches
        self._now: tuple[Stretch, int] | None = None
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_END:
            raise io.UnsupportedOperation("the end of the file is not fetched")
        self._at = offset if whence == os.SEEK_SET else self._at + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view, done = memoryview(buffer).cast("B"), 0
        while done < len(view):
            stretch, fd = self._stretch()
            some = view[done : done + stretch.end - self._at]
            got = os.preadv(fd, [some], self._at - stretch.start)
            self._at += got
            done += got
        return done

    def _stretch(self) -> tuple[Stretch, int]:
        while self._now is None or not self._now[0].start <= self._at < self._now[0].end:
            self._now = next(self._stretches)
        return self._now

    def close(self) -> None:
        close = getattr(self._stretches, "close", None)
        if close is not None:
            close()
        super().close()
