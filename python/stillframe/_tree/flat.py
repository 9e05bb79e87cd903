"""The contents of a safetensors file: a flat dict of tensors.

A file has a JSON header with the dtype, shape and offsets of each tensor. The tensors' bytes follow
without a gap (https://github.com/huggingface/safetensors#format).

`build` checks the dict as `safetensors.torch.save_file` does, and finds the storages. Later, when
it is known which storages are deferred, `Flat.lay_out` orders the tensors and writes the header:
- Tensors with longer elements come first, so that each starts at a multiple of its element size.
- Among tensors of one element size, those that the same lane copies are adjacent.
- Otherwise tensors are sorted by dtype and name, as the safetensors library does.

The first tensor starts at a multiple of 4096, for readers that map the file or read it with
O_DIRECT. Spaces at the end of the header fill the gap, which the format allows.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stillframe import _core
from stillframe._base import device as _device
from stillframe._base import safetensors
from stillframe._tree.skeleton import SOURCE, Skeleton, describe_copied_storages

_ALIGN = 4096  # the first tensor starts at a multiple of this
_METADATA = "__metadata__"
_MEMBER = struct.Struct("=QQII")  # struct sfr_member: off, nbytes, source, reserved

# The dtype with two elements in a byte. torch's shapes count bytes, the format's shapes elements.
_HALF_BYTE_DTYPE = "F4"
# dtype: (name in the format, position in the library's order, bytes per element in torch)
_DTYPES: dict[torch.dtype, tuple[str, int, int]] = {}
for _rank, _name in enumerate(safetensors.DTYPES):
    _, _name_in_torch = safetensors.DTYPES[_name]
    _dtype = getattr(torch, _name_in_torch, None)
    if _dtype is not None:  # an older torch may lack the newest dtypes
        _DTYPES[_dtype] = _name, _rank, _dtype.itemsize

_quoted: Callable[[str], str] = encode_basestring
# Returns a tensor's conjugate and negative bits, or {} if neither is set. Unlike is_conj and
# is_neg, it does not release the interpreter lock.
_bits: Callable[[Tensor], dict[str, bool]] = torch._C._get_tensor_metadata  # type: ignore[attr-defined]


class TensorMember(NamedTuple):
    """One tensor of the file."""

    name: str
    dtype: str  # its name in the format
    rank: int  # the position of the dtype in the library's order
    itemsize: int  # bytes of an element
    shape: list[int]  # as in the header
    storage: int  # the storage's number; -1 for a tensor without bytes
    offset: int  # where the tensor's bytes begin in the storage
    nbytes: int


@dataclass(slots=True)
class Flat(Skeleton):
    """The contents of a safetensors file. ``data`` is the file's header, made by `lay_out`.

    Attributes:
        members: The tensors.
        metadata: The strings of ``__metadata__`` in the header, if there are any.
    """

    members: list[TensorMember] = field(default_factory=list)
    metadata: Mapping[str, str] | None = None

    def names(self, index: int) -> list[str]:
        """Return the names of the tensors over storage ``index``."""
        return [member.name for member in self.members if member.storage == index]

    def lay_out(self, *, by_lane: bool = False) -> bytes:
        """Order the tensors and write the header into ``data``. The lanes must be final.

        Args:
            by_lane: Put the tensors of a lane next to each other, whatever their element sizes.

        Returns:
            One ``struct sfr_member`` (24 bytes) for each tensor that has bytes, in file order.

        Raises:
            ValueError: The header is longer than readers accept. With `by_lane`: a tensor would
                not start at a multiple of its element size.
            UnicodeEncodeError: A name is not valid Unicode.
        """
        lanes = [(lane, device) for _, _, lane, device in SOURCE.iter_unpack(self.rows)]
        lanes.append((0, 0))  # for tensors without bytes, whose storage is -1

        def sort_key(each: TensorMember) -> tuple[Any, ...]:
            lane = lanes[each.storage]
            by_size = -each.itemsize, lane, -each.rank, each.name
            return (lane, *by_size) if by_lane else by_size

        head: list[str] = []
        if self.metadata is not None:
            pairs = (f"{_quoted(k)}:{_quoted(v)}" for k, v in self.metadata.items())
            head.append(f'"{_METADATA}":{{{",".join(pairs)}}}')
        packed = bytearray()
        begin = 0
        for each in sorted(self.members, key=sort_key):
            end = begin + each.nbytes
            if begin % each.itemsize:
                raise ValueError(
                    f"the tensor {each.name!r} cannot be aligned in one file: the tensors are on"
                    " several devices and have elements of several sizes. Move them to one device,"
                    " or save those of each device in a file of their own"
                )
            head.append(
                f'{_quoted(each.name)}:{{"dtype":"{each.dtype}","shape":{each.shape},'
                f'"data_offsets":[{begin},{end}]}}'
            )
            if each.nbytes:
                packed += _MEMBER.pack(each.offset, each.nbytes, each.storage, 0)
            begin = end
        text = f"{{{','.join(head)}}}".encode()
        # The file begins with the header's length, a word of 8 bytes. Round up to `_ALIGN`.
        length = (8 + len(text) + _ALIGN - 1) // _ALIGN * _ALIGN - 8
        if length > safetensors.MAX_HEADER:
            raise ValueError(
                f"the names, shapes and metadata take {len(text)} bytes, and readers of safetensors"
                f" accept at most {safetensors.MAX_HEADER}: save fewer tensors in one file"
            )
        self.data = struct.pack("<Q", length) + text.ljust(length)
        return bytes(packed)


def build(obj: object, metadata: Mapping[str, str] | None) -> Flat:
    """Check that a safetensors file can hold ``obj``, and find its storages.

    torch copies tensors that are neither in host memory nor on a CUDA device, with a sentence in
    ``fallbacks``. It also copies conjugated and negated tensors.

    Raises the same types as `safetensors.torch.save_file`:
        ValueError: ``obj`` is no dict of tensors, or a tensor is sparse or not contiguous.
        RuntimeError: Tensors share memory.
        KeyError: The format lacks a dtype.
        TypeError: A name is not a string.
    """
    with torch._C.DisableTorchFunction():
        tensors = checked(obj)
        builder = _FlatFileBuilder()
        for name, tensor in tensors.items():
            builder.add(name, tensor)
    return Flat(
        data=b"",
        storages=builder.storages,
        numbers=_core.Numbers(list(builder.numbers)),
        rows=builder.rows,
        num_tensors=len({id(tensor) for tensor in tensors.values()}),
        fallbacks=[
            describe_copied_storages(count, origin) for origin, count in builder.copied.items()
        ],
        # `builder.devices` has 0 for host memory, and n + 1 for CUDA device n.
        devices=tuple(sorted(device - 1 for device in builder.devices if device)),
        members=builder.members,
        metadata=metadata,
    )


def checked(obj: object) -> dict[str, Tensor]:
    """Return ``obj`` if it is a dict of dense tensors that share no memory, or raise an error."""
    if not isinstance(obj, dict):
        raise ValueError(f"Expected a dict of [str, torch.Tensor] but received {type(obj)}")
    sparse = []
    for name, tensor in obj.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"Key `{name}` is invalid, expected torch.Tensor but received {type(tensor)}"
            )
        if not isinstance(name, str):
            raise TypeError(f"the name of a tensor has to be a str, not {type(name).__name__}")
        if tensor.layout is not torch.strided:
            sparse.append(name)
    if sparse:
        raise ValueError(
            f"You are trying to save sparse tensors: `{sparse}`, which safetensors does not"
            " support. Make them dense with `.to_dense()`, which may take much more space"
        )
    if _METADATA in obj:
        raise ValueError(f"a tensor cannot be named {_METADATA}: use metadata=")
    if shared := _names_sharing_memory(obj):
        raise RuntimeError(
            f"Some tensors share memory, which a safetensors file cannot keep: {shared}. Save one"
            " of each, or copies of them (`tensor.clone()`), or use format='torch', which keeps"
            " shared memory"
        )
    return obj


def _names_sharing_memory(tensors: dict[str, Tensor]) -> list[list[str]]:
    """Return a list of names for each group of tensors with common bytes."""
    names_of: dict[tuple[Any, int, int], list[str]] = {}  # by storage
    for name, tensor in tensors.items():
        device = tensor.device
        if device.type == "meta" or not tensor.numel():
            continue
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if address and nbytes:
            names_of.setdefault((device, address, nbytes), []).append(name)
    groups: list[list[str]] = []
    for names in names_of.values():
        if len(names) == 1:
            continue
        last = -1  # where the previous tensor ends; none yet
        for begin, end, name in sorted((*_byte_range(tensors[name]), name) for name in names):
            if begin < last:
                groups[-1].append(name)
            else:
                groups.append([name])
            last = end
    return [names for names in groups if len(names) > 1]


def _byte_range(tensor: Tensor) -> tuple[int, int]:
    """Return where the bytes of a tensor begin and end in its storage. The tensor is not empty."""
    first = int(tensor.storage_offset())
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = first + sum((size - 1) * stride for size, stride in steps)
    return first * tensor.itemsize, (last + 1) * tensor.itemsize


def _shape_in_elements(name: str, shape: list[int]) -> list[int]:
    """Convert torch's shape of a tensor with two elements per byte, which counts bytes."""
    if not shape:
        raise ValueError(f"`{name}` has elements of four bits and no dimension to count them in")
    return [*shape[:-1], 2 * shape[-1]]


