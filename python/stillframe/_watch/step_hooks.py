"""The hooks around every optimizer's step, process-wide.

They hold a step back until the saves in flight are staged (`gate.py`), observe what only steps
change (`ownership.py`), and record whether a step is running.

If a step is given a closure, forward and backward run inside the step, and storages should be
copied during that time. So the gate is after the closure, if the step is known to call the closure
before it writes:

    step(closure) -> pre-hook -> closure: forward, backward -> GATE -> update -> post-hook
    step()        -> pre-hook: GATE --------------------------------> update -> post-hook

In a compiled step the graph breaks at each hook. A step that is compiled as one graph
(fullgraph=True) has no hooks, so every save captures what the optimizer writes. If the optimizer's
weights belong to offloaded layers, the hooks stay and torch reports the graph break.
"""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from stillframe import _core
from stillframe._base import device as _device
from stillframe._watch import gate, ownership, steps
from stillframe._watch.ownership import Owner, bookkeeping

_F = TypeVar("_F", bound=Callable[..., Any])


def eager(function: _F) -> _F:
    """Keep a function out of compiled steps: it runs between their graphs, at every step."""
    # The private function imports torch._dynamo (1.4 s) only at the first call.
    lazy = getattr(torch, "_disable_dynamo", None)
    disable: Callable[[_F], _F] = torch.compiler.disable if lazy is None else lazy
    return disable(function)


@eager
def _wait_at_gate_after_closure(optimizer: Optimizer, owner: Owner) -> None:
    """Wait at the gate after the closure."""
    owner.gate_is_ahead = False
    owner.compare()
    gate.wait_before_step_writes(optimizer)


def _wrap_closure_with_gate(
    closure: Callable[..., Any], optimizer: Optimizer, owner: Owner
) -> Callable[..., Any]:
    """Return a function that calls the closure and then waits at the gate."""

    @functools.wraps(closure)
    def gated(*args: Any, **kwargs: Any) -> Any:
        value = closure(*args, **kwargs)
        _wait_at_gate_after_closure(optimizer, owner)
        return value

    owner.gate_is_ahead = True
    return gated


Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments


@bookkeeping
def _begin_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments | None:
    """Begin a step. Return its arguments, with a closure that waits at the gate. Return None if the
    gate cannot be in a closure: then the caller has to wait at the gate now."""
    owner = ownership.find(optimizer)
    if owner is None:
        owner = ownership.find_or_make_owner(optimizer)
        _wrap_writing_methods(type(optimizer))
    owner.begin(optimizer)
    if _device.capturing():
        # A captured graph can be replayed, and then changes everything without running a hook.
        owner.allow_unhooked_steps("its step was captured in a CUDA graph")
    calls_closure = owner.has_known_step(optimizer) and not owner.skipped_closure
    has_arguments = len(args) > 1 or kwargs  # args[0] is the optimizer
    if calls_closure and has_arguments:
        arguments = _gate_closure_in_arguments(optimizer, owner, args, kwargs)
        if arguments is not None:
            return arguments
    owner.compare()
    return None


