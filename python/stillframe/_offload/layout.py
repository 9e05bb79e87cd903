"""Describes a group of tensors as ranges of memory, and the tensors as views of those ranges.

Only the bytes that a tensor spans are copied, not its whole storage. Tensors of a group that share
bytes also share them at the destination, so views stay views and no byte is copied twice. A tensor
whose strides leave gaps is made contiguous first. Of an expanded dimension, one row is copied.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from stillframe import _core
from stillframe._base import device as _device
from stillframe._save.parts import has_no_gaps_or_overlaps
from stillframe._tree.skeleton import SOURCE

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_COPY_ROW = struct.Struct("=QQQ")  # struct sfr_onload_copy


class Source(NamedTuple):
    """A range of a storage: `nbytes` from byte `offset` on."""

    storage: torch.UntypedStorage
    offset: int
    nbytes: int

    def bytes(self) -> torch.Tensor:
        """Return a tensor of uint8 over the same memory."""
        whole = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return whole.set_(self.storage, self.offset, (self.nbytes,), (1,))

    def address(self) -> int:
        return self.storage.data_ptr() + self.offset

    def device_address(self) -> int:
        """Return the address for the device's driver."""
        return _device.address_of(self.storage) + self.offset


class View(NamedTuple):
    """A tensor of the group, as a view of one of the sources."""

    source: int  # the index of the source; -1: the tensor has no bytes
    offset: int  # in the source, in bytes
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Layout:
    """The sources and views of a group of tensors that `check` has accepted."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        spans = [_TensorByteRange(tensor) for tensor in tensors]
        # The ranges of memory to copy (none after `drop_tensors`), and the tensors as given.
        self.sources, self.views = _merge_into_sources(spans)
        self._tensors = [span.tensor for span in spans]  # to compare their versions
        self.lengths = [source.nbytes for source in self.sources]
        self.nbytes = sum(self.lengths)
        # The length of a buffer for all sources, and the offset of each source there.
        self.buffer_nbytes = 0
        self.offsets: list[int] = []
        for nbytes in self.lengths:
            self.offsets.append(self.buffer_nbytes)
            nr_units = -(-nbytes // _core.COPY_ALIGN)  # -(-a // b) rounds up
            self.buffer_nbytes += nr_units * _core.COPY_ALIGN

    def pack_source_rows(self, device: int) -> bytearray:
        """Return the sources as rows (`struct sfr_source`) for a `_core.Snapshot`. `device` is 0
        for the host, n for CUDA device n - 1."""
        out = bytearray()
        for source in self.sources:
            address = source.device_address() if device else source.address()
            out += SOURCE.pack(address, source.nbytes, 0, device)  # 0: SFR_CAPTURED
        return out

    def drop_tensors(self) -> None:
        """Drop the references to the tensors and their memory. The views stay."""
        self.sources = []
        self._tensors = []

    def versions(self) -> list[int]:
        """Return the version counter of each tensor; -1 for inference tensors, which have none."""
        return [-1 if tensor.is_inference() else tensor._version for tensor in self._tensors]

    def changed(self, since: list[int]) -> list[int]:
        """Return the indices of the tensors that were written to since `versions()` was `since`."""
        return [i for i, now in enumerate(self.versions()) if now != since[i]]

    def views_on(self, storage: torch.UntypedStorage) -> list[torch.Tensor]:
        """Return the tensors as views of one storage, which has the sources at `offsets`."""
        return self._views([(storage, offset) for offset in self.offsets], storage.device)

    def views_on_each(self, storages: Sequence[torch.UntypedStorage]) -> list[torch.Tensor]:
        """Return the tensors as views of CPU storages, one for each source."""
        return self._views([(storage, 0) for storage in storages], torch.device("cpu"))

    def _views(
        self, destinations: Sequence[tuple[torch.UntypedStorage, int]], device: torch.device
    ) -> list[torch.Tensor]:
        """Return the tensors as views of copies of the sources. `destinations`: for each source,
        the storage that has the copy, and the offset in it."""
        made = []
        for view in self.views:
            tensor = torch.empty(0, dtype=view.dtype, device=device)
            if view.source < 0:
                tensor = tensor.new_empty(view.shape)
            else:
                storage, begin = destinations[view.source]
                offset = (begin + view.offset) // view.dtype.itemsize
                tensor.set_(storage, offset, view.shape, view.strides)
            made.append(tensor)
        return made


def count_spanned_elements(tensor: torch.Tensor) -> int:
    """Return the number of elements from a tensor's first element to its last, gaps included. The
    tensor has elements."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return last + 1


