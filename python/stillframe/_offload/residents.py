"""Decides which layers' weights are on the device: prefetched early, released as soon as possible.

Each slot holds one layer: while a layer computes, the next layer is copied into another slot.

The weights may change between a prefetch and the use. So each prefetch has a fingerprint of the
weights: the address and the version counter of each tensor. Writes through `.data` change neither,
but most of them change the whole tensor. So the fingerprint also has a few elements of each tensor,
spread evenly. A layer is copied again if the fingerprint is another when the layer is used, or if
`expire_prefetches` was called in between, for instance by an optimizer's step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import dlpack

from stillframe._offload.layout import count_spanned_elements
from stillframe._offload.offloader import Offloader
from stillframe._offload.run_all import run_all

_NR_SAMPLES = 16  # about how many elements of each tensor a fingerprint has


class Fingerprint:
    """A fingerprint of tensors in host memory. Two fingerprints are equal if no write between them
    was detected."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._identities = [(id(each), each.data_ptr(), each._version) for each in tensors]
        samples: dict[torch.dtype, list[Tensor]] = {}
        with torch.no_grad():
            for each in tensors:
                if each.numel():
                    samples.setdefault(each.dtype, []).append(_evenly_spaced_elements(each))
            # Compared as bytes, so that NaN equals itself.
            self._samples = [torch.cat(each).view(torch.uint8) for each in samples.values()]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fingerprint) or self._identities != other._identities:
            return False
        return all(map(torch.equal, self._samples, other._samples))

    __hash__ = None  # type: ignore[assignment]


