"""Reads single records of an archive with the core's threads."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from stillframe import _core


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failure of a restore."""

    code: int  # the core's ECORRUPT, or a negative errno
    record: str  # the name of the record
    offset: int  # of the failure in the file, in bytes
    reason: str | None  # what is wrong; None for an errno


class RestoreFailed(Exception):
    """A record is damaged or could not be read; `failure` says which record and why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


def wait(core: _core.Restore, index: int) -> None:
    """Wait until a record is read and its CRC was compared. Raise RestoreFailed if the record is
    damaged or could not be read. The index `core.nr` stands for all records."""
    if not core.wait(index):
        raise RestoreFailed(Failure(*core.failure()))


def read(core: _core.Restore, names: tuple[str, ...]) -> list[bytes]:
    """Return the bytes of the named records, b"" for a missing record. `core` must not have
    started; an exception closes it. Raise RestoreFailed if a record is damaged or could not be
    read."""
    numbers = [core.find(name) for name in names]
    memory: dict[int, bytearray] = {}  # by the number of the record
    for number in numbers:
        if number >= 0:
            nbytes = core.sizes(number, 1)[0]  # the first element is this record's length
            memory[number] = bytearray(nbytes)
    try:
        for number, data in memory.items():
            core.into(number, [_address_of(data)])
        for number in sorted(memory):  # in the order of the file
            core.until(number)  # read no further than this record
            nr_needed = core.reach(number)  # the records that are read up to this one
            core.go(nr_needed)  # begin to read
            wait(core, number)
    except BaseException:
        core.close()  # ends the threads before the memory that they write to is freed
        raise
    return [bytes(memory[number]) if number >= 0 else b"" for number in numbers]


def _address_of(data: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data)) if data else 0
