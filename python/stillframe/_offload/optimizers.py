"""Makes an optimizer's step wait for copies that still read the weights that it writes.

A step waits only for layers that have its parameters: copies of other layers may take long, or
belong to a device that has failed. A step also makes earlier prefetches of these layers expire,
because fused steps write without a change of version counters. A step inside a backward does
neither: it writes weights that the backward does not need any more.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from stillframe._offload import graph
from stillframe._watch import gate


class Reader(Protocol):
    """An object that reads weights on the CPU asynchronously."""

    def all_tensors(self) -> Iterable[Tensor]:
        """Return the tensors that the reader may read at some time."""

    def tensors_in_use(self) -> Iterable[Tensor]:
        """Return the tensors that the reader may be reading now or has prefetched."""

    def wait(self) -> None:
        """Wait until the reader reads nothing any more."""

    def expire_prefetches(self) -> None:
        """Make sure that no prefetch is used that was started before this call."""


_readers: weakref.WeakSet[Reader] = weakref.WeakSet()


def watch(reader: Reader) -> None:
    """Have steps wait for the reader and expire its prefetches, as long as the reader lives."""
    _readers.add(reader)
    _register_readers_with_gate()
    gate.refresh_must_wait()


def unwatch(reader: Reader) -> None:
    _readers.discard(reader)
    gate.refresh_must_wait()


def _storage_addresses(tensors: Iterable[object]) -> set[int]:
    """Return the addresses of the tensors' StorageImpls."""
    return {
        each.untyped_storage()._cdata
        for each in tensors
        if isinstance(each, Tensor) and each.layout is torch.strided
    }


def _readers_sharing_weights(
    optimizer: Optimizer, tensors: Callable[[Reader], Iterable[Tensor]]
) -> Iterator[Reader]:
    """Yield each reader for which `tensors(reader)` has a tensor that the optimizer writes."""
    written: set[int] | None = None  # the optimizer's storages, found when they are needed
    for reader in tuple(_readers):
        read = _storage_addresses(tensors(reader))
        if read and written is None:
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            written = _storage_addresses(parameters)
        if written and not written.isdisjoint(read):
            yield reader


def _readers_to_wait_for(optimizer: Optimizer) -> Iterator[Reader]:
    """Return the readers that may be reading weights that the optimizer writes."""
    is_inside_backward = graph.task() != graph.NO_TASK
    if is_inside_backward:
        return iter(())  # such a step writes only weights that the backward needs no more
    return _readers_sharing_weights(optimizer, lambda reader: reader.tensors_in_use())


class _RegisteredReaders:
    """All readers of this module, as one implementation of `gate.OptimizerDataReaders`."""

    def wait(self, optimizer: Optimizer) -> None:
        for reader in _readers_to_wait_for(optimizer):
            reader.wait()

    def stepped(self, optimizer: Optimizer) -> None:
        for reader in _readers_to_wait_for(optimizer):
            reader.expire_prefetches()

    def concerns(self, optimizer: Optimizer) -> bool:
        """Return whether any reader may ever read what the optimizer writes."""
        readers = _readers_sharing_weights(optimizer, lambda reader: reader.all_tensors())
        return any(True for _ in readers)


@functools.cache
def _register_readers_with_gate() -> None:
    """Have the gate ask the readers. The cache makes this run once in a process."""
    gate.add_readers(_RegisteredReaders())
    os.register_at_fork(after_in_child=_readers.clear)
