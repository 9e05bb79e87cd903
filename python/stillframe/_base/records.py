"""Reads single records of an archive, with the core's threads, into Python's memory."""

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
    """Wait until the record with this index is read and its CRC is right. The index `core.nr` waits
    for all records.

    Raises:
        RestoreFailed: A record is damaged or could not be read.
    """
    if not core.wait(index):
        raise RestoreFailed(Failure(*core.failure()))


def read(core: _core.Restore, names: tuple[str, ...]) -> list[bytes]:
    """Return the bytes of single records; a missing record gives b"".

    Args:
        core: A restore that has not started. After an exception it is closed.
        names: The names of the records.

    Raises:
        RestoreFailed: A record is damaged or could not be read.
    """
    numbers = [core.find(name) for name in names]
    # The memory for each record, by the record's number.
    wanted = {number: bytearray(core.sizes(number, 1)[0]) for number in numbers if number >= 0}
    try:
        for number, data in wanted.items():
            core.into(number, [_address_of(data)])
        # In the file's order: let the threads read as far as the record, then wait for the record.
        for number in sorted(wanted):
            core.until(number)
            core.go(core.reach(number))
            wait(core, number)
    except BaseException:
        core.close()  # ends the threads before the memory that they write to is freed
        raise
    return [bytes(wanted[number]) if number >= 0 else b"" for number in numbers]


def _address_of(data: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data)) if data else 0
