"""The gate: no optimizer steps before the saves that left storages to be copied have them.

Hooks around every optimizer's step, process-wide, do three things: they hold a step back until
the saves in flight are staged, they look at what only steps change (`ownership.py`), and
they know whether a step is going on. `defer` decides with that which storages of a save may be
copied after the call.

Where a step gets a closure, forward and backward run inside it, and that is the very time under
which storages are to be copied. So for optimizers whose step is known to call the closure before
it writes, the gate stands behind the closure:

    step(closure) -> pre-hook -> closure: forward, backward -> GATE -> update -> post-hook
    step()        -> pre-hook: GATE --------------------------------> update -> post-hook

A step that is compiled as one graph (fullgraph=True) has no place where Python could wait, so the
hooks leave it alone. They run once, while it is traced, and have that optimizer's storages captured
from then on. A graph that may break is left at each hook.

Between deciding what to defer and tracking the save, a step in another thread waits (at most 30
s): otherwise it could slip through before there is anything to wait for.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import FunctionType
from typing import Any, Protocol, TypeVar

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from stillframe import _core
from stillframe._base import device as _device
from stillframe._save import keepers, ownership, steps
from stillframe._save.deferral import Deferral, Sources, calls
from stillframe._save.ownership import Owner, bookkeeping
from stillframe._save.steps import register_optimizer

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
_readers: list[Callable[[Optimizer], object]] = []  # these wait for who else reads what it writes
_F = TypeVar("_F", bound=Callable[..., Any])


def _eager(function: _F) -> _F:
    """Keeps a function out of compiled steps: it runs between their graphs, at every step."""
    # The private twin imports torch._dynamo (1.4 s) at the first call, not at import.
    lazy = getattr(torch, "_disable_dynamo", None)
    disable: Callable[[_F], _F] = torch.compiler.disable if lazy is None else lazy
    return disable(function)


def defer(skeleton: Sources, *, overlap: bool) -> Deferral:
    """Decides which storages of a save are copied after the call, and writes their lanes.

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


def _hold_back(optimizer: Optimizer) -> None:
    """The last moment before an optimizer's step writes. It waits whatever became of the
    bookkeeping, and raises only what a signal handler does, and what `_readers` do."""
    if calls:
        _wait_for_calls()
    if _pendings:
        wait()
    for wait_for_reader in _readers:
        wait_for_reader(optimizer)


def before_steps_write(wait_for_reader: Callable[[Optimizer], object]) -> None:
    """Has every step call it with its optimizer at that moment, for good. A pre-hook of torch's
    would run before the closure, and have the gate stand there too, since it may write."""
    _readers.append(wait_for_reader)


@_eager
def _behind_closure(optimizer: Optimizer, owner: Owner) -> None:
    owner.gated = True
    owner.compare()
    _hold_back(optimizer)


