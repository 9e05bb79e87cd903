"""Decides which layers' weights are on the device: prefetched early, released as soon as possible.

There are few slots, and each holds one layer: while a layer computes, the next one is copied into
another slot.

A prefetch reads the weights before they are used. So it records the pass in which it was started
and a fingerprint of the weights. If either has changed when the layer is used, the weights are
copied again.

The fingerprint detects most writes without reading every byte. Most writes change a tensor's
version counter, and replacing its memory changes its address. Writes through `.data` change
neither. Most of those change the whole tensor, so a few elements of each tensor, spread evenly, are
kept and compared.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import dlpack

from stillframe._offload.offloader import Offloader
from stillframe._offload.run_all import run_all

_ELEMENTS = 16  # intervals between the elements that are kept of each tensor


class Fingerprint:
    """A fingerprint of tensors in host memory.

    Two fingerprints are equal if no write between them was detected.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._known = [(id(each), each.data_ptr(), each._version) for each in tensors]
        some: dict[torch.dtype, list[Tensor]] = {}
        with torch.no_grad():
            for each in tensors:
                if each.numel():
                    some.setdefault(each.dtype, []).append(_sample(each))
            # Compared as bytes, so that NaN equals itself.
            self._samples = [torch.cat(each).view(torch.uint8) for each in some.values()]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Fingerprint)
            and self._known == other._known
            and all(map(torch.equal, self._samples, other._samples))
        )

    __hash__ = None  # type: ignore[assignment]


