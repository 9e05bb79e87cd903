"""Implements `offload_activations`: tensors that autograd saves for backward wait in the pool.

    forward    saved: a_1 is copied out   a_2 is copied out   ...   a_n stays (`keep_last`)
    backward   a_n is there, a_(n-1) is prefetched   then a_(n-2) is prefetched   ...

A storage is copied once, even if several views of it are saved. Parameters, small tensors, tensors
of other devices and tensors that the caller excludes are passed on to the enclosing saved-tensor
hooks.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from stillframe._base import device as _device
from stillframe._offload import graph
from stillframe._offload.device_pool import OffloadStats
from stillframe._offload.layout import count_spanned_elements
from stillframe._offload.offloader import Offloader
from stillframe._offload.saved import Kept, SavedTensorHooks, View, check_version
from stillframe._offload.ticket import Ticket
from stillframe._save.engine import Engine
from stillframe.errors import StillframeError

_AHEAD = 4  # how many saved tensors are prefetched before backward asks for them
_SLOTS = 2 * _AHEAD  # the slots of each device's Offloader


class _SavedBytes:
    """Bytes that autograd saves: a whole storage, or a small range of a large storage.

    - on the device, as they were saved: only `tensor` is set
    - in the pool: only `ticket` is set
    - on the device again, until backward has unpacked every view: both are set
    """

    def __init__(self, tensor: Tensor, number: int) -> None:
        self.number = number  # of this device's saved bytes, in the order in which they were saved
        self.nr_views = 0  # how many saved tensors are views of these bytes
        self.ticket: Ticket | None = None
        self.tensor: Tensor | None = tensor
        self._version = tensor._version
        self._nr_unpacked = 0  # how many of the views the current backward has unpacked

    def changed(self) -> bool:
        """Return whether bytes on the device were written to since they were saved."""
        return self.tensor is not None and self.tensor._version != self._version

    def check(self) -> None:
        """Raise autograd's error if the bytes were written to before they were offloaded."""
        if self.ticket is None and self.tensor is not None:
            what = "one of the variables needed for gradient computation"
            check_version(self.tensor, self._version, what)

    def note_view_unpacked(self) -> None:
        """Record that backward has unpacked a view. After the last view, drop the tensor on the
        device if the bytes are in the pool."""
        self._nr_unpacked += 1
        if self._nr_unpacked == self.nr_views:
            self._nr_unpacked = 0  # another backward may follow
            if self.ticket is not None:
                self.tensor = None


class _SavedView(NamedTuple):
    """The object that autograd keeps in place of a saved tensor."""

    owner: OffloadedActivations
    saved: _SavedBytes
    view: View

    def unpack(self) -> Tensor:
        tensor = self.view.of(self.owner._bring_to_device(self.saved))
        self.saved.note_view_unpacked()
        return tensor


