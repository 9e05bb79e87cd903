"""Wrappers of the torch functions that free or move a storage's memory: they wait for its copies.

A save keeps each storage alive until it is copied, but torch can still replace and free the
storage's memory. `share_memory` and queues between processes do so, and FSDP resizes storages. All
of these call one of three methods of `torch.UntypedStorage`, whose wrappers wait for copies of the
storage. Growth inside a torch operator (`Tensor.resize_`, an `out=` that is too small) calls none
of the three, so it does not wait.

`torch.utils.swap_tensors` exchanges the contents of two tensor objects, as `module.to()` does for
DTensors and quantized parameters. Its wrapper does two things more:
- It waits for all copies, because a swap exchanges the version counters that verdicts compare.
- It has the observers drop their weak references, because the function refuses tensors with weak
  references. The observers watch the optimizer again from its next step on.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from stillframe._watch import gate, ownership

# The methods of `torch.UntypedStorage` that free or move a storage's memory.
_MOVERS = ("resize_", "_share_fd_cpu_", "_share_filename_cpu_")


def _wrap_with_wait_for_copies(mover: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that waits for copies of the storage and then calls `mover`."""

    @functools.wraps(mover)
    def wait_and_move(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if gate.is_any_copy_pending():
            gate.wait_for_storage(self._cdata)
        return mover(self, *args, **kwargs)

    return wait_and_move


def _wrap_swap_tensors(swap: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `swap_tensors` that waits for all copies, and has the observers drop their weak
    references, because torch refuses to swap tensors that have weak references."""

    @functools.wraps(swap)
    def swap_tensors(*args: Any, **kwargs: Any) -> Any:
        if gate.is_any_copy_pending():
            gate.wait()
        if any(map(_has_weak_references, (*args, *kwargs.values()))):
            ownership.drop_all_tensor_references()
        return swap(*args, **kwargs)

    return swap_tensors


def _has_weak_references(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and weakref.getweakrefcount(tensor) > 0


def install() -> None:
    for name in _MOVERS:
        setattr(
            torch.UntypedStorage,
            name,
            _wrap_with_wait_for_copies(getattr(torch.UntypedStorage, name)),
        )
    torch.utils.swap_tensors = _wrap_swap_tensors(torch.utils.swap_tensors)