def copy_rows(addresses: Iterable[int], base: int, layout: Layout) -> bytearray:
    """Return the rows of a `_core.Onload`: copies from the sources, at `addresses` in host memory,
    to a buffer at address `base` on the device."""
    out = bytearray()
    for address, offset, nbytes in zip(addresses, layout.offsets, layout.lengths, strict=True):
        out += _COPY_ROW.pack(address, base + offset, nbytes)
    return out


def sources_over_pool_memory(
    memory: _core.SnapshotMemory, offsets: Iterable[int], layout: Layout
) -> list[Source]:
    """Return the copies of a layout's sources in memory of the pool, each as a storage of its own.
    `offsets` are the offsets of the copies in the memory."""
    sources = []
    for offset, nbytes in zip(offsets, layout.lengths, strict=True):
        copy = torch.frombuffer(memory, dtype=torch.uint8, offset=offset, count=nbytes)
        sources.append(Source(copy.untyped_storage(), 0, nbytes))
    return sources


def check(tensors: object, device: torch.device, what: str) -> list[torch.Tensor]:
    """Check the tensors given to a call, and return them in a list.

    Args:
        device: The device that the tensors must be on.
        what: The name of the call, for error messages.

    Raises:
        TypeError: An element is not a tensor with plain, strided memory.
        ValueError: A tensor is on another device.
    """
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Iterable):
        raise TypeError(f"{what} takes a list of tensors, not {type(tensors).__name__}")
    given = list(tensors)
    for index, tensor in enumerate(given):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{what} takes tensors: number {index} is of type {type(tensor).__name__}"
            )
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_quantized:
            raise TypeError(
                f"{what} takes tensors with plain, strided memory: number {index} is a"
                f" {type(tensor).__name__} of layout {tensor.layout} and dtype {tensor.dtype}."
                " Give what it is made of"
            )
        if tensor.device != device:
            raise ValueError(
                f"{what} takes tensors on {device}: number {index} is on {tensor.device}"
            )
    return given


class _TensorByteRange:
    """The range of bytes, `begin` to `end` of `storage`, that a tensor spans. A tensor with gaps is
    cloned. `shape`, `strides` and `dtype` are those of a copy of the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        tensor = tensor.detach().resolve_conj().resolve_neg()
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        # All rows of an expanded dimension are the same memory. Copy one of them.
        strides = tensor.stride()
        expanded = [dim for dim, size in enumerate(self.shape) if size > 1 and strides[dim] == 0]
        for dim in expanded:
            tensor = tensor.narrow(dim, 0, 1)
        if not has_no_gaps_or_overlaps(tensor):
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        self.strides = tuple(
            0 if dim in expanded else stride for dim, stride in enumerate(tensor.stride())
        )
        self.storage = tensor.untyped_storage()
        self.begin = int(tensor.storage_offset()) * tensor.itemsize
        self.end = self.begin + tensor.numel() * tensor.itemsize
        self.tensor = tensor

    def clone(self) -> None:
        """Replace the tensor by a copy with memory of its own."""
        self.tensor = self.tensor.clone(memory_format=torch.preserve_format)
        self.storage, self.begin = self.tensor.untyped_storage(), 0
        self.end = self.tensor.numel() * self.tensor.itemsize


def _merge_into_sources(spans: list[_TensorByteRange]) -> tuple[list[Source], list[View]]:
    """Return the sources and the view of each span. Spans that share bytes become one source."""
    views: list[View | None] = [None] * len(spans)
    sources: list[Source] = []
    # Spans that share bytes follow each other.
    order = sorted(range(len(spans)), key=lambda i: (spans[i].storage._cdata, spans[i].begin))
    for index in order:
        span = spans[index]
        source_index, offset = -1, 0  # for a tensor without bytes
        if span.end > span.begin:
            joined = sources[-1] if sources and _begins_in(span, sources[-1]) else None
            if joined is not None and (span.begin - joined.offset) % span.dtype.itemsize:
                span.clone()  # the elements would not be aligned in the joined source
                joined = None
            if joined is not None:
                offset = span.begin - joined.offset
                end = max(joined.offset + joined.nbytes, span.end)
                sources[-1] = Source(joined.storage, joined.offset, end - joined.offset)
            else:
                sources.append(Source(span.storage, span.begin, span.end - span.begin))
            source_index = len(sources) - 1
        views[index] = View(source_index, offset, span.dtype, span.shape, span.strides)
    return sources, [view for view in views if view is not None]  # every span has its view now


def _begins_in(span: _TensorByteRange, source: Source) -> bool:
    if span.storage._cdata != source.storage._cdata:
        return False
    return span.begin < source.offset + source.nbytes