def _evenly_spaced_elements(tensor: Tensor) -> Tensor:
    """Return a view of a few evenly spread elements of a tensor that has elements."""
    last = count_spanned_elements(tensor) - 1  # the last element, counted from the first
    step = max(last // _NR_SAMPLES, 1)
    nr_samples = last // step + 1
    return tensor.as_strided((nr_samples,), (step,), tensor.storage_offset())


class OnloadableLayer(Protocol):
    """A layer whose tensors can be copied to the device."""

    tensors: list[Tensor]  # on the CPU: parameters, then buffers
    nr_parameters: int

    def sources(self, fresh: bool) -> Sequence[Tensor]:
        """Return the CPU tensors to copy. Without `fresh`, the last result may be returned again,
        with older values."""

    def fingerprint(self) -> Fingerprint:
        """Return a fingerprint of the tensors as they are now."""


class _Prefetch(NamedTuple):
    """The prefetch of a layer."""

    what: Sequence[Tensor]  # the tensors on the CPU that are copied
    generation: int  # `LayersOnDevice._generation` when the prefetch was started
    fingerprint: Fingerprint  # of the layer, when the prefetch was started


class Group:
    """One layer's tensors on the device."""

    def __init__(self, onloaded: list[Tensor], nr_parameters: int) -> None:
        self.onloaded = onloaded  # over one storage: parameters, then buffers
        # The same tensors, but each buffer has a storage object of its own.
        buffers = map(_with_own_storage, onloaded[nr_parameters:])
        self.tensors = [*onloaded[:nr_parameters], *buffers]
        self.note_versions()

    def changed(self, index: int) -> bool:
        """Return whether a tensor was written to since the last call of `note_versions`."""
        return self.tensors[index]._version != self.versions[index]

    def current_versions(self) -> list[int]:
        """Return the present version counters."""
        return [tensor._version for tensor in self.tensors]

    def note_versions(self) -> None:
        self.versions = self.current_versions()


class LayersOnDevice:
    """The layers that are on the device or prefetched to it: at most `slots` at a time."""

    def __init__(self, offloader: Offloader, layers: Sequence[OnloadableLayer], slots: int) -> None:
        self._offloader = offloader
        self._layers = layers
        self._slots = slots
        self._groups: dict[OnloadableLayer, Group] = {}  # layers on the device, oldest first
        self._prefetches: dict[OnloadableLayer, _Prefetch] = {}  # layers on their way there
        self._generation = 0  # how often `expire_prefetches` was called

    def expire_prefetches(self) -> None:
        """Expire all prefetches that were started before this call. Any thread may call this."""
        self._generation += 1

    def all_tensors(self) -> list[Tensor]:
        return [tensor for layer in self._layers for tensor in layer.tensors]

    def tensors_in_use(self) -> list[Tensor]:
        """Return the tensors of all layers if a copy may be reading some of them, or if the device
        has a prefetched copy of some. Otherwise return []."""
        if self._prefetches or self._offloader._is_reading():
            return self.all_tensors()
        return []

    def wait(self) -> None:
        self._offloader.wait_read()

    def get(self, layer: OnloadableLayer) -> Group | None:
        return self._groups.get(layer)

    def has(self, layer: OnloadableLayer) -> bool:
        """Return whether the layer is on the device or on its way there."""
        return layer in self._groups or layer in self._prefetches

    def bring(self, layer: OnloadableLayer, fresh: bool) -> Group:
        """Return a layer's tensors on the device. Copy them there if needed (for `fresh` see
        `OnloadableLayer.sources`). The current stream waits for copies that still run."""
        group = self._groups.get(layer)
        if group is not None:
            return group
        prefetch = self._prefetches.get(layer)
        if prefetch is not None and not self._is_up_to_date(layer, prefetch):
            self._offloader._count_stale_prefetch()
            self.give_up(layer)
            prefetch, fresh = None, True
        if prefetch is None:
            self._ensure_free_slot()
            what = layer.sources(fresh)
        else:
            what = prefetch.what
        # Not in inference mode: autograd cannot save tensors that are made in it.
        with torch.inference_mode(False), torch.no_grad():
            group = self._groups[layer] = Group(self._onload(what), layer.nr_parameters)
        self._prefetches.pop(layer, None)
        return group

    def prefetch(self, layer: OnloadableLayer | None, fresh: bool) -> None:
        """Give up expired prefetches. Then start to copy a layer, if any, if a slot is free."""
        self._drop_expired_prefetches()
        if layer is None or self.has(layer):
            return
        if len(self._groups) + len(self._prefetches) >= self._slots:
            return
        what = layer.sources(fresh)
        with torch.inference_mode(False), torch.no_grad():
            fingerprint = layer.fingerprint()
            if _has_bytes(what) and self._offloader.prefetch(what):
                self._prefetches[layer] = _Prefetch(what, self._generation, fingerprint)

    def give_up(self, layer: OnloadableLayer) -> None:
        """Release the layer's slot, if any, after the work queued on the current stream."""
        prefetch = self._prefetches.pop(layer, None)
        if prefetch is not None:
            self._offloader._give_up_prefetch(prefetch.what)
        group = self._groups.pop(layer, None)
        if group is not None and _has_bytes(group.onloaded):
            self._offloader.release(group.onloaded)

    def give_up_all_except(self, keep: Iterable[OnloadableLayer | None]) -> None:
        kept = set(keep)
        others = [layer for layer in (*self._prefetches, *self._groups) if layer not in kept]
        run_all(functools.partial(self.give_up, layer) for layer in others)

    def _onload(self, what: Sequence[Tensor]) -> list[Tensor]:
        if _has_bytes(what):
            return self._offloader.onload(what)
        # Tensors without bytes take no slot.
        return [tensor.to(self._offloader.device, copy=True) for tensor in what]

    def _is_up_to_date(self, layer: OnloadableLayer, prefetch: _Prefetch) -> bool:
        """Return whether a prefetch has the present values of the weights."""
        if prefetch.generation != self._generation:
            return False  # it has expired
        return prefetch.fingerprint == layer.fingerprint()

    def _drop_expired_prefetches(self) -> None:
        for layer, prefetch in list(self._prefetches.items()):
            if prefetch.generation != self._generation:
                self.give_up(layer)

    def _ensure_free_slot(self) -> None:
        """Release slots until one is free: first those of prefetches, then of the oldest layers."""
        self._drop_expired_prefetches()
        while len(self._groups) + len(self._prefetches) >= self._slots:
            oldest = next(iter(self._prefetches or self._groups))
            self.give_up(oldest)


def _with_own_storage(tensor: Tensor) -> Tensor:
    """Return a tensor over the same memory with another storage object."""
    # torch's compilers refuse a tensor that is written to and shares its storage with others.
    try:
        shared = dlpack.from_dlpack(dlpack.to_dlpack(tensor))  # type: ignore[attr-defined]
    except (BufferError, RuntimeError):  # DLPack does not support the dtype
        return tensor
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(
        shared.untyped_storage(), int(shared.storage_offset()), tensor.shape, tensor.stride()
    )


def _has_bytes(tensors: Sequence[Tensor]) -> bool:
    return any(tensor.numel() for tensor in tensors)
