"""What frees or moves the memory of a storage waits for copies of that storage.

A save holds every storage that is still to be copied, but a storage can be given other memory
behind its holders: it moves to shared memory (`share_memory`, a tensor in a queue between
processes), or is resized (as FSDP and offloading of activations free memory). torch gives the old
memory back there and then, while a thread of ours may be reading it. All of these come by one of
three methods of `torch.UntypedStorage`, and so these wait, for that storage and no other.

Growing inside an operator of torch (`Tensor.resize_`, an `out=` that is too small) comes by none of
them.

`torch.utils.swap_tensors` gives a tensor's object another tensor (`module.to()` does that with
DTensors and quantized parameters), and refuses one that has a weak reference. So observers let go
of theirs first, and learn the optimizer anew; and what tensors count, which verdicts compare, is
asked before.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from stillframe._watch import gate, ownership

_MOVERS = ("resize_", "_share_fd_cpu_", "_share_filename_cpu_")


def _waits(mover: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(mover)
    def moves(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if gate.anything_copied():
            gate.wait_for_storage(self._cdata)
        return mover(self, *args, **kwargs)

    return moves


def _lets_go(swap: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(swap)
    def swap_tensors(*args: Any, **kwargs: Any) -> Any:
        if gate.anything_copied():
            gate.wait()
        if any(map(_is_referred_to, (*args, *kwargs.values()))):
            ownership.let_go()
        return swap(*args, **kwargs)

    return swap_tensors


def _is_referred_to(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and weakref.getweakrefcount(tensor) > 0


def install() -> None:
    """Puts itself in front of the methods and the function; their names, signatures and docs
    stay."""
    for name in _MOVERS:
        setattr(torch.UntypedStorage, name, _waits(getattr(torch.UntypedStorage, name)))
    torch.utils.swap_tensors = _lets_go(torch.utils.swap_tensors)
