"""Describes a group of tensors as ranges of memory, and the tensors as views of those ranges.

Only the bytes that a tensor spans are copied, not its whole storage: for one row of a large matrix,
only that row. Tensors of a group that share bytes share them at the destination too, so views stay
views and no byte is copied twice. A tensor whose strides leave gaps is made contiguous first. If a
dimension is expanded, so that all its rows are the same memory, one row is copied.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from stillframe import _core
from stillframe._base import device as _device
from stillframe._save.parts import is_dense
from stillframe._tree.skeleton import SOURCE

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_COPY = struct.Struct("=QQQ")  # struct sfr_onload_copy


class Source(NamedTuple):
    """A range of a storage: `nbytes` from byte `offset` on."""

    storage: torch.UntypedStorage
    offset: int
    nbytes: int

    def bytes(self) -> torch.Tensor:
        """Return the bytes as a tensor of uint8 over the same memory."""
        whole = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return whole.set_(self.storage, self.offset, (self.nbytes,), (1,))

    def address(self) -> int:
        """Return the address of the first byte, as the host sees it."""
        return self.storage.data_ptr() + self.offset

    def device_address(self) -> int:
        """Return the address of the first byte, as the device's driver sees it."""
        return _device.address_of(self.storage) + self.offset


class View(NamedTuple):
    """A tensor of the group, as a view of one of its sources."""

    source: int  # the source's index; -1: the tensor has no bytes
    offset: int  # in the source, in bytes
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Layout:
    """The sources and views of a group.

    Args:
        tensors: Tensors that `check` has accepted.

    Attributes:
        sources: The ranges of memory to copy; empty after `let_go`.
        views: The tensors, as views of the sources, in the order given.
        lengths: The length of each source in bytes.
        nbytes: The sum of the lengths.
        room: The length in bytes of a buffer for all sources, each rounded up to 512 bytes.
        offsets: The offset of each source in that buffer.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        spans = [_Span(tensor) for tensor in tensors]
        self.sources, self.views = _arrange(spans)
        self._tensors = [span.tensor for span in spans]  # their versions are compared
        self.lengths = [source.nbytes for source in self.sources]
        self.nbytes = sum(self.lengths)
        self.offsets: list[int] = []
        self.room = 0
        for nbytes in self.lengths:
            self.offsets.append(self.room)
            self.room += -(-nbytes // _core.COPY_ALIGN) * _core.COPY_ALIGN

    def rows(self, device: int) -> bytearray:
        """Return the sources as rows (`struct sfr_source`) for a `_core.Snapshot`, all of them to
        be captured. `device` is 0 for the host, n for CUDA device n - 1."""
        out = bytearray()
        for source in self.sources:
            address = source.device_address() if device else source.address()
            out += SOURCE.pack(address, source.nbytes, 0, device)
        return out

    def let_go(self) -> None:
        """Drop the tensors and their memory; the views stay."""
        self.sources = []
        self._tensors = []

    def versions(self) -> list[int]:
        """Return the version counters of the tensors whose bytes are copied."""
        return [-1 if tensor.is_inference() else tensor._version for tensor in self._tensors]

    def changed(self, since: list[int]) -> list[int]:
        """Return the indices of the tensors that were written to since `versions` returned
        `since`."""
        return [i for i, now in enumerate(self.versions()) if now != since[i]]

    def views_on(self, storage: torch.UntypedStorage) -> list[torch.Tensor]:
        """Return the tensors as views of one storage that holds the sources at `offsets`."""
        return self._make([(storage, offset) for offset in self.offsets], storage.device)

    def views_on_each(self, storages: Sequence[torch.UntypedStorage]) -> list[torch.Tensor]:
        """Return the tensors as views of one storage for each source."""
        return self._make([(storage, 0) for storage in storages], torch.device("cpu"))

    def _make(
        self, bases: Sequence[tuple[torch.UntypedStorage, int]], device: torch.device
    ) -> list[torch.Tensor]:
        """Return the tensors as views. `bases` has, for each source, the storage with its bytes and
        its offset in that storage."""
        made = []
        for view in self.views:
            tensor = torch.empty(0, dtype=view.dtype, device=device)
            if view.source < 0:
                tensor = tensor.new_empty(view.shape)
            else:
                storage, begin = bases[view.source]
                offset = (begin + view.offset) // view.dtype.itemsize
                tensor.set_(storage, offset, view.shape, view.strides)
            made.append(tensor)
        return made


def copies(addresses: Iterable[int], base: int, layout: Layout) -> bytearray:
    """Return the rows of a `_core.Onload`, which describe copies from host memory to the device.

    Args:
        addresses: The address of each source in host memory.
        base: The address of the buffer on the device, which gets each source at its offset.
        layout: The layout of the sources.
    """
    out = bytearray()
    for address, offset, nbytes in zip(addresses, layout.offsets, layout.lengths, strict=True):
        out += _COPY.pack(address, base + offset, nbytes)
    return out


def sources_in(
    memory: _core.SnapshotMemory, offsets: Iterable[int], layout: Layout
) -> list[Source]:
    """Return the copies of a layout's sources in memory of the pool, each as a storage of its own.
    `offsets` are the offsets of the copies in the memory."""
    return [
        Source(
            torch.frombuffer(memory, dtype=torch.uint8, offset=at, count=nbytes).untyped_storage(),
            0,
            nbytes,
        )
        for at, nbytes in zip(offsets, layout.lengths, strict=True)
    ]


def check(tensors: object, device: torch.device, what: str) -> list[torch.Tensor]:
    """Check the tensors given to a call and return them as a list.

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