def _sample(tensor: Tensor) -> Tensor:
    """Return a view of a few evenly spread elements."""
    span = tensor.numel() - 1
    if not tensor.is_contiguous():
        span = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    step = max(span // _ELEMENTS, 1)
    return tensor.as_strided((span // step + 1,), (step,), tensor.storage_offset())


class Source(Protocol):
    """A layer whose tensors can be brought to the device.

    Attributes:
        tensors: Its tensors on the CPU: parameters, then buffers, which a forward may write to.
        nr_parameters: How many of them are parameters.
    """

    tensors: list[Tensor]
    nr_parameters: int

    def sources(self, fresh: bool) -> Sequence[Tensor]:
        """Return the CPU tensors to copy: as they are now with `fresh`, else those of the last
        call."""

    def fingerprint(self) -> Fingerprint:
        """Return a fingerprint of the tensors as they are now."""


class _Coming(NamedTuple):
    """A layer that is being prefetched."""

    what: Sequence[Tensor]
    number: int  # the pass in which it was started
    fingerprint: Fingerprint


class Group:
    """One layer's tensors on the device.

    Args:
        brought: The tensors as copied, over one storage.
        nr_parameters: How many of them are parameters; the others are buffers.
    """

    def __init__(self, brought: list[Tensor], nr_parameters: int) -> None:
        self.brought = brought
        self.tensors = [*brought[:nr_parameters], *map(_apart, brought[nr_parameters:])]
        self.note_versions()

    def changed(self, index: int) -> bool:
        return self.tensors[index]._version != self.versions[index]

    def now(self) -> list[int]:
        return [tensor._version for tensor in self.tensors]

    def note_versions(self) -> None:
        """Take the current versions as the ones that later changes are counted from."""
        self.versions = self.now()


class Residents:
    def __init__(self, offloader: Offloader, layers: Sequence[Source], slots: int) -> None:
        self._offloader = offloader
        self._layers = layers
        self._slots = slots
        self._groups: dict[Source, Group] = {}  # oldest first
        self._coming: dict[Source, _Coming] = {}
        self._pass = 0

    def end_pass(self) -> None:
        """Begin a new pass, in which no earlier prefetch is used. Any thread may call it."""
        self._pass += 1

    def all(self) -> list[Tensor]:
        """Return the tensors of all layers."""
        return [tensor for layer in self._layers for tensor in layer.tensors]

    def reads(self) -> list[Tensor]:
        """Return the tensors of all layers if any of them may be read or prefetched now, else
        none."""
        return self.all() if self._coming or self._offloader._is_reading() else []

    def wait(self) -> None:
        """Wait until nothing is read any more."""
        self._offloader.wait_read()

    def get(self, layer: Source) -> Group | None:
        return self._groups.get(layer)

    def has(self, layer: Source) -> bool:
        """Return whether the layer is on the device or on its way there."""
        return layer in self._groups or layer in self._coming

    def bring(self, layer: Source, fresh: bool) -> Group:
        """Return the layer on the device; the current stream waits for copies that still run.

        Args:
            fresh: Copy the CPU's tensors as they are now, unless the layer is on its way already.
        """
        group = self._groups.get(layer)
        if group is None:
            coming = self._coming.get(layer)
            if coming is not None and not self._is_good(layer, coming):
                self._offloader._count_stale()
                self.give_up(layer)
                coming, fresh = None, True
            if coming is None:
                self._make_room(1)
                what = layer.sources(fresh)
            else:
                what = coming.what
            # Tensors made in inference mode cannot be saved for a backward.
            with torch.inference_mode(False), torch.no_grad():
                group = self._groups[layer] = Group(self._onload(what), layer.nr_parameters)
            self._coming.pop(layer, None)
        return group

    def prefetch(self, layer: Source | None, fresh: bool) -> None:
        """Start to copy the layer to the device, if there is a slot."""
        self._give_up_earlier()
        if layer is None or self.has(layer):
            return
        if len(self._groups) + len(self._coming) >= self._slots:
            return
        what = layer.sources(fresh)
        with torch.inference_mode(False), torch.no_grad():
            fingerprint = layer.fingerprint()
            if _has_bytes(what) and self._offloader.prefetch(what):
                self._coming[layer] = _Coming(what, self._pass, fingerprint)

    def give_up(self, layer: Source) -> None:
        """Release the layer's slot after the work queued on the current stream so far."""
        coming = self._coming.pop(layer, None)
        if coming is not None:
            self._offloader._give_up_ahead(coming.what)
        group = self._groups.pop(layer, None)
        if group is not None and _has_bytes(group.brought):
            self._offloader.release(group.brought)

    def give_up_others(self, keep: Iterable[Source | None]) -> None:
        kept = set(keep)
        others = [layer for layer in (*self._coming, *self._groups) if layer not in kept]
        run_all(functools.partial(self.give_up, layer) for layer in others)

    def _onload(self, what: Sequence[Tensor]) -> list[Tensor]:
        if _has_bytes(what):
            return self._offloader.onload(what)
        return [tensor.to(self._offloader.device, copy=True) for tensor in what]

    def _is_good(self, layer: Source, coming: _Coming) -> bool:
        """Return whether a prefetch holds what a new one would copy now."""
        return coming.number == self._pass and coming.fingerprint == layer.fingerprint()

    def _give_up_earlier(self) -> None:
        """Release the slots of prefetches that were started in an earlier pass."""
        for layer in [each for each, c in self._coming.items() if c.number != self._pass]:
            self.give_up(layer)

    def _make_room(self, nr: int) -> None:
        self._give_up_earlier()
        while len(self._groups) + len(self._coming) > self._slots - nr:
            self.give_up(next(iter(self._coming or self._groups)))


def _apart(tensor: Tensor) -> Tensor:
    """Return the same memory as a storage of its own, which keeps the original alive.

    torch's compilers refuse a tensor that is written to and shares its storage with others.
    """
    try:
        lent = dlpack.from_dlpack(dlpack.to_dlpack(tensor))  # type: ignore[attr-defined]
    except (BufferError, RuntimeError):  # DLPack does not support the dtype
        return tensor
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(
        lent.untyped_storage(), int(lent.storage_offset()), tensor.shape, tensor.stride()
    )


def _has_bytes(tensors: Sequence[Tensor]) -> bool:
    """Return whether there is anything to copy: an activation layer has no tensors."""
    return any(tensor.numel() for tensor in tensors)
