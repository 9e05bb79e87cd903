"""Optimizers wait for what still reads the weights that they write; and a pass ends with a step.

A step waits for the layers that its own parameters lie in, and for no others: theirs may wait long,
or be of a device that has died. So one that a CUDA graph captures waits for nothing: what is
captured writes to a device's memory, and no weight of offloaded layers lies there.

A pass ends, since fused steps write what no version tells of. One that steps inside a backward
writes what that is through with: there nothing is waited for.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from stillframe._offload import graph
from stillframe._save import gate


class Reader(Protocol):
    """What reads weights on the CPU behind the host's back."""

    def reads(self) -> Iterable[Tensor]:
        """What it may be reading now, or has sent for ahead of need."""

    def wait(self) -> None:
        """Returns when it reads nothing any more."""

    def end_pass(self) -> None:
        """What it has sent for is not used any more."""


_readers: weakref.WeakSet[Reader] = weakref.WeakSet()


def watch(reader: Reader) -> None:
    """Has optimizers wait for it, and tell it of their steps, for as long as it lives."""
    _readers.add(reader)
    _install()


def unwatch(reader: Reader) -> None:
    _readers.discard(reader)


def _storages(tensors: Iterable[object]) -> set[int]:
    return {
        each.untyped_storage()._cdata
        for each in tensors
        if isinstance(each, Tensor) and each.layout is torch.strided
    }


def _of(optimizer: Optimizer) -> Iterator[Reader]:
    """Those that may be reading what the optimizer writes."""
    if graph.task() != graph.NO_TASK:
        return
    own: set[int] | None = None
    for reader in tuple(_readers):
        read = _storages(reader.reads())
        if read and own is None:
            own = _storages(p for group in optimizer.param_groups for p in group["params"])
        if own and not own.isdisjoint(read):
            yield reader


@functools.cache
def _install() -> None:
    def before(optimizer: Optimizer) -> None:
        for reader in _of(optimizer):
            reader.wait()

    def after(optimizer: Optimizer, *_: Any) -> None:
        for reader in _of(optimizer):
            reader.end_pass()

    gate.before_steps_write(before)
    register_optimizer_step_post_hook(after)
    # In a forked child they are the parent's, and nothing reads their weights there.
    os.register_at_fork(after_in_child=_readers.clear)
