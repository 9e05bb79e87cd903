"""Makes optimizer steps wait for copies that still read the weights they write.

A step waits only for the layers that its own parameters belong to: other layers may take long, or
belong to a device that has failed. A step that a CUDA graph captures therefore waits for nothing:
it writes to device memory, where no weight of an offloaded layer is.

A step also ends the pass, because fused steps write without a change of version. A step inside a
backward writes weights that the backward has finished with, so it does not wait.
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
    """Something that reads weights on the CPU asynchronously."""

    def all(self) -> Iterable[Tensor]:
        """Return the tensors that it may read at some time."""

    def reads(self) -> Iterable[Tensor]:
        """Return the tensors that it may be reading now or has prefetched."""

    def wait(self) -> None:
        """Wait until it reads nothing any more."""

    def end_pass(self) -> None:
        """Discard what it has prefetched."""


_readers: weakref.WeakSet[Reader] = weakref.WeakSet()


def watch(reader: Reader) -> None:
    """Make optimizers wait for the reader and end its pass, for as long as it lives."""
    _readers.add(reader)
    _install()
    gate.readers_changed()


def unwatch(reader: Reader) -> None:
    """Take back `watch`."""
    _readers.discard(reader)
    gate.readers_changed()


def _storages(tensors: Iterable[object]) -> set[int]:
    return {
        each.untyped_storage()._cdata
        for each in tensors
        if isinstance(each, Tensor) and each.layout is torch.strided
    }


def _readers_of(
    optimizer: Optimizer, tensors: Callable[[Reader], Iterable[Tensor]]
) -> Iterator[Reader]:
    """Yield the readers among whose tensors are some that the optimizer writes."""
    own: set[int] | None = None
    for reader in tuple(_readers):
        read = _storages(tensors(reader))
        if read and own is None:
            own = _storages(p for group in optimizer.param_groups for p in group["params"])
        if own and not own.isdisjoint(read):
            yield reader


def _reading(optimizer: Optimizer) -> Iterator[Reader]:
    """Yield the readers that may be reading what the optimizer writes."""
    return (
        iter(())
        if graph.task() != graph.NO_TASK
        else _readers_of(optimizer, lambda reader: reader.reads())
    )


class _Readers:
    """The readers of this module, as the gate sees them."""

    def wait(self, optimizer: Optimizer) -> None:
        for reader in _reading(optimizer):
            reader.wait()

    def stepped(self, optimizer: Optimizer) -> None:
        for reader in _reading(optimizer):
            reader.end_pass()

    def concerns(self, optimizer: Optimizer) -> bool:
        return any(True for _ in _readers_of(optimizer, lambda reader: reader.all()))


@functools.cache
def _install() -> None:
    gate.wait_for(_Readers())
    # In a forked child nothing reads the weights of the parent's readers.
    os.register_at_fork(after_in_child=_readers.clear)
