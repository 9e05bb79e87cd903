"""Checks whether a file, or a directory of torch.distributed.checkpoint (DCP), is whole.

    kind           what is checked
    torch.save     the archive's end record and directory; thorough: also every CRC, and that every
                   record is there that the pickle names
    legacy format  (of torch before 1.6) the file's length
    safetensors    the header and the file's length; the format has no checksums
    index          that every named file is there, with the named tensors
    DCP directory  that every file is there that .metadata names, and is long enough; thorough: also
                   every CRC

A check that is not thorough reads no tensor's bytes.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from stillframe import _core
from stillframe._base import file_kinds, safetensors
from stillframe._base.disk import LOCAL, Disk, OpenFile
from stillframe._check import kinds, pickles
from stillframe._check.pickles import Bound, unbounded
from stillframe._dcp import check as sharded
from stillframe.errors import CorruptCheckpointError, StillframeError

GOOD, DAMAGED, UNUSABLE = 0, 1, 2  # UNUSABLE: not readable, or no checkpoint
_INDEX_SUFFIXES = (safetensors.INDEX_SUFFIX, ".bin.index.json")
_NO_MEMORY = "not enough memory to check it"

Progress = Callable[[int, int], object]  # takes the bytes done and the file's length


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check of one path."""

    path: str
    status: int  # GOOD, DAMAGED or UNUSABLE
    error: str | None = None
    nbytes: int | None = None
    num_records: int = 0
    num_unchecked: int = 0  # records that are compressed or have no CRC
    num_compressed: int = 0  # unchecked records that are compressed
    num_trailing: int = 0  # bytes after the archive's end
    num_bad: int = 0
    format: str = "archive"
    bad_records: list[tuple[str, str]] = field(default_factory=list)  # name, what is wrong
    cause: Exception | None = None  # the error, if the path could not be read

    @property
    def ok(self) -> bool:
        return self.status == GOOD

    @property
    def reason(self) -> str:
        """The first thing that is wrong, in one line."""
        if self.error is None and self.bad_records:
            name, why = self.bad_records[0]
            return f"record {name}: {why}"
        return self.error or ""

    def as_json(self) -> dict[str, object]:
        """Return the object that `stillframe verify --json` prints."""
        return {
            "path": self.path,
            "ok": self.ok,
            "error": self.error,
            "nbytes": self.nbytes,
            "num_records": self.num_records,
            "bad_records": [name for name, _ in self.bad_records],
        }


def check(
    path: str,
    disk: Disk = LOCAL,
    *,
    thorough: bool = True,
    progress: Progress | None = None,
    bound: Bound = unbounded,
) -> Finding:
    """Check one path. An error becomes a finding and is not raised.

    Args:
        thorough: Compare every CRC.
        progress: Called now and then with the bytes done and the file's length.
        bound: Limits the memory for each pickle that is read.
    """
    try:
        if disk.is_directory(path):
            return _check_directory(path, disk, thorough, bound)
        if path.endswith(_INDEX_SUFFIXES):
            return _check_index(path, disk)
        with disk.open(path, peek=not thorough) as file:
            return _check_opened(file, path, thorough, progress, bound)
    except (safetensors.Damaged, CorruptCheckpointError) as error:
        return Finding(path, DAMAGED, str(error))
    except MemoryError:
        return Finding(path, UNUSABLE, _NO_MEMORY)
    except (OSError, ValueError, StillframeError) as error:
        return Finding(path, UNUSABLE, reason_of(error), cause=error)


