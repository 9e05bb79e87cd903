"""One tensor as a whole torch.save archive: what stands before its bytes and behind them.

DCP's data files are such archives one after the other. An archive's directory comes last and holds
the CRC of the bytes before it:

    data.pkl, byteorder, version │ header of data/0, padding │ the bytes │ directory, end records
    └──────────────────────── head ─────────────────────────┘             └──────── tail ───────┘
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence

import torch

from stillframe import _core

_ALIGN = 64  # of a tensor's bytes, as torch's own writer aligns them
_BIG = 0xFFFFFFFF  # from here on a length or place stands in a zip64 field
_UTF8 = 0x800


class Payload:
    """A tensor's own bytes and how to find the tensor in them."""

    __slots__ = ("dtype", "flat", "size", "stride")

    def __init__(self, tensor: torch.Tensor, flat: torch.Tensor) -> None:
        self.flat = flat
        self.dtype = tensor.dtype
        self.size = tuple(tensor.size())
        self.stride = tuple(tensor.stride())

    def frame(self) -> tuple[bytes, bytes]:
        """(head, tail) of its archive."""
        nbytes = self.flat.numel()
        crc = _core.crc32(view_of(self.flat))
        return frame(self.dtype, self.size, self.stride, nbytes, crc)


def view_of(flat: torch.Tensor) -> memoryview:
    """The bytes of a flat tensor of bytes, which has to live as long."""
    return memoryview((ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr())).cast("B")


def payload(tensor: torch.Tensor) -> Payload | None:
    """None where torch.save has to say what the tensor is made of."""
    if (
        type(tensor) is not torch.Tensor
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or _storage_name(tensor.dtype) is None
    ):
        return None
    tensor = tensor.resolve_conj().resolve_neg()
    if not _is_dense(tensor):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    flat = torch.empty(0, dtype=torch.uint8)
    nbytes = tensor.numel() * tensor.element_size()
    start = tensor.storage_offset() * tensor.element_size()
    flat.set_(tensor.untyped_storage(), start if nbytes else 0, (nbytes,), (1,))
    return Payload(tensor, flat)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie side by side in some order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _storage_name(dtype: torch.dtype) -> str | None:
    """The class that a pickle names for a storage of this type."""
    names: dict[torch.dtype, str] = torch.storage._dtype_to_storage_type_map()
    return names.get(dtype)


# ---- the pickle ----


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def _number(value: int) -> bytes:
    if value < 1 << 8:
        return b"K" + bytes([value])
    if value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    encoded = value.to_bytes(value.bit_length() // 8 + 1, "little")
    return b"\x8a" + bytes([len(encoded)]) + encoded


def _tuple(values: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(_number, values)) + b"t"


def _pickle(dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], nbytes: int) -> bytes:
    """`_rebuild_tensor_v2(storage 0 on the CPU, 0, size, stride, False, OrderedDict())`"""
    numel = _number(nbytes // dtype.itemsize)
    storage = f"ctorch\n{_storage_name(dtype)}\n".encode()
    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n("
        + (b"(" + _text("storage") + storage + _text("0") + _text("cpu") + numel + b"tQ")
        + _number(0)
        + _tuple(size)
        + _tuple(stride)
        + b"\x89ccollections\nOrderedDict\n)RtR."
    )


# ---- the archive ----


@functools.lru_cache(maxsize=4096)
def _head(
    dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], nbytes: int
) -> tuple[bytes, list[tuple[bytes, int, int, int]], int]:
    """(all up to the bytes with 0 for their CRC, the entries so far, where that CRC stands)"""
    made = bytearray()
    entries = []
    for name, body in (
        (b"archive/data.pkl", _pickle(dtype, size, stride, nbytes)),
        (b"archive/byteorder", b"little"),
        (b"archive/version", b"3\n"),
    ):
        crc = _core.crc32(body)
        entries.append((name, crc, len(body), len(made)))
        made += _local(name, crc, len(body), b"") + body
    start = len(made)
    entries.append((b"archive/data/0", 0, nbytes, start))
    fixed = 30 + len(entries[-1][0]) + 4 + (20 if nbytes >= _BIG else 0)
    padding = -(start + fixed) % _ALIGN
    extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
    made += _local(entries[-1][0], 0, nbytes, extra)
    return bytes(made), entries, start + 14


def frame(
    dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], nbytes: int, crc: int
) -> tuple[bytes, bytes]:
    """What stands before the bytes of a tensor and behind them.

    Args:
        dtype, size, stride: Of the tensor, whose first element is the first of its bytes.
        nbytes: Of its elements.
        crc: The CRC-32 of these bytes.
    """
    start, entries, place = _head(dtype, size, stride, nbytes)
    head = start[:place] + struct.pack("<I", crc) + start[place + 4 :]
    end = len(head) + nbytes
    name, _, _, offset = entries[-1]
    directory = b"".join(_central(*entry) for entry in (*entries[:-1], (name, crc, nbytes, offset)))
    count, length = len(entries), len(directory)
    tail = directory
    if end >= _BIG:
        tail += struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, length, end)
        tail += struct.pack("<IIQI", 0x07064B50, 0, end + length, 1)
    tail += struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count, count, length, min(end, _BIG), 0)
    return head, tail


def _local(name: bytes, crc: int, nbytes: int, extra: bytes) -> bytes:
    if nbytes >= _BIG:
        extra = struct.pack("<HHQQ", 1, 16, nbytes, nbytes) + extra
        nbytes = _BIG
    fields = (0x04034B50, 0, _UTF8, 0, 0, 0, crc, nbytes, nbytes, len(name), len(extra))
    return struct.pack("<IHHHHHIIIHH", *fields) + name + extra


def _central(name: bytes, crc: int, nbytes: int, offset: int) -> bytes:
    extra = b""
    if nbytes >= _BIG:
        extra = struct.pack("<HHQQ", 1, 16, nbytes, nbytes)
        nbytes = _BIG
    fields = (0x02014B50, 0, 0, _UTF8, 0, 0, 0, crc, nbytes, nbytes, len(name), len(extra))
    return struct.pack("<IHHHHHHIIIHHHHHII", *fields, 0, 0, 0, 0, offset) + name + extra
