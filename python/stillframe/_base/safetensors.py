"""The safetensors format: the header of a file, and the index that names several files.

    8 bytes     the length of the header, little endian
    header      JSON: the type, the shape and the offsets of each tensor
    tensors     their bytes, without a gap, up to the end of the file

The format has no checksums (https://github.com/huggingface/safetensors#format). The rules are those
of the safetensors library, version 0.8.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from stillframe import _core
from stillframe._base.disk import Disk

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
MAX_HEADER = 100_000_000  # bytes; the library's limit
_MAX_BYTES = 1 << 63  # sizes and offsets in a header have to be smaller
# The errors of the code below if JSON does not have the expected structure.
_ERRORS = (ValueError, TypeError, AttributeError, KeyError, RecursionError)

# name in the format: (bits of an element, torch's name, "" if torch lacks the type)
# In the order of the safetensors library, which writes tensors of the last type here first.
DTYPES = {
    "BOOL": (8, "bool"),
    "F4": (4, "float4_e2m1fn_x2"),
    "F6_E2M3": (6, ""),
    "F6_E3M2": (6, ""),
    "U8": (8, "uint8"),
    "I8": (8, "int8"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "I16": (16, "int16"),
    "U16": (16, "uint16"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "I32": (32, "int32"),
    "U32": (32, "uint32"),
    "F32": (32, "float32"),
    "C64": (64, "complex64"),
    "F64": (64, "float64"),
    "I64": (64, "int64"),
    "U64": (64, "uint64"),
}


class Damaged(Exception):
    """The error for a file whose bytes do not fit its header or its index."""


class Entry(NamedTuple):
    """A tensor. Its bytes are between the offsets `begin` and `end` of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """A file's header; the tensors are in the order of their bytes."""

    nbytes: int  # the file's length
    entries: list[Entry]
    metadata: dict[str, str]  # the strings of `__metadata__`


def begins_like_safetensors(head: bytes) -> bool:
    """Return whether a file's first nine bytes are those of a safetensors file: a header's length
    and a brace. In a pickle or a zip file, that length would exceed the limit."""
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= MAX_HEADER


def read_header(fd: int) -> Header:
    """Return the header of an open file, after a check of everything in it.

    Raises:
        Damaged: The file is empty, truncated or too long, or its header makes no sense.
        OSError: The file cannot be read.
    """
    nbytes = os.fstat(fd).st_size
    if nbytes == 0:
        raise Damaged("it is empty")
    head = _core.read_at(fd, 9, 0)
    begin = 8 + int.from_bytes(head[:8], "little")
    if not begins_like_safetensors(head) or begin > nbytes:
        raise Damaged("it is truncated, or its first bytes are not those of safetensors")
    try:
        text = _core.read_at(fd, begin - 8, 8)
        described = json.loads(text, object_pairs_hook=_make_dict_refusing_duplicates)
        metadata = described.pop("__metadata__", None) or {}
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("__metadata__ has a value that is no text")
        entries = [_entry(name, tensor, begin) for name, tensor in described.items()]
    except _ERRORS as error:
        raise Damaged(f"its header is damaged: {error}") from None
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    end = begin
    for entry in entries:
        if entry.begin != end:
            word = "overlaps the one before" if entry.begin < end else "leaves a gap before it"
            raise Damaged(f"its header is damaged: tensor {entry.name} {word}")
        end = entry.end
    if nbytes != end:
        word = "truncated" if nbytes < end else "too long"
        raise Damaged(f"it is {word}: it has {nbytes} bytes, and its header says {end}")
    return Header(nbytes, entries, metadata)


def _make_dict_refusing_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a name occurs twice")
    return unique


def _entry(name: str, tensor: Any, begin: int) -> Entry:
    """Return a tensor that the header describes. `begin` is the offset of the first tensor. Raise
    ValueError, TypeError or KeyError if type, shape and offsets do not fit together."""
    dtype, shape, offsets = tensor["dtype"], tensor["shape"], tensor["data_offsets"]
    if dtype not in DTYPES:
        raise ValueError(f"tensor {name} has the unknown type {dtype}")
    if len(offsets) != 2 or not all(map(_is_size, [*shape, *offsets])):
        raise ValueError(f"tensor {name} has a shape or offsets that are no sizes")
    first, end = offsets
    element_bits, _ = DTYPES[dtype]
    if first > end or _numel(shape) * element_bits != 8 * (end - first):
        raise ValueError(f"the offsets of tensor {name} do not fit its type and shape")
    return Entry(name, dtype, tuple(shape), begin + first, begin + end)


def _numel(shape: list[int]) -> int:
    """Return the number of elements. Raise ValueError as soon as it exceeds `_MAX_BYTES`, because
    the product of many large sizes would take long."""
    if 0 in shape:
        return 0
    numel = 1
    for size in shape:
        numel *= size
        if numel > _MAX_BYTES:
            raise ValueError("no memory is that large")
    return numel


def _is_size(number: object) -> bool:
    return type(number) is int and 0 <= number < _MAX_BYTES


def read_index(disk: Disk, path: str) -> dict[str, list[str]]:
    """Return the files that an index names, with the names of the tensors in each.

    Raises:
        Damaged: The index makes no sense, or a file that it names is not next to it.
        OSError: The index cannot be read.
    """
    text = disk.read(path)
    files: dict[str, list[str]] = {}
    try:
        for tensor, name in json.loads(text)["weight_map"].items():
            is_plain_name = os.path.basename(name) == name and name not in ("", ".", "..")
            if not is_plain_name or name.endswith(".json"):  # .json: an index, perhaps this one
                raise ValueError(f"it names {name!r}, which is no file next to it")
            files.setdefault(name, []).append(tensor)
    except _ERRORS as error:
        raise Damaged(f"the index is damaged: {error}") from None
    directory = os.path.dirname(path)
    if missing := [name for name in files if not disk.exists(os.path.join(directory, name))]:
        raise Damaged(f"missing next to it: {', '.join(sorted(missing))}")
    return files


def refuse_missing_tensors(name: str, entries: Sequence[Entry], expected: Sequence[str]) -> None:
    """Raise Damaged if file `name` lacks a tensor that the index expects in it."""
    found = {entry.name for entry in entries}
    if lacking := [tensor for tensor in expected if tensor not in found]:
        raise Damaged(f"{name} has no tensor {lacking[0]}, which the index names")