def _check_opened(
    file: OpenFile, path: str, thorough: bool, progress: Progress | None, bound: Bound
) -> Finding:
    """Check an open file that is no index."""
    fd = file.fileno()
    try:
        if file_kinds.is_safetensors(fd, path):
            header = safetensors.read_header(fd)
            nr_tensors = len(header.entries)
            return Finding(
                path,
                GOOD,
                nbytes=header.nbytes,
                num_records=nr_tensors,
                num_unchecked=nr_tensors,
                format="safetensors",
            )
        return _check_torch_file(fd, path, thorough, progress, bound)
    except safetensors.Damaged as error:
        return Finding(path, DAMAGED, str(error), _size(fd))
    except OSError as error:
        # The file was opened, but its bytes cannot be read. After most errors, the disk has lost
        # them.
        status = UNUSABLE if error.errno in (errno.EISDIR, errno.ENOMEM) else DAMAGED
        return Finding(path, status, reason_of(error), _size(fd))
    except MemoryError:
        return Finding(path, UNUSABLE, _NO_MEMORY, _size(fd))


def _check_torch_file(
    fd: int, path: str, thorough: bool, progress: Progress | None, bound: Bound
) -> Finding:
    """Check an open file that is neither safetensors nor an index."""
    # `direct` bypasses the page cache. `directory` reads only the archive's directory.
    found = _core.check(fd, thorough, progress, direct=thorough, directory=not thorough)
    # Each of these says what is wrong, and is None or empty if nothing is.
    why_no_checkpoint = None if found["ok"] else file_kinds.why_not_a_checkpoint(fd, path, found)
    lacking = pickles.lacking(fd, bound) if found["ok"] and thorough else []
    truncated = pickles.truncated(fd, bound) if found["format"] == "legacy" else None
    bad_records = lacking or found["bad_records"]
    if found["ok"] and not bad_records and truncated is None:
        status = GOOD
    elif why_no_checkpoint is not None:
        status = UNUSABLE
    else:
        status = DAMAGED
    return Finding(
        path,
        status,
        error=truncated or why_no_checkpoint or found["error"],
        nbytes=found["nbytes"],
        num_records=found["num_records"],
        num_unchecked=found["num_unchecked"],
        num_compressed=found["num_compressed"],
        num_trailing=found["num_trailing"],
        num_bad=len(lacking) or found["num_bad"],
        format=found["format"],
        bad_records=bad_records,
    )


def _check_directory(path: str, disk: Disk, thorough: bool, bound: Bound) -> Finding:
    """Check that a directory has the files that its kind must have. Check the files themselves only
    in a directory of DCP."""
    names = disk.names(path)
    problem = kinds.incomplete(path, names, disk)
    if problem is not None:
        return Finding(path, DAMAGED, problem)
    if not file_kinds.is_sharded(names):
        return Finding(path, GOOD)
    read = functools.partial(pickles.read, bound=bound)
    found = sharded.check(path, read, disk, thorough=thorough)
    return Finding(
        path,
        DAMAGED if found.bad else GOOD,
        error=f"{len(found.bad)} of its {found.nr_items} items are bad" if found.bad else None,
        nbytes=found.nbytes,
        num_records=found.nr_items,
        num_unchecked=found.nr_unchecked,
        num_bad=len(found.bad),
        bad_records=found.bad,
    )


def _check_index(path: str, disk: Disk) -> Finding:
    """Check that each file of an index is there, with the tensors that the index names."""
    files = safetensors.read_index(disk, path)
    for name, tensors in files.items():
        shard = os.path.join(os.path.dirname(path), name)
        found = check(shard, disk, thorough=False)
        if not found.ok:
            return Finding(path, DAMAGED, f"{name}: {found.reason}")
        if found.format == "safetensors":
            with disk.open(shard, peek=True) as file:
                entries = safetensors.read_header(file.fileno()).entries
            safetensors.refuse_missing_tensors(name, entries, tensors)
    return Finding(path, GOOD, num_records=len(files), format="index")


def reason_of(error: Exception) -> str:
    """Return words for an error, for messages."""
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, PermissionError):
        return "no permission to read it"
    return getattr(error, "strerror", None) or str(error)


def _size(fd: int) -> int | None:
    try:
        return os.fstat(fd).st_size
    except OSError:
        return None
