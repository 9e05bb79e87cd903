"""The gate: an optimizer step waits here until every deferred byte of its storages is copied.

`defer` decides which storages of a save may be copied after the call. `track` makes steps wait for
that save until it is staged. `wait_before_step_writes` waits; `step_hooks.py` calls it in every
optimizer's step.

Between `defer` and `track` there is no save to wait for yet. A step that begins then in another
thread waits for the end of the call that asks for the save, at most 30 s.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Protocol

import torch
from torch.optim import Optimizer

from stillframe._watch import ownership
from stillframe._watch.deferral import Deferral, Sources, unlaunched_calls
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

# How long a step waits for another thread's call. If the call has raised, its traceback may keep
# the deferral alive for a long time.
_CALL_TIMEOUT_S = 30.0
_CALL_POLL_S = 0.0005


class Pending(Protocol):
    """A save in flight, as the gate sees it."""

    def gate(self) -> bool:
        """Wait until a step may begin on the calling thread's current streams. Return False if the
        next step has to call this again. Only a signal handler may raise an exception."""


class OptimizerDataReaders(Protocol):
    """Copies, other than those of saves, that read what optimizers write."""

    def wait(self, optimizer: Optimizer) -> object:
        """Wait until no copy reads what the optimizer's step is about to write."""

    def stepped(self, optimizer: Optimizer) -> object:
        """Record that the optimizer's step has written."""

    def concerns(self, optimizer: Optimizer) -> bool:
        """Return whether a step of the optimizer may ever have to wait for these copies."""


_pendings: dict[int, Pending] = {}  # the saves that steps wait for, by their ids
_deferrals: dict[int, Deferral] = {}  # their deferrals, by the ids of the saves
_readers: list[OptimizerDataReaders] = []
# The serials of optimizers with compiled steps without hooks that must now wait for `_readers`.
# The serials are in one string, because torch compiles these steps again when the string changes.
must_wait = ""


def defer(skeleton: Sources, *, overlap: bool) -> Deferral:
    """Decide which storages of a save are copied after the call, and write their lanes.

    Steps of other threads wait from now on, until `track` or ``Deferral.close`` is called.

    Args:
        skeleton: The objects to save; ``skeleton.rows`` is changed.
        overlap: False defers nothing.
    """
    deferral = Deferral()
    if not overlap:
        return deferral
    key = id(deferral)
    # When the deferral is freed, its entry goes, so a call that has raised holds no step back.
    reference = weakref.ref(deferral, lambda _: unlaunched_calls.pop(key, None))
    unlaunched_calls[key] = (threading.get_ident(), reference)
    # A step that is running now may be writing, so nothing is deferred. A step that begins later
    # finds the entry and waits.
    try:
        if not ownership.active():
            with torch._C.DisableTorchFunction():
                deferral.collect_deferred_storages(skeleton)
    except BaseException:
        deferral.close()
        raise
    if not deferral.indices:
        deferral.close()
    for sentence in deferral.fallbacks:
        ownership.log_once(sentence)
    return deferral


def track(pending: Pending, deferral: Deferral | None = None) -> None:
    """Make every step wait for a launched save; `deferral` is by default the last one that this
    thread made."""
    _pendings[id(pending)] = pending
    if deferral is None:
        this_thread = threading.get_ident()
        for thread, ref in reversed(unlaunched_calls.copy().values()):
            if thread == this_thread:
                deferral = ref()
                break
    if deferral is not None:
        _deferrals[id(pending)] = deferral
        deferral.close()


def untrack(pending: Pending) -> None:
    """Let steps go on without waiting for a save. May be called again."""
    _pendings.pop(id(pending), None)
    _deferrals.pop(id(pending), None)


def wait() -> None:
    """Wait until every tracked save is staged or has ended.

    On devices the calling thread's current streams wait instead. Errors of saves are not raised.
    """
    # Saves that stay tracked although this call has waited for them.
    still_tracked: list[Pending] = []
    while True:
        new = [each for each in list(_pendings.values()) if each not in still_tracked]
        if not new:
            return
        for pending in new:
            next_step_must_wait_too = pending.gate() is False
            if next_step_must_wait_too:
                still_tracked.append(pending)
            else:
                untrack(pending)


def is_any_copy_pending() -> bool:
    """Return whether some storage is being copied after its call, or is about to be."""
    return bool(_deferrals or unlaunched_calls)


def wait_for_storage(identity: int) -> None:
    """Wait as `wait` does until no save reads the memory of a storage; `identity` is the address of
    the StorageImpl."""
    for call, (thread, _) in unlaunched_calls.copy().items():
        _wait_until_call_launches(call, thread, time.monotonic() + _CALL_TIMEOUT_S)
    for save_id, deferral in _deferrals.copy().items():
        pending = _pendings.get(save_id)
        if pending is None or not deferral.is_deferred(identity):
            continue
        next_step_must_wait_too = pending.gate() is False
        if not next_step_must_wait_too:
            untrack(pending)


def _wait_until_call_launches(call: int, thread: int, end: float) -> bool:
    """Wait until the call `call` of thread `thread` has launched its save, but not after `end`, and
    not for a call of this thread. Return whether the save is launched."""
    this_thread = threading.get_ident()
    while thread != this_thread and call in unlaunched_calls and time.monotonic() < end:
        time.sleep(_CALL_POLL_S)
    return call not in unlaunched_calls


def _wait_for_unlaunched_calls() -> None:
    """Wait until the calls that make saves have launched them."""
    end = time.monotonic() + _CALL_TIMEOUT_S
    for call, (thread, ref) in unlaunched_calls.copy().items():
        if not _wait_until_call_launches(call, thread, end):
            # This step runs inside the call, or the call did not end in time. The step goes on and
            # may write before the storages are copied, so the save counts as torn.
            deferral = ref()
            if deferral is not None:
                deferral.overtaken = True
                deferral.close()


def wait_before_step_writes(optimizer: Optimizer) -> None:
    """Wait for saves, right before an optimizer's step writes. Only a signal handler or the readers
    can raise an exception."""
    if unlaunched_calls:
        _wait_for_unlaunched_calls()
    if _pendings:
        wait()
    for each in _readers:
        each.wait(optimizer)


def stepped(optimizer: Optimizer) -> None:
    """Tell the readers that an optimizer's step has written."""
    for each in _readers:
        each.stepped(optimizer)


def add_readers(readers: OptimizerDataReaders) -> None:
    """Make every later step wait for these readers right before it writes."""
    _readers.append(readers)


def concerns(optimizer: Optimizer) -> bool:
    """Return whether a step of the optimizer may ever have to wait for readers."""
    return any(each.concerns(optimizer) for each in _readers)


def refresh_must_wait() -> None:
    """Set `must_wait` again, after a reader was added or removed. If the string changes, torch
    compiles the steps of these optimizers again."""
    global must_wait
    serials: list[str] = []
    for owner in ownership.living():
        optimizer = owner.ref()
        if owner.has_unhooked_steps and optimizer is not None and concerns(optimizer):
            serials.append(str(owner.serial))
    must_wait = " ".join(serials)


def forked() -> None:
    """Forget the parent's saves, in a forked child."""
    _pendings.clear()
    _deferrals.clear()
    unlaunched_calls.clear()


os.register_at_fork(after_in_child=forked)