class _SavedBytesOfDevice:
    """The saved bytes of one device, in the order in which autograd saved them."""

    def __init__(self, offloader: Offloader, keep_last: int) -> None:
        self.offloader = offloader
        self._keep_last = keep_last
        self._not_offloaded: deque[weakref.ref[_SavedBytes]] = deque()  # oldest first
        # All bytes that backward may still need, by number.
        self._by_number: weakref.WeakValueDictionary[int, _SavedBytes] = (
            weakref.WeakValueDictionary()
        )
        # The `_SavedBytes` of each storage or range. A key has the address of the StorageImpl; the
        # StorageWeakRef makes sure that no other storage gets this address.
        self._by_range: dict[Any, tuple[StorageWeakRef, weakref.ref[_SavedBytes]]] = {}
        self._next_number = 0  # the number of the next `_SavedBytes`

    def save(self, tensor: Tensor) -> tuple[_SavedBytes, View]:
        """Return the `_SavedBytes` with the tensor's bytes, and the tensor as a view of it. Make a
        new `_SavedBytes` if there is none."""
        to_offload, begin = _range_to_offload(tensor)
        storage = tensor.untyped_storage()
        range_key = (storage._cdata, to_offload.storage_offset(), to_offload.shape)
        # The version is in the key, so a tensor that is saved again after a write gets a new entry.
        key = (*range_key, to_offload.dtype, tensor._version)
        view = View(tensor.shape, tensor.stride(), begin, tensor.dtype)
        saved = None
        if key in self._by_range:
            _, reference = self._by_range[key]  # the StorageWeakRef only makes the key unique
            saved = reference()
        if saved is None:
            saved = _SavedBytes(to_offload, self._next_number)
            self._next_number += 1
            self._by_number[saved.number] = saved
            self._by_range[key] = (StorageWeakRef(storage), weakref.ref(saved))  # type: ignore[no-untyped-call]
            self._not_offloaded.append(weakref.ref(saved))
            self._offload_older()
        saved.nr_views += 1
        return saved, view

    def _offload_older(self) -> None:
        """Offload all but the `keep_last` newest tensors."""
        while len(self._not_offloaded) > self._keep_last:
            reference = self._not_offloaded.popleft()
            saved = reference()
            # A changed tensor stays, so that backward reports the write.
            if saved is not None and saved.tensor is not None and not saved.changed():
                saved.ticket = self.offloader.offload([saved.tensor])
                saved.tensor = None
        # Drop the entries whose bytes are gone, but rarely, because this visits every entry.
        if len(self._by_range) > 2 * len(self._by_number) + 64:
            self._by_range = {
                key: (storage, reference)
                for key, (storage, reference) in self._by_range.items()
                if reference() is not None
            }

    def bring(self, saved: _SavedBytes) -> Tensor:
        """Return the bytes on the device, and prefetch those that were saved before them."""
        saved.check()
        if saved.tensor is None:
            assert saved.ticket is not None
            [saved.tensor] = self.offloader.onload(saved.ticket)
            self.offloader.release([saved.tensor])  # the tensor keeps its memory without the slot
        nr_ahead = 0
        # Look at more than `_AHEAD` numbers, because some of these bytes are gone or on the device.
        first = max(saved.number - 4 * _AHEAD + 1, 0)
        for number in reversed(range(first, saved.number)):
            earlier = self._by_number.get(number)
            if earlier is None or earlier.ticket is None or earlier.tensor is not None:
                continue  # these bytes are gone, or have not left the device, or are back there
            nr_ahead += 1
            if nr_ahead > _AHEAD or not self.offloader.prefetch(earlier.ticket):
                break
        return saved.tensor


class OffloadedActivations:
    """The context manager that `offload_activations` returns; it can be reused and nested."""

    def __init__(
        self,
        min_bytes: int,
        keep_last: int,
        predicate: Callable[[Tensor], bool] | None,
        device: torch.device | None,
        engine: Engine | None,
    ) -> None:
        self._min_bytes = min_bytes
        self._keep_last = keep_last
        self._predicate = predicate
        self._device = device
        self._engine = engine
        self._by_device: dict[torch.device, _SavedBytesOfDevice] = {}
        self._entered: list[SavedTensorHooks] = []

    def __enter__(self) -> OffloadedActivations:
        hooks = SavedTensorHooks(self._replace)
        hooks.enter()
        self._entered.append(hooks)
        return self

    def __exit__(self, *error: object) -> None:
        if not self._entered:
            raise StillframeError("offload_activations was left more often than entered")
        self._entered.pop().leave()

    def stats(self) -> dict[torch.device, OffloadStats]:
        """Return, by device, counters of what was copied so far; see `Offloader.stats`."""
        return {device: each.offloader.stats() for device, each in self._by_device.items()}

    def _replace(self, tensor: Tensor) -> Any:
        """Return what autograd saves in place of a tensor; None if it saves the tensor itself."""
        if not self._should_offload(tensor):
            return None
        if graph.task() != graph.NO_TASK:
            # Activation checkpointing repeats a forward. Backward uses the tensor soon.
            return Kept(tensor.detach(), tensor._version)
        all_saved = self._by_device.get(tensor.device)
        if all_saved is None:
            offloader = Offloader(tensor.device, slots=_SLOTS, engine=self._engine)
            all_saved = self._by_device[tensor.device] = _SavedBytesOfDevice(
                offloader, self._keep_last
            )
        saved, view = all_saved.save(tensor)
        return _SavedView(self, saved, view)

    def _should_offload(self, tensor: Tensor) -> bool:
        if tensor.layout is not torch.strided or type(tensor) is not Tensor:
            return False  # a parameter, or an unusual tensor
        if tensor.numel() * tensor.itemsize < max(self._min_bytes, 1):
            return False
        if self._device is None:
            if _device.on_host(tensor):
                return False
        elif tensor.device != self._device:
            return False
        # A leaf that gets gradients, such as a parameter, stays in memory anyway.
        base = tensor if tensor._base is None else tensor._base
        if isinstance(base, Parameter) or (base.is_leaf and base.requires_grad):
            return False
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_inference():
            return False
        return self._predicate is None or bool(self._predicate(tensor))

    def _bring_to_device(self, saved: _SavedBytes) -> Tensor:
        """Return the bytes on the device; copy them there first if they are in the pool."""
        tensor = saved.tensor
        if tensor is not None and saved.ticket is None:
            saved.check()
            return tensor
        assert saved.ticket is not None
        # Not in inference mode: autograd cannot use tensors that are made in it.
        with torch.inference_mode(False), torch.no_grad():
            return self._by_device[saved.ticket.device].bring(saved)


