"""Single records of an archive, which threads read into Python's memory."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from stillframe import _core
from stillframe._base import records


class Core:
    """A fake restore whose threads write to memory until it is closed."""

    def __init__(self, error: BaseException | None = None, *, good: bool = True) -> None:
        self._error, self._good = error, good
        self.addresses: dict[int, int] = {}
        self.closed = False

    def find(self, name: str) -> int:
        return ("a", "b").index(name) if name in ("a", "b") else -1

    def sizes(self, number: int, most: int) -> list[int]:
        return [3]

    def into(self, number: int, addresses: list[int]) -> None:
        self.addresses[number] = addresses[0]

    def reach(self, number: int) -> int:
        return number + 1

    def until(self, number: int) -> None:
        self.limit = number

    def go(self, reach: int) -> None:
        assert reach == self.limit + 1  # nothing after the record is read

    def wait(self, number: int) -> bool:
        if self._error is not None:
            raise self._error
        ctypes.memmove(self.addresses[number], b"%d.." % number, 3)
        return self._good

    def failure(self) -> tuple[int, str, int, str | None]:
        return _core.ECORRUPT, "a", 7, "CRC"

    def close(self) -> None:
        self.closed = True


def test_records_are_returned_as_requested_and_empty_if_missing():
    core: Any = Core()
    assert records.read(core, ("b", "c", "a")) == [b"1..", b"", b"0.."]
    assert not core.closed


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()])
def test_interrupted_read_keeps_its_memory_until_threads_end(error):
    core: Any = Core(error)
    with pytest.raises(type(error)):
        records.read(core, ("a",))
    assert core.closed


def test_damaged_record_is_reported():
    core: Any = Core(good=False)
    with pytest.raises(records.RestoreFailed) as failed:
        records.read(core, ("a",))
    assert failed.value.failure == records.Failure(_core.ECORRUPT, "a", 7, "CRC")
    assert core.closed
