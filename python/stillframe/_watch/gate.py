"""The gate: no optimizer step writes before the saves that deferred its storages have copied them.

`defer` decides which storages of a save may be copied after the call. `track` has steps wait for
that save until it is staged, and `hold_back` is that wait. `step_hooks.py` calls it in every
optimizer's step.

Between deciding what to defer and tracking the save, a step in another thread waits for at most
30 s. Otherwise it could slip through before there is anything to wait for.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch.optim import Optimizer

from stillframe._watch import ownership
from stillframe._watch.deferral import Deferral, Sources, calls
from stillframe._watch.steps import register_optimizer

__all__ = [
    "Deferral",
    "Pending",
    "defer",
    "forked",
    "register_optimizer",
    "track",
    "untrack",
    "wait",
]

# How long a step waits for a call of another thread that has deferred storages and not yet
# launched its save. It ends by itself; the bound is for a call that raised and whose traceback
# somebody keeps.
_CALL_TIMEOUT_S = 30.0
_CALL_POLL_S = 0.0005


class Pending(Protocol):
    """A save in flight, as the gate sees it."""

    def gate(self) -> bool:
        """Returns when a step may begin on the calling thread's current streams; raises only what
        a signal handler does. False: a later step has to ask again, on streams of its own."""


_pendings: dict[int, Pending] = {}  # by id
_late: dict[int, Deferral] = {}  # what each of them copies, by the same id
readers: list[Callable[[Optimizer], object]] = []  # these wait for who else reads what it writes


def defer(skeleton: Sources, *, overlap: bool) -> Deferral:
    """Decide which storages of a save are copied after the call, and write their lanes.

    Call it in ``async_save`` on the caller's thread. A step that another thread begins from now
    on waits until `track` is called for the save (or ``Deferral.close``, if there is none).

    Args:
        skeleton: What is saved; ``skeleton.rows`` is changed.
        overlap: False defers nothing.
    """
    deferral = Deferral()
    if not overlap:
        return deferral
    key = id(deferral)
    calls[key] = (threading.get_ident(), weakref.ref(deferral, lambda _: calls.pop(key, None)))
    # Only now: a step that began before is active, one that begins later sees the call.
    try:
        if not ownership.active():
            with torch._C.DisableTorchFunction():
                deferral.ask(skeleton)
    except BaseException:
        deferral.close()
        raise
    if not deferral.indices:
        deferral.close()
    for sentence in deferral.fallbacks:
        ownership.tell_once(sentence)
    return deferral


def track(pending: Pending, deferral: Deferral | None = None) -> None:
    """Has every step wait for a launched save; ends by itself when its ``gate()`` has returned.

    Args:
        pending: The save.
        deferral: Its deferral; by default the last one of this thread.
    """
    _pendings[id(pending)] = pending
    if deferral is None:
        mine = threading.get_ident()
        for thread, ref in reversed(calls.copy().values()):
            if thread == mine:
                deferral = ref()
                break
    if deferral is not None:
        _late[id(pending)] = deferral
        deferral.close()


def untrack(pending: Pending) -> None:
    """Nobody needs to wait for the save any more: it is staged or has ended. Idempotent."""
    _pendings.pop(id(pending), None)
    _late.pop(id(pending), None)


def wait() -> None:
    """Waits until every tracked save is staged or has ended, or has the calling thread's current
    streams wait for it; raises none of their errors."""
    asked: list[Pending] = []
    while True:
        new = [each for each in list(_pendings.values()) if each not in asked]
        if not new:
            return
        for pending in new:
            if pending.gate() is False:
                asked.append(pending)
            else:
                untrack(pending)


def anything_copied() -> bool:
    """Whether a storage may be being copied behind a call, or is about to be."""
    return bool(_late or calls)


def wait_for_storage(identity: int) -> None:
    """Waits until no save reads the memory of the storage with this StorageImpl; on a device, has
    the calling thread's current stream wait. Raises as `wait` does."""
    for key, (thread, _) in calls.copy().items():
        _is_over(key, thread, time.monotonic() + _CALL_TIMEOUT_S)
    for key, deferral in _late.copy().items():
        pending = _pendings.get(key)
        if pending is not None and deferral.holds(identity) and pending.gate() is not False:
            untrack(pending)


def _is_over(key: int, thread: int, end: float) -> bool:
    """Whether a call is over, waiting for it unless it is this thread's own."""
    mine = threading.get_ident()
    while thread != mine and key in calls and time.monotonic() < end:
        time.sleep(_CALL_POLL_S)
    return key not in calls


def _wait_for_calls() -> None:
    """Waits for saves that other threads are submitting at this moment."""
    end = time.monotonic() + _CALL_TIMEOUT_S
    for key, (thread, ref) in calls.copy().items():
        if not _is_over(key, thread, end):
            # A step inside this thread's own call, or a call that never ends: that save cannot
            # hold what it promised.
            deferral = ref()
            if deferral is not None:
                deferral.overtaken = True
                deferral.close()


def hold_back(optimizer: Optimizer) -> None:
    """Wait for saves, at the last moment before an optimizer's step writes.

    It waits even where the bookkeeping has failed, and raises only what a signal handler or one
    of `readers` raises.
    """
    if calls:
        _wait_for_calls()
    if _pendings:
        wait()
    for wait_for_reader in readers:
        wait_for_reader(optimizer)


def before_steps_write(wait_for_reader: Callable[[Optimizer], object]) -> None:
    """Have every step call a function with its optimizer right before it writes, from now on.

    A pre-hook of torch's would run before the closure, and since it may write, the gate would have
    to stand before the closure as well.
    """
    readers.append(wait_for_reader)


def forked() -> None:
    """Runs in a forked child: the parent's saves are not waited for here."""
    _pendings.clear()
    _late.clear()
    calls.clear()


os.register_at_fork(after_in_child=forked)
