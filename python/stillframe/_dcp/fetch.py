"""Items of a checkpoint in a store, fetched before they are needed.

Items that are close to each other in one object are fetched together, as a *stretch* of it, into a
file in memory (`_remote/file.py`). The check of CRCs and torch.load read it like any other file.

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
from typing import Any, TypeAlias

from stillframe import _core
from stillframe._base import budget
from stillframe._dcp.check import damage_of_item
from stillframe._dcp.location import Prefix
from stillframe._remote.file import THREADS, Fetcher, Object, Range
from stillframe.errors import CorruptCheckpointError

_File: TypeAlias = io.FileIO | io.BytesIO

_RANGE_BYTES = 16 << 20
_STRETCH_BYTES = 16 << 20  # of several items
_GAP_BYTES = 64 << 10  # fetched although nobody needs them: it is faster than another request
_AHEAD_BYTES = 256 << 20
_AHEAD_FILES = 64  # each has a descriptor


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
        self._kept: dict[int, io.BytesIO] = {}  # by the number of the stretch
        self._fetcher = Fetcher()
        self._looking_up = ThreadPoolExecutor(THREADS, thread_name_prefix="sf-look-up")
        self._objects: dict[str, Future[Object]] = {}  # by file

    def __enter__(self) -> Fetched:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._kept.clear()
        self._fetcher.end()
        self._looking_up.shutdown(wait=False, cancel_futures=True)
        if kind is None:
            self._refuse_changed()

    def check(self) -> None:
        """Check every item, and keep as many as there is memory for.

        Raises:
            CorruptCheckpointError: An item is damaged, or its file is missing.
            OSError: The store does not answer.
        """
        room = budget.measure(0).shared // 2
        for number, file in self._fetch([*range(len(self._stretches))]):
            room -= self._stretches[number].nbytes
            if room >= 0:
                self._kept[number] = io.BytesIO(file.readall())  # needs no descriptor
        self._refuse_changed()

    def open(self, file: str) -> io.RawIOBase:
        """Return a data file that can be read at its items only, in their order."""
        numbers = [n for n, stretch in enumerate(self._stretches) if stretch.file == file]
        return _Stream(self._read(numbers))

    def _read(self, numbers: list[int]) -> Iterator[tuple[Stretch, _File]]:
        """Yield stretches with a file of each, which is valid until the next one."""
        missing = [number for number in numbers if number not in self._kept]
        with contextlib.closing(self._fetch(missing)) as fetching:
            for number in numbers:
                file = self._kept.pop(number, None) or next(fetching)[1]
                yield self._stretches[number], file

    def _fetch(self, numbers: list[int]) -> Generator[tuple[int, io.FileIO]]:
        """Fetch stretches ahead, and yield the number of each with its file, which is valid until
        the next one."""
        waiting = deque(numbers)
        ahead: deque[tuple[Stretch, int, int]] = deque()  # with the number and fd of `Fetcher.open`
        nbytes = 0
        for file in {self._stretches[number].file for number in numbers}:
            if file not in self._objects:
                self._objects[file] = self._looking_up.submit(self._location.object, file)
        try:
            for number in numbers:
                while waiting and (
                    not ahead or (nbytes < _AHEAD_BYTES and len(ahead) < _AHEAD_FILES)
                ):
                    stretch = self._stretches[waiting.popleft()]
                    ahead.append((stretch, *self._ask(stretch)))
                    nbytes += stretch.nbytes
                stretch, opened, fd = ahead[0]
                self._wait(stretch, fd)
                with io.FileIO(fd, closefd=False) as memory:
                    yield number, memory
                self._fetcher.close(opened)
                ahead.popleft()
                nbytes -= stretch.nbytes
        finally:
            for _, opened, _ in ahead:
                self._fetcher.close(opened)

    def _ask(self, stretch: Stretch) -> tuple[int, int]:
        """Have a stretch fetched; return the number and the descriptor of its file."""
        data = _refuse_short(self._location, stretch, self._objects[stretch.file])
        wanted = Range(data, stretch.start, stretch.end, _RANGE_BYTES)
        number, fd = self._fetcher.open(wanted)
        _core.arrive(fd, 0)
        return number, fd

    def _wait(self, stretch: Stretch, fd: int) -> None:
        """Wait until a stretch is there, and check it."""
        try:
            _core.arrive(fd)
        except OSError as error:
            raise self._objects[stretch.file].result().failure or error from None
        if self._verify:
            _refuse_damaged(self._location, stretch, fd)

    def _refuse_changed(self) -> None:
        for data in self._objects.values():
            data.result().refuse_changed()


def _refuse_short(location: Prefix, stretch: Stretch, found: Future[Object]) -> Object:
    """Return the object of a stretch.

    Raises:
        CorruptCheckpointError: It is missing, or ends before the stretch does.
    """
    path, first = location.shown_of(stretch.file), stretch.items[0].name
    try:
        data = found.result()
    except FileNotFoundError:
        others = len(stretch.items) - 1
        raise CorruptCheckpointError(
            f"{path} is missing: it holds {first}, and {others} more"
        ) from None
    for item in stretch.items:
        if item.offset < 0 or item.length < 0 or item.end > data.found.nbytes:
            wrong = f"it should reach to byte {item.end}, and the file ends at {data.found.nbytes}"
            raise CorruptCheckpointError(f"{path}: {item.name} is damaged: {wrong}")
    return data


def _refuse_damaged(location: Prefix, stretch: Stretch, fd: int) -> None:
    for item in stretch.items:
        if item.is_checkable:
            wrong = damage_of_item(fd, item.offset - stretch.start, item.length)
            if wrong is not None:
                path = location.shown_of(stretch.file)
                raise CorruptCheckpointError(f"{path}: {item.name} is damaged: {wrong}")


class _Stream(io.RawIOBase):
    """A data file of which only the stretches can be read, in their order."""

    def __init__(self, stretches: Iterator[tuple[Stretch, _File]]) -> None:
        super().__init__()
        self._stretches = stretches
        self._now: tuple[Stretch, _File] | None = None
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
            stretch, file = self._stretch()
            file.seek(self._at - stretch.start)
            got = file.readinto(view[done : done + stretch.end - self._at])
            self._at += got
            done += got
        return done

    def _stretch(self) -> tuple[Stretch, _File]:
        while self._now is None or not self._now[0].start <= self._at < self._now[0].end:
            self._now = next(self._stretches)
        return self._now

    def close(self) -> None:
        close = getattr(self._stretches, "close", None)
        if close is not None:
            close()
        super().close()
