"""`Backlog`: a summary of the uploads to mirrors that are not done yet."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from typing import NamedTuple

from stillframe._base.sizes import decimal
from stillframe._remote import journal, sending
from stillframe._remote.journal import Entry


class Backlog(NamedTuple):
    """Uploads that are due; see `Entry.is_due`."""

    uploads: int  # the number of uploads
    nbytes: int  # the bytes of the files to upload
    oldest_s: float  # the time of the oldest save, in seconds since 1970
    prefixes: list[str]  # the URLs of the mirrors

    def __str__(self) -> str:
        uploads = "1 upload" if self.uploads == 1 else f"{self.uploads} uploads"
        return f"{uploads} to {', '.join(self.prefixes)} ({decimal(self.nbytes)})"

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Backlog | None:
        """Return the backlog of the due entries; None if no entry is due."""
        due = [each for each in entries if each.is_due()]
        if not due:
            return None
        files = {each.local for each in due}
        nbytes = sum(_nbytes(path) for path in files)
        oldest_s = min(each.save_time_s for each in due)
        return cls(len(due), nbytes, oldest_s, sorted({each.prefix for each in due}))


def backlog(directory: str) -> Backlog | None:
    """Return the backlog of a directory, without saves under way; None if nothing is due. Raise
    OSError if the directory's journal cannot be listed."""
    return Backlog.of(journal.entries(directory))


def _nbytes(path: str) -> int:
    """Return the bytes of a file, or of a directory's files; 0 if they cannot be read."""
    try:
        info = os.lstat(path)
        is_directory = stat.S_ISDIR(info.st_mode)
        files = sending.files_of(path).values() if is_directory else [info]
        return sum(each.st_size for each in files)
    except (OSError, sending.LocalReadError):
        return 0