def _gate_closure_in_arguments(
    optimizer: Optimizer, owner: Owner, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments | None:
    """Return a step's arguments with the gate at the end of the closure, or None if the gate must
    be before the step."""
    # A user's pre-hook may write before the closure runs. One of the global hooks is stillframe's.
    if len(_global_optimizer_pre_hooks) > 1 or optimizer._optimizer_step_pre_hooks:
        return None
    closure, index = kwargs.get("closure"), owner.closure_index
    if callable(closure):
        return args, {**kwargs, "closure": _wrap_closure_with_gate(closure, optimizer, owner)}
    if index is not None and len(args) > index and callable(args[index]):
        gated = _wrap_closure_with_gate(args[index], optimizer, owner)
        return (*args[:index], gated, *args[index + 1 :]), kwargs
    return None


@bookkeeping
def _end(optimizer: Optimizer) -> bool:
    """End a step; return False inside another step of the optimizer."""
    owner = ownership.find(optimizer)
    if owner is None:
        return True
    return owner.end(optimizer)


@eager
def _begin_step_in_writing_method(optimizer: Optimizer) -> None:
    """Begin a step in a method that is not `step`, and wait at the gate."""
    ownership.enter(optimizer)
    _begin_step(optimizer, (), {})  # without arguments, because the method is given no closure
    gate.wait_before_step_writes(optimizer)


def _wrap_writing_methods(kind: type[Any]) -> None:
    """Make some methods other than `step` count as steps: those in which a class that
    `third_party.toml` lists writes parameters or state."""
    for each in kind.__mro__:
        for name in steps.writers(each):
            method = each.__dict__.get(name)
            if isinstance(method, FunctionType) and method.__code__ not in ownership.step_codes:
                setattr(each, name, _wrap_as_step(method))


def _wrap_as_step(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that counts as a step of the optimizer."""

    def writing(self: Any, *args: Any, **kwargs: Any) -> Any:
        _begin_step_in_writing_method(self)
        try:
            return method(self, *args, **kwargs)
        finally:
            is_inside_another_step = _end(self) is False
            if not is_inside_another_step:
                ownership.leave(self)

    ownership.step_codes.add(writing.__code__)
    return functools.wraps(method)(writing)


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments | None:
    """Begin a step: the pre-hook of every step. Return new arguments, or None to keep them."""
    if torch.compiler.is_compiling() and _leave_out_hooks_if_one_graph(optimizer, gate.must_wait):
        return None
    return _begin_step_uncompiled(optimizer, args, kwargs)


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """End a step: the post-hook of every step."""
    if torch.compiler.is_compiling() and _leave_out_hooks_if_one_graph(optimizer, gate.must_wait):
        return
    _end_step_uncompiled(optimizer)


@eager
def _begin_step_uncompiled(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments | None:
    """Do the work of `_before_step`, outside compiled graphs."""
    _core.trace_step_begins(optimizer)
    ownership.enter(optimizer)
    arguments = _begin_step(optimizer, args, kwargs)
    if arguments is None:
        gate.wait_before_step_writes(optimizer)
    return arguments


@eager
def _end_step_uncompiled(optimizer: Optimizer) -> None:
    """Do the work of `_after_step`, outside compiled graphs."""
    is_inside_another_step = _end(optimizer) is False
    if not is_inside_another_step:
        ownership.leave(optimizer)
    gate.stepped(optimizer)
    _core.trace_step_ends(optimizer)


def _leave_out_hooks_if_one_graph(optimizer: Optimizer, must_wait: str) -> bool:
    """Return whether the step that torch is compiling becomes one graph without our hooks. If so,
    first have later saves capture what the optimizer writes, and wait for the copies in flight.

    The compiler treats the answer as a constant. It traces again for another optimizer, or when
    `must_wait` (`gate.must_wait`) has changed.
    """
    if not _is_tracing_one_graph() or gate.concerns(optimizer):
        return False
    _capture_all_for_compiled_step(optimizer)
    gate.wait_before_step_writes(optimizer)
    return True  # the hooks are left out of the graph


# Like torch.compiler.assume_constant_result, which would import torch._dynamo (1.4 s).
_leave_out_hooks_if_one_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_tracing_one_graph() -> bool:
    """Return whether torch.compile is tracing now with fullgraph=True."""
    compiler = sys.modules.get("torch._dynamo.symbolic_convert")
    try:
        tracer = compiler.InstructionTranslator.current_tx()  # type: ignore[union-attr]
        return bool(tracer.one_graph or getattr(tracer, "error_on_graph_break", False))
    except AttributeError:  # torch.export or another torch version: the graph breaks
        return False


@bookkeeping
def _capture_all_for_compiled_step(optimizer: Optimizer) -> None:
    """Have saves capture everything that an optimizer with a compiled step writes."""
    ownership.find_or_make_owner(optimizer).allow_unhooked_steps(
        "its step is compiled with fullgraph=True, so that nothing in it can wait for a copy"
    )


def install() -> None:
    """Register the hooks. The import of the package calls this once."""
    handle = register_optimizer_step_pre_hook(_before_step)
    # Make it the first pre-hook, so that other hooks write after the gate.
    hooks = handle.hooks_dict_ref()
    if isinstance(hooks, OrderedDict):
        hooks.move_to_end(handle.id, last=False)
    register_optimizer_step_post_hook(_after_step)
