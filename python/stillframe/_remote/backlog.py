"""`Backlog`: how much still has to be uploaded to mirrors, to which mirrors, and since when."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from typing import NamedTuple

from stillframe._base.sizes import decimal
from stillframe._remote import journal, sending
from stillframe._remote.journal import Entry


class Backlog(NamedTuple):
    """Uploads that are due, because their saves have ended (`Entry.is_due`).

    Attributes:
        uploads: The number of uploads.
        nbytes: The bytes of the files to upload.
        oldest_s: The time of the oldest save, in seconds since 1970.
        prefixes: The URLs of the mirrors.
    """

    uploads: int
    nbytes: int
    oldest_s: float
    prefixes: list[str]

    def __str__(self) -> str:
        uploads = "1 upload" if self.uploads == 1 else f"{self.uploads} uploads"
        return f"{uploads} to {', '.join(self.prefixes)} ({decimal(self.nbytes)})"

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Backlog | None:
        """Return the backlog that the due entries make; None if no entry is due."""
        left = [each for each in entries if each.is_due()]
        if not left:
            return None
        nbytes = sum(_nbytes(path) for path in {each.local for each in left})
        oldest_s = min(each.made_s for each in left)
        return cls(len(left), nbytes, oldest_s, sorted({each.prefix for each in left}))


def backlog(directory: str) -> Backlog | None:
    """Return what is to be uploaded from a directory, not counting saves under way.

    Raises:
        OSError: Its journal cannot be listed.
    """
    return Backlog.of(journal.entries(directory))


def _nbytes(path: str) -> int:
    """Return the bytes of a file, or of a directory's files; 0 if they cannot be read."""
    try:
        info = os.lstat(path)
        inside = sending.files_of(path).values() if stat.S_ISDIR(info.st_mode) else [info]
        return sum(each.st_size for each in inside)
    except (OSError, sending.LocalError):
        return 0