def _behind(closure: Callable[..., Any], optimizer: Optimizer, owner: Owner) -> Callable[..., Any]:
    """The closure, with the gate behind each call of it."""

    @functools.wraps(closure)
    def gated(*args: Any, **kwargs: Any) -> Any:
        value = closure(*args, **kwargs)
        _behind_closure(optimizer, owner)
        return value

    owner.gated = False
    return gated


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@bookkeeping
def _begin(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """A step begins: its arguments with a closure that gates, where the gate may stand behind it;
    None where the gate is here."""
    owner = ownership.find(optimizer)
    if owner is None:
        owner = ownership.find_or_make(optimizer)
        _gate_writers(type(optimizer))
    owner.begin(optimizer)
    if _device.capturing():
        # The graph's replays will change everything with no hook to say so.
        owner.distrust("its step was captured in a CUDA graph")
    known = owner.qualifies(optimizer) and not owner.ungated
    if known and (len(args) > 1 or kwargs):
        passed_on = _passed_on(optimizer, owner, args, kwargs)
        if passed_on is not None:
            return passed_on
    owner.compare()
    return None


def _passed_on(
    optimizer: Optimizer, owner: Owner, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments | None:
    # Another pre-hook may write, and runs before the closure does.
    if len(_global_optimizer_pre_hooks) > 1 or optimizer._optimizer_step_pre_hooks:
        return None
    closure, place = kwargs.get("closure"), owner.closure_place
    if callable(closure):
        return args, {**kwargs, "closure": _behind(closure, optimizer, owner)}
    if place is not None and len(args) > place and callable(args[place]):
        return (*args[:place], _behind(args[place], optimizer, owner), *args[place + 1 :]), kwargs
    return None


@bookkeeping
def _end(optimizer: Optimizer) -> bool:
    """False inside another step of the optimizer."""
    owner = ownership.find(optimizer)
    return owner is None or owner.end(optimizer)


@_eager
def _before_writing(optimizer: Optimizer) -> None:
    ownership.enter(optimizer)
    _begin(optimizer, (), {})
    _hold_back(optimizer)


def _gate_writers(kind: type[Any]) -> None:
    """Makes steps of the methods in which listed classes write beside `step`."""
    for each in kind.__mro__:
        for name in steps.writers(each):
            method = each.__dict__.get(name)
            if isinstance(method, FunctionType) and method.__code__ not in ownership.step_codes:
                setattr(each, name, _as_step(method))


def _as_step(method: Callable[..., Any]) -> Callable[..., Any]:
    def writing(self: Any, *args: Any, **kwargs: Any) -> Any:
        _before_writing(self)
        try:
            return method(self, *args, **kwargs)
        finally:
            if _end(self) is not False:
                ownership.leave(self)

    ownership.step_codes.add(writing.__code__)
    return functools.wraps(method)(writing)


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments | None:
    """The pre-hook: gates at once, or passes on a closure that gates."""
    if torch.compiler.is_compiling() and _is_one_graph(optimizer):
        return None
    return _step_begins(optimizer, args, kwargs)


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The post-hook."""
    if torch.compiler.is_compiling() and _is_one_graph(optimizer):
        return
    _step_ends(optimizer)


@_eager
def _step_begins(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments | None:
    _core.trace_step_begins(optimizer)
    ownership.enter(optimizer)
    passed_on = _begin(optimizer, args, kwargs)
    if passed_on is None:
        _hold_back(optimizer)
    return passed_on


@_eager
def _step_ends(optimizer: Optimizer) -> None:
    if _end(optimizer) is not False:
        ownership.leave(optimizer)
    _core.trace_step_ends(optimizer)


def _is_one_graph(optimizer: Optimizer) -> bool:
    """Return whether a step that is being traced has to become one graph, without hooks.

    The compiler calls this function while it traces, takes the answer for a constant and guards on
    the optimizer's identity. So nothing of the optimizer is copied behind a call from now on, and
    no copy of it is under way, when the graph runs for the first time.
    """
    if _readers or keepers.known or not _has_to_be_whole():
        return False
    _capture_all_of(optimizer)
    wait()
    return True


# As torch.compiler.assume_constant_result does, which imports torch._dynamo (1.4 s).
_is_one_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _has_to_be_whole() -> bool:
    """Return whether torch.compile traces at this moment, with fullgraph=True."""
    compiler = sys.modules.get("torch._dynamo.symbolic_convert")
    try:
        tracer = compiler.InstructionTranslator.current_tx()  # type: ignore[union-attr]
        return bool(tracer.one_graph or getattr(tracer, "error_on_graph_break", False))
    except AttributeError:  # torch.export, or another torch: the graph breaks at the hook
        return False


@bookkeeping
def _capture_all_of(optimizer: Optimizer) -> None:
    ownership.find_or_make(optimizer).distrust(
        "its step is compiled with fullgraph=True, so that nothing in it can wait for a copy"
    )


def forked() -> None:
    """Runs in a forked child: the parent's saves are not waited for here."""
    _pendings.clear()
    _late.clear()
    calls.clear()


def _install() -> None:
    handle = register_optimizer_step_pre_hook(_before_step)
    # First of the pre-hooks, so that what the others write comes after the gate.
    hooks = handle.hooks_dict_ref()
    if isinstance(hooks, OrderedDict):
        hooks.move_to_end(handle.id, last=False)
    register_optimizer_step_post_hook(_after_step)
    os.register_at_fork(after_in_child=forked)


_install()
