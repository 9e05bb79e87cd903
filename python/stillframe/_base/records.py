"""Single records of an archive, read by the core's threads into memory of Python's."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from stillframe import _core


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong first: `code` is ECORRUPT, for which there is a reason, or -errno."""

    code: int
    record: str
    offset: int
    reason: str | None


class RestoreFailed(Exception):
    """A record is damaged or could not be read; `failure` says which, where it is told here."""

    def __init__(self, failure: Failure | None = None) -> None:
        super().__init__(failure)
        self.failure = failure


def read(core: _core.Restore, names: tuple[str, ...]) -> list[bytes]:
    """Single records, of a restore that has not begun: empty where there is none.

    What is raised in here closes the restore.

    Raises:
        RestoreFailed: One is damaged or could not be read.
    """
    numbers = [core.find(name) for name in names]
    wanted = {number: bytearray(core.sizes(number, 1)[0]) for number in numbers if number >= 0}
    try:
        for number, data in wanted.items():
            core.into(number, [_address_of(data)])
        for number in sorted(wanted):
            core.go(core.reach(number))
            if not core.wait(number):
                raise RestoreFailed(Failure(*core.failure()))
    except BaseException:
        core.close()  # first the threads, then the memory that they write to
        raise
    return [bytes(wanted[number]) if number >= 0 else b"" for number in numbers]


def _address_of(data: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data)) if data else 0
