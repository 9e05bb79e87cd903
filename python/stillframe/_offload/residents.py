"""Which layers' weights are on the device: brought in ahead of need, given up as soon as possible.

There are few slots, and each holds one layer. While a layer computes, the next one comes into the
other.

What comes ahead of need is read when it is sent for, not when it is used. So it carries the pass
that it was sent for in, and a stamp of what was read; both are looked at when it is used, and where
one is another by then, it comes again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import dlpack

from stillframe._offload.every import every
from stillframe._offload.offloader import Offloader
from stillframe._offload.stamp import Stamp


class Source(Protocol):
    """What can be brought in.

    Attributes:
        tensors: Its own, on the CPU: parameters, then buffers, which a forward may write to.
        nr_parameters: How many of them are parameters.
    """

    tensors: list[Tensor]
    nr_parameters: int

    def sources(self, anew: bool) -> Sequence[Tensor]:
        """The CPU tensors; with `anew` as they are now, else as they were when last asked for."""

    def stamp(self) -> Stamp:
        """Of the tensors as they are now."""


class _Coming(NamedTuple):
    """A layer that was sent for ahead of need."""

    what: Sequence[Tensor]
    number: int  # of the pass
    stamp: Stamp


class Group:
    """One layer's tensors on the device.

    Args:
        brought: As they came, over one storage.
        nr_parameters: How many of them are; the others are buffers.
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
        """What has changed so far is known."""
        self.versions = self.now()


class Residents:
    def __init__(self, offloader: Offloader, layers: Sequence[Source], slots: int) -> None:
        self._offloader = offloader
        self._layers = layers
        self._slots = slots
        self._groups: dict[Source, Group] = {}  # the longest there first
        self._coming: dict[Source, _Coming] = {}
        self._pass = 0

    def end_pass(self) -> None:
        """What is computed from now on belongs to another pass: nothing that was sent for before is
        used in it. Any thread may call it."""
        self._pass += 1

    def reads(self) -> list[Tensor]:
        """What may be being read, or was sent for: tensors of any layer, if there is anything."""
        if not (self._coming or self._offloader._is_reading()):
            return []
        return [tensor for layer in self._layers for tensor in layer.tensors]

    def wait(self) -> None:
        """Returns when nothing is read any more."""
        self._offloader.wait_read()

    def get(self, layer: Source) -> Group | None:
        return self._groups.get(layer)

    def has(self, layer: Source) -> bool:
        """Whether the layer is there or coming."""
        return layer in self._groups or layer in self._coming

    def bring(self, layer: Source, anew: bool) -> Group:
        """The layer on the device: the current stream waits for it where it is still coming.

        Args:
            anew: Ask for its tensors anew, unless they are coming already.
        """
        group = self._groups.get(layer)
        if group is None:
            coming = self._coming.get(layer)
            if coming is not None and not self._is_good(layer, coming):
                self._offloader._count_stale()
                self.give_up(layer)
                coming, anew = None, True
            if coming is None:
                self._make_room(1)
                what = layer.sources(anew)
            else:
                what = coming.what
            # Tensors made in inference mode could never be saved for a backward.
            with torch.inference_mode(False), torch.no_grad():
                group = self._groups[layer] = Group(self._onload(what), layer.nr_parameters)
            self._coming.pop(layer, None)
        return group

    def prefetch(self, layer: Source | None, anew: bool) -> None:
        """Has the layer come in beside what runs, if there is a slot."""
        self._give_up_earlier()
        if layer is None or self.has(layer):
            return
        if len(self._groups) + len(self._coming) >= self._slots:
            return
        what = layer.sources(anew)
        with torch.inference_mode(False), torch.no_grad():
            stamp = layer.stamp()
            if _has_bytes(what) and self._offloader.prefetch(what):
                self._coming[layer] = _Coming(what, self._pass, stamp)

    def give_up(self, layer: Source) -> None:
        """The layer is not needed on the device any more, after the current stream's work."""
        coming = self._coming.pop(layer, None)
        if coming is not None:
            self._offloader._give_up_ahead(coming.what)
        group = self._groups.pop(layer, None)
        if group is not None and _has_bytes(group.brought):
            self._offloader.release(group.brought)

    def give_up_others(self, keep: Iterable[Source | None]) -> None:
        kept = set(keep)
        others = [layer for layer in (*self._coming, *self._groups) if layer not in kept]
        every(functools.partial(self.give_up, layer) for layer in others)

    def _onload(self, what: Sequence[Tensor]) -> list[Tensor]:
        if _has_bytes(what):
            return self._offloader.onload(what)
        return [tensor.to(self._offloader.device, copy=True) for tensor in what]

    def _is_good(self, layer: Source, coming: _Coming) -> bool:
        """Whether it is what would be sent for now."""
        return coming.number == self._pass and coming.stamp == layer.stamp()

    def _give_up_earlier(self) -> None:
        """Slots that hold what was sent for in an earlier pass are free."""
        for layer in [each for each, c in self._coming.items() if c.number != self._pass]:
            self.give_up(layer)

    def _make_room(self, nr: int) -> None:
        self._give_up_earlier()
        while len(self._groups) + len(self._coming) > self._slots - nr:
            self.give_up(next(iter(self._coming or self._groups)))


def _apart(tensor: Tensor) -> Tensor:
    """The same memory as a storage of its own, which keeps the other: torch's compilers take no
    tensor that is written to and shares a storage with others."""
    try:
        lent = dlpack.from_dlpack(dlpack.to_dlpack(tensor))  # type: ignore[attr-defined]
    except (BufferError, RuntimeError):  # of a type that cannot be lent
        return tensor
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(
        lent.untyped_storage(), int(lent.storage_offset()), tensor.shape, tensor.stride()
    )


def _has_bytes(tensors: Sequence[Tensor]) -> bool:
    """Whether there is anything to bring: an activation between layers has no tensors."""
    return any(tensor.numel() for tensor in tensors)