class _Span:
    """The range of bytes that a tensor spans.

    A tensor whose elements do not fill that range is cloned.

    Attributes:
        tensor: The tensor that is copied.
        storage, begin, end: Its storage, and the range of bytes in it.
        shape, strides, dtype: The shape, strides and dtype of a copy of the tensor.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        tensor = tensor.detach().resolve_conj().resolve_neg()
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        # All rows of an expanded dimension are the same memory: copy one.
        strides = tensor.stride()
        repeated = [
            size > 1 and stride == 0 for size, stride in zip(self.shape, strides, strict=True)
        ]
        for dim, again in enumerate(repeated):
            if again:
                tensor = tensor.narrow(dim, 0, 1)
        if not is_dense(tensor):
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        self.strides = tuple(
            0 if again else stride for again, stride in zip(repeated, tensor.stride(), strict=True)
        )
        self.storage = tensor.untyped_storage()
        self.begin = int(tensor.storage_offset()) * tensor.itemsize
        self.end = self.begin + tensor.numel() * tensor.itemsize
        self.tensor = tensor

    def apart(self) -> None:
        """Replace the tensor by a copy with memory of its own."""
        self.tensor = self.tensor.clone(memory_format=torch.preserve_format)
        self.storage, self.begin = self.tensor.untyped_storage(), 0
        self.end = self.tensor.numel() * self.tensor.itemsize


def _arrange(spans: list[_Span]) -> tuple[list[Source], list[View]]:
    """Return the sources and the view of each span. Spans that share bytes become one source."""
    views: list[View | None] = [None] * len(spans)
    sources: list[Source] = []
    # By storage and offset, so that spans that share bytes follow each other.
    order = sorted(range(len(spans)), key=lambda i: (spans[i].storage._cdata, spans[i].begin))
    for index in order:
        span = spans[index]
        number, offset = -1, 0
        if span.end > span.begin:
            last = sources[-1] if sources else None
            if last is not None and _join_or_move(span, last):
                offset = span.begin - last.offset
                end = max(last.offset + last.nbytes, span.end)
                sources[-1] = Source(last.storage, last.offset, end - last.offset)
            else:
                sources.append(Source(span.storage, span.begin, span.end - span.begin))
            number = len(sources) - 1
        views[index] = View(number, offset, span.dtype, span.shape, span.strides)
    return sources, [view for view in views if view is not None]


def _join_or_move(span: _Span, last: Source) -> bool:
    """Return True if a span begins inside the source before it; then the caller joins the two.

    If the span's elements would not be aligned in the joined source, move the span to memory of its
    own and return False.
    """
    if span.storage._cdata != last.storage._cdata or span.begin >= last.offset + last.nbytes:
        return False
    if (span.begin - last.offset) % span.dtype.itemsize:
        span.apart()
        return False
    return True
