"""Wrappers of the torch functions that free or move a storage's memory: they wait for its copies.

A save keeps each storage alive until it is copied. Even so, torch can replace the storage's memory.
A storage moves to shared memory with `share_memory`, or when a tensor goes through a
queue between processes. FSDP and offloading of activations resize storages to free memory. torch
then frees the old memory at once, while a thread of stillframe's may read it. All of this goes
through three methods of `torch.UntypedStorage`. Their wrappers wait for copies of the storage.

Growth inside a torch operator (`Tensor.resize_`, an `out=` that is too small) calls none of the
three, so it does not wait.

`torch.utils.swap_tensors` exchanges the contents of two tensor objects; `module.to()` does so for
DTensors and quantized parameters. The function refuses tensors with weak references. So its wrapper
has the observers drop their weak references; they watch the optimizer again from its next step on.
A swap also exchanges the version counters that verdicts compare, so the wrapper first waits for all
copies.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from stillframe._watch import gate, ownership

_MOVERS = ("resize_", "_share_fd_cpu_", "_share_filename_cpu_")


def _wait_for_copies(mover: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method that moves a storage, so that it first waits for copies of that storage."""

    @functools.wraps(mover)
    def moves(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if gate.anything_copied():
            gate.wait_for_storage(self._cdata)
        return mover(self, *args, **kwargs)

    return moves


def _release_references(swap: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `swap_tensors`, so that it first waits for copies and drops the observers' weak
    references."""

    @functools.wraps(swap)
    def swap_tensors(*args: Any, **kwargs: Any) -> Any:
        if gate.anything_copied():
            gate.wait()
        if any(map(_is_referred_to, (*args, *kwargs.values()))):
            ownership.forget_all()
        return swap(*args, **kwargs)

    return swap_tensors


def _is_referred_to(tensor: Any) -> bool:
    """Return whether there are weak references to a tensor."""
    return isinstance(tensor, torch.Tensor) and weakref.getweakrefcount(tensor) > 0


def install() -> None:
    """Wrap the methods and the function; their names, signatures and docstrings stay."""
    for name in _MOVERS:
        setattr(torch.UntypedStorage, name, _wait_for_copies(getattr(torch.UntypedStorage, name)))
    torch.utils.swap_tensors = _release_references(torch.utils.swap_tensors)