class _FlatFileBuilder:
    """Collects the members of a file and their storages."""

    def __init__(self) -> None:
        self.storages: list[torch.UntypedStorage] = []
        self.numbers: dict[int, int] = {}  # by the address of the StorageImpl
        self.rows = bytearray()
        self.devices: set[int] = set()  # 0 for host memory, n + 1 for CUDA device n
        self.copied: dict[str, int] = {}  # by device, how many storages torch copied
        self.members: list[TensorMember] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Check one tensor, and add it and its storage."""
        if not tensor.is_contiguous():
            raise ValueError(
                f"You are trying to save a non contiguous tensor: `{name}`, which is not allowed."
                " Call `.contiguous()` on it, or save the tensor that it is a view of"
            )
        dtype_entry = _DTYPES.get(tensor.dtype)
        if dtype_entry is None:
            raise KeyError(
                f"`{name}` has the dtype {tensor.dtype}, which safetensors does not support"
            )
        dtype_name, rank, itemsize = dtype_entry
        device = _device.device_number_of_tensor(tensor)
        if device < 0:  # neither in host memory nor on a CUDA device
            origin = str(tensor.device)
            tensor = tensor.to("cpu")
            device = _device.device_number_of_tensor(tensor)
            self.copied[origin] = self.copied.get(origin, 0) + 1
        if _bits(tensor):
            tensor = tensor.resolve_conj().resolve_neg()
        nbytes, offset = tensor.numel() * itemsize, int(tensor.storage_offset()) * itemsize
        storage = -1  # its number; -1 for a tensor without bytes
        if nbytes:
            storage = self._add_storage(name, tensor, device, least_nbytes=offset + nbytes)
        shape = list(tensor.shape)
        if dtype_name == _HALF_BYTE_DTYPE:
            shape = _shape_in_elements(name, shape)
        self.members.append(
            TensorMember(name, dtype_name, rank, itemsize, shape, storage, offset, nbytes)
        )

    def _add_storage(self, name: str, tensor: Tensor, device: int, least_nbytes: int) -> int:
        """Add the tensor's storage if it is new, and return its number. Raise ValueError if the
        storage has less than `least_nbytes` bytes."""
        storage = tensor.untyped_storage()
        address, nbytes = _device.address_of(storage), storage.nbytes()
        if address == 0 or nbytes < least_nbytes:
            raise ValueError(
                f"tensor `{name}` has no memory, or too little: it was freed or shrunk"
            )
        number = self.numbers.get(storage._cdata)
        if number is None:
            number = self.numbers[storage._cdata] = len(self.storages)
            self.storages.append(storage)
            self.rows += SOURCE.pack(address, nbytes, 0, device)
            self.devices.add(device)
        return number
