"""Checks of safetensors files and of the index that names several of them.

A file begins with the length of its header (8 bytes, little endian). The header is JSON, and gives
for each tensor where its bytes are after it. These follow each other without a gap and end with the
file (https://github.com/huggingface/safetensors#format). There are no checksums, so a file of the
right length may still have wrong bytes.
"""

from __future__ import annotations

import json
import os
from typing import Any, BinaryIO

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_MAX_HEADER = 100 << 20  # the format's own limit


class Damaged(Exception):
    """The error of a file that is not what its header or its index says."""


def check_file(path: str) -> tuple[int, int]:
    """Return the length of a whole file, and how many tensors are in it.

    Raises:
        Damaged: The file is empty, truncated, too long, or its header makes no sense.
        OSError: It cannot be read.
    """
    with _opened(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes == 0:
            raise Damaged("the file is empty")
        begin = 8 + int.from_bytes(file.read(8), "little")
        if nbytes < 8 or begin - 8 > _MAX_HEADER or nbytes < begin:
            raise Damaged("the file is truncated, or its first bytes are not those of safetensors")
        spans = _spans(file.read(begin - 8))
    end = begin
    for first, behind in spans:
        if begin + first != end or behind < first:
            raise Damaged("its header is damaged: tensors overlap, or leave a gap")
        end = begin + behind
    if nbytes != end:
        word = "truncated" if nbytes < end else "too long"
        raise Damaged(f"the file is {word}: it has {nbytes} bytes, and its header says {end}")
    return nbytes, len(spans)


def _opened(path: str) -> BinaryIO:
    """Open a file to read; a pipe without a writer does not keep the caller waiting."""
    return open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")


def _spans(header: bytes) -> list[tuple[int, int]]:
    """Return where each tensor's bytes begin and end, in their order in the file."""
    try:
        tensors: Any = json.loads(header)
        tensors.pop("__metadata__", None)
        spans = [(int(first), int(behind)) for first, behind in map(_offsets, tensors.values())]
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise Damaged(f"its header is damaged: {error}") from None
    return sorted(spans)


def _offsets(tensor: Any) -> Any:
    return tensor["data_offsets"]


def check_index(path: str) -> int:
    """Return how many files an index names, if all of them exist.

    Raises:
        Damaged: A file is missing, or the index makes no sense.
        OSError: It cannot be read.
    """
    with _opened(path) as file:
        text = file.read()
    try:
        names = sorted({str(name) for name in json.loads(text)["weight_map"].values()})
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise Damaged(f"the index is damaged: {error}") from None
    missing = [
        name for name in names if not os.path.exists(os.path.join(os.path.dirname(path), name))
    ]
    if missing:
        raise Damaged(f"missing beside it: {', '.join(missing)}")
    return len(names)
