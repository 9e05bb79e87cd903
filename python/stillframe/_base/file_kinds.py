"""Kinds of files and directories: which ones are checkpoints, and what the others may be."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from typing import Any

from stillframe import _core
from stillframe._base import safetensors
from stillframe._base.disk import LOCAL, Disk

# The file that makes several files one checkpoint: JSON with their names and sizes, written last.
MARKER = ".stillframe.json"

# The metadata file of torch.distributed.checkpoint: of all ranks, or of a rank that saved alone.
_METADATA = re.compile(r"(__\d+)?\.metadata")
_HEAD = 4096  # how many bytes of a file are read for a guess
# The first name in an archive of torch, "NAME/data.pkl", ends within so many bytes.
_FIRST_NAME_END = 512
# The pickled magic number near the beginning of a file in torch's legacy format.
LEGACY = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."

# Types of files other than regular ones: a test of `st_mode`, and the words for the type.
_TYPES = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISDIR, "a directory"),
)

# The first bytes of files of other formats, and the words for the format.
_BEGINNINGS = (
    (b"\x1f\x8b", "gzip: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "zstd: unpack it first"),
    (b"\xfd7zXZ\0", "xz: unpack it first"),
    (b"BZh", "bzip2: unpack it first"),
    (b"\x93NUMPY", "an array of numpy.save"),
    (b"\x89HDF\r\n\x1a\n", "HDF5"),
    (b"GGUF", "GGUF"),
    (b"\x80\x02", "a Python pickle"),
    (b"\x80\x03", "a Python pickle"),
    (b"\x80\x04", "a Python pickle"),
    (b"\x80\x05", "a Python pickle"),
)

SHARD = (
    "a shard of a torch.distributed.checkpoint directory, which torch.distributed.checkpoint reads"
)
SHARDED = (
    "a torch.distributed.checkpoint directory: `stillframe verify` checks it,"
    " torch.distributed.checkpoint.load loads it"
)


def is_shard(path: str) -> bool:
    return path.endswith(".distcp")


def is_sharded(names: Iterable[str]) -> bool:
    """Return whether a directory with these names is one of torch.distributed.checkpoint."""
    return any(_METADATA.fullmatch(name) for name in names)


def exists(path: str | os.PathLike[str]) -> bool:
    """Return whether a file or directory exists. A directory with shards counts only if it has the
    metadata too, which is written last and removed first."""
    if not os.path.isdir(path):
        return os.path.exists(path)
    try:
        names = os.listdir(path)
    except OSError:
        return True  # it exists, whatever it is
    has_shards = any(map(is_shard, names))
    return is_sharded(names) or not has_shards


def describe_directory(path: str, disk: Disk = LOCAL) -> str:
    """Return what a directory is, and what reads it, for messages."""
    try:
        sharded = is_sharded(disk.names(path))
    except OSError:
        sharded = False
    return SHARDED if sharded else "a directory: name a file in it"


def guess(fd: int, path: str) -> str | None:
    """Return words that complete "it looks like", or None if an open file may be a checkpoint,
    whole or damaged. The first bytes, the type and the name decide."""
    found = os.fstat(fd)
    for is_type, words in _TYPES:
        if is_type(found.st_mode):
            return words
    head = _core.read_at(fd, _HEAD, 0)
    if is_shard(path) and head.startswith(b"PK\3\4"):
        return SHARD
    # An empty file, or a file of zeros, may be a checkpoint whose bytes never reached the disk.
    if not head.strip(b"\0") or head.startswith(b"PK") or LEGACY in head[:32]:
        return None
    if safetensors.begins_like_safetensors(head):
        return "safetensors"
    if head[257:262] == b"ustar":  # the magic of a tar archive
        return "tar: unpack it first"
    for beginning, words in _BEGINNINGS:
        if head.startswith(beginning):
            return words
    return "text" if _is_text(head) else None


def why_not_a_checkpoint(fd: int, path: str, found: dict[str, Any]) -> str | None:
    """Return why a file is not a checkpoint at all, or None if it is a damaged checkpoint. `found`
    is the result of the core's check, which has failed."""
    words = guess(fd, path)
    if words is not None:
        return f"it is not a PyTorch checkpoint; it looks like {words}"
    if found["format"] == "archive":
        # An undamaged archive that failed the check may lack the records of torch.
        is_undamaged = found["num_bad"] == 0
        is_other_zip = "no record" in found["error"] if is_undamaged else is_zip_not_from_torch(fd)
        if is_other_zip:
            return "it is not a PyTorch checkpoint; it looks like a zip archive of something else"
    if found["format"] == "foreign":  # of no format that the core knows
        is_blank = not _core.read_at(fd, _HEAD, 0).strip(b"\0")  # empty, or begins with zeros only
        if not is_blank:
            return "it is not a PyTorch checkpoint"
    return None


def is_safetensors(fd: int, path: str) -> bool:
    """Return whether an open file is, or was meant to be, in the safetensors format. If the first
    bytes fit no format, the file's name decides."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return False
    head = _core.read_at(fd, 32, 0)
    if safetensors.begins_like_safetensors(head):
        return True
    has_format_of_torch = head.startswith(b"PK\3\4") or LEGACY in head
    return path.endswith(safetensors.SUFFIX) and not has_format_of_torch


def is_zip_not_from_torch(fd: int) -> bool:
    """Return whether a zip archive, possibly damaged, was written by other code than torch.

    In such an archive, the first name usually has no directory. The search for ``data.pkl`` finds
    an archive of torch whose first name is damaged.
    """
    head = _core.read_at(fd, _HEAD, 0)
    return b"/" not in first_name_in_zip(head) and b"data.pkl" not in head[:_FIRST_NAME_END]


def first_name_in_zip(head: bytes) -> bytes:
    """Return the name of the first record of a zip archive, from the first bytes of the file."""
    length = int.from_bytes(head[26:28], "little")  # the zip format fixes these offsets
    return head[30 : 30 + length]


def _is_text(head: bytes) -> bool:
    """Return whether the first bytes of a file are UTF-8 of printable letters."""
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        cuts_last_letter = error.start >= len(head) - 3  # a letter has at most 4 bytes
        if not cuts_last_letter:
            return False
        text = head[: error.start].decode()
    return all(letter.isprintable() or letter in "\t\r\n\f" for letter in text)