def _range_to_offload(tensor: Tensor) -> tuple[Tensor, int]:
    """Return a tensor with the bytes to offload for a saved tensor. Return also the offset in bytes
    at which the saved tensor begins there.

    The bytes are the whole storage. They are only the span of the saved tensor if that is less than
    half of the storage, or if the storage is not a whole number of elements.
    """
    tensor = tensor.detach()
    first = int(tensor.storage_offset())
    nr_spanned = count_spanned_elements(tensor)
    nr_elements, remaining_bytes = divmod(tensor.untyped_storage().nbytes(), tensor.itemsize)
    if remaining_bytes or 2 * nr_spanned < nr_elements:
        return tensor.as_strided((nr_spanned,), (1,), first), 0
    return tensor.as_strided((nr_elements,), (1,), 0), first * tensor.itemsize


def offload_activations(
    *,
    min_bytes: int = 1 << 20,
    keep_last: int = 1,
    predicate: Callable[[Tensor], bool] | None = None,
    device: torch.device | str | None = None,
    engine: Engine | None = None,
) -> OffloadedActivations:
    """Keep tensors that autograd saves inside the `with` block in the pool until backward needs
    them.

        with stillframe.offload.offload_activations():
            loss = model(batch)
        loss.backward()

    Args:
        min_bytes: Smaller tensors stay on the device.
        keep_last: How many of the last tensors stay on the device. Backward needs them first.
        predicate: Called with every tensor that would be copied out. If it returns False, the
            tensor stays.
        device: Copy out only tensors on this device; by default, on any CUDA device.
        engine: The engine whose pool is used, `default_engine()` by default.

    Returns:
        A context manager, which may be entered again at every step.

    Raises:
        TypeError: `min_bytes` or `keep_last` is not an integer, or `predicate` cannot be called.
        ValueError: `min_bytes` or `keep_last` is negative.

    Inside the block, an operation raises `StillframeError` or `PoolExhaustedError` if its saved
    tensor cannot be offloaded. If a saved tensor was written to, backward raises autograd's error
    as usual, or `TornSnapshotError` if the write came during the copy.
    """
    for name, value in (("min_bytes", min_bytes), ("keep_last", keep_last)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} takes a number, not a {type(value).__name__}")
        if value < 0:
            raise ValueError(f"{name} counts from 0, got {value}")
    if predicate is not None and not callable(predicate):
        raise TypeError(f"predicate takes a function, not a {type(predicate).__name__}")
    where = None if device is None else torch.device(device)
    if where == torch.device("cuda"):  # without an index
        where = torch.device("cuda", torch.cuda.current_device())
    return OffloadedActivations(min_bytes, keep_last, predicate, where, engine)
