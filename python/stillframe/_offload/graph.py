"""Asks autograd's engine about a running backward, and calls listeners when a backward ends.

A *pass* is one call of the engine. The engine numbers its calls, and its name for a pass is *task*.
Listeners, such as offloaded layers, join the pass that runs their nodes. They are called at the end
of the pass, on the thread that made the call, before that thread goes on:

    caller           backward() .............. returns or raises │ listeners are called │ goes on
    device's thread      node, node, node fails │ drops the pass ──▶ the caller waits for this

The engine has callbacks of its own for the end of a pass. But it calls them only after a success,
and drops the callbacks of a failed pass. On a device it drops them on a thread of its own, when the
caller may be in its next forward already. So while layers are offloaded, `watch` replaces the
engine object of `torch.autograd`, through which every call from Python goes. `Pass.add_listener`
still gives the engine a callback, for one purpose: once a failed pass has dropped the callback, no
thread runs a node of the pass any more.

The pass is one of torch's thread-local objects. The engine copies the caller's thread-local objects
to every thread that runs a node. So a node finds its own pass, even if other threads run other
passes.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stillframe._offload.run_all import run_all
from stillframe.errors import StillframeError

log = logging.getLogger("stillframe")

NO_TASK = -1
_MOST_S = 60.0  # the longest wait for the last node of a failed pass, in seconds
_POLL_S = 0.0005  # seconds between two checks whether that node has ended
_KEY = "stillframe.pass"  # the pass's key among the thread-local objects of torch


def task() -> int:
    """Return the number of the backward that the calling thread runs; -1 outside one."""
    return torch._C._current_graph_task_id()


class Pass:
    """One call of the engine.

    Attributes:
        around: The outer pass, if this one was called inside a node of another pass, as reentrant
            activation checkpointing does; otherwise None.
        number: The engine's number of the pass, once a listener has joined.
        listeners: The listeners to call at the end, in the order of joining.
        is_over: The pass has ended. Threads may still have it as their thread-local object.
    """

    def __init__(self, around: Pass | None) -> None:
        self.around = around
        self.number = NO_TASK
        self.listeners: dict[EndListener, None] = {}  # a set in order
        self.is_over = False
        # A reference to a callback that the engine drops together with the pass.
        self._engines_callback: weakref.ref[Any] | None = None

    def add_listener(self, listener: EndListener) -> None:
        """Have `listener` called at the end. The calling thread must run a node of this pass."""
        self.number = task()
        self.listeners[listener] = None
        if self._engines_callback is None:
            # A callback that does nothing, and has no Python code that Ctrl-C could interrupt.
            callback: Any = functools.partial(bool)
            torch.autograd.Variable._execution_engine.queue_callback(callback)
            self._engines_callback = weakref.ref(callback)

    def end(self, succeeded: bool) -> None:
        """Call the listeners, and raise the first error that one of them raises. If the pass
        failed, first wait until none of its nodes runs."""
        if not succeeded and not self._wait_until_dropped():
            log.error(
                "stillframe: a backward has failed, and a node of it still runs after %.0f s",
                _MOST_S,
            )
        run_all([functools.partial(self._report_end, each, succeeded) for each in self.listeners])

    def _report_end(self, listener: EndListener, succeeded: bool) -> None:
        """Call a listener and remove it, even if it fails. After Ctrl-C keep the listener, so that
        `_end_failed` calls it again."""
        try:
            listener._pass_ended(self, succeeded)
        except Exception:
            del self.listeners[listener]
            raise
        del self.listeners[listener]

    def _wait_until_dropped(self) -> bool:
        """Wait until the engine has dropped the pass. Return False if that takes longer than
        `_MOST_S`."""
        end = time.monotonic() + _MOST_S
        while self._engines_callback is not None and self._engines_callback() is not None:
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_S)
        return True


def current() -> Pass | None:
    """Return the pass of which the calling thread runs a node. Return None if it runs no node, or
    if the engine was not called through `_Engine`."""
    if task() == NO_TASK or not torch._C._is_key_in_tls(_KEY):
        return None
    found: Pass | None = torch._C._get_obj_in_tls(_KEY)
    return None if found is None or found.is_over else found


def _make_current(which: Pass | None) -> None:
    """Set the thread-local object from which `current` finds the pass; None removes it."""
    if which is not None:
        torch._C._stash_obj_in_tls(_KEY, which)
    elif hasattr(torch._C, "_remove_obj_from_tls"):
        torch._C._remove_obj_from_tls(_KEY)
    else:  # before torch 2.13
        torch._C._stash_obj_in_tls(_KEY, None)


class _Engine(torch._C._ImperativeEngine):
    """Autograd's engine, which reports the end of each of its calls.

    Args:
        engine: The engine that it replaces, and to which it passes every call on.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        # Other code may have kept this object, and put it back after `_unwatch`.
        if not _nr_watching:
            return self.engine.run_backward(*args, **kwargs)
        new = Pass(current())
        try:
            try:
                _make_current(new)
                result = self.engine.run_backward(*args, **kwargs)
            finally:
                new.is_over = True
                _make_current(new.around)
            new.end(True)
        except BaseException:  # of the backward, or of a listener; Ctrl-C counts as a failure
            _end_failed(new)
            raise
        return result

    def queue_callback(self, callback: Any) -> Any:
        return self.engine.queue_callback(callback)

    def is_checkpoint_valid(self) -> Any:
        return self.engine.is_checkpoint_valid()


def _end_failed(failed: Pass) -> None:
    """Call the listeners of a failed pass that are left, and log their errors."""
    try:
        failed.end(False)
    except Exception as error:  # the caller gets the error of the backward itself
        log.error("stillframe: a backward has failed, and so has its end: %r", error)


# Protects `_nr_watching`. Re-entrant, because a garbage collection inside it may call `_unwatch`.
_lock = threading.RLock()
_nr_watching = 0  # how many calls of `watch` are in effect


def watch(listener: EndListener) -> Callable[[], object]:
    """Observe all backwards that begin from now on, for as long as `listener` lives.

    Returns:
        A function that ends the observation earlier. It may be called again.
    """
    global _nr_watching
    variable: Any = torch.autograd.Variable
    stop = weakref.finalize(listener, _unwatch)
    stop.atexit = False  # at exit nobody needs torch's engine back
    with _lock:
        _nr_watching += 1
        if not isinstance(variable._execution_engine, _Engine):
            variable._execution_engine = _Engine(variable._execution_engine)
    return stop


def _unwatch() -> None:
    """End one observation. After the last, put torch's engine back."""
    global _nr_watching
    variable: Any = torch.autograd.Variable
    with _lock:
        _nr_watching -= 1
        found = variable._execution_engine
        if _nr_watching == 0 and isinstance(found, _Engine):
            variable._execution_engine = found.engine


def _forked() -> None:
    global _lock
    _lock = threading.RLock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_forked)


class EndListener:
    """Calls `function(task, succeeded)` at the end of every backward that `join` registered."""

    def __init__(self, function: Callable[[int, bool], None]) -> None:
        self._function = function
        self._joined: dict[int, Pass] = {}  # passes that have not ended, by number

    def is_inside(self, number: int) -> bool:
        """Return whether this backward runs inside another one that was joined."""
        found = self._joined.get(number)
        around = None if found is None else found.around
        while around is not None and self not in around.listeners:
            around = around.around
        return around is not None

    def join(self) -> int:
        """Register the backward that runs on this thread, and return its number. May be called
        again.

        Raises:
            StillframeError: The backward was not called through `_Engine`.
        """
        number = task()
        if number in self._joined:
            return number
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if compiled is not None and compiled.in_compiled_autograd_region:
            raise StillframeError("compiled autograd cannot go through offloaded layers")
        found = current()
        if found is None:
            raise StillframeError(
                "a backward through offloaded layers was not called through torch.autograd, or"
                " before offload_layers: call Tensor.backward or torch.autograd.backward"
            )
        self._joined[number] = found
        found.add_listener(self)
        return number

    def _pass_ended(self, ended: Pass, succeeded: bool) -> None:
        try:
            self._function(ended.number, succeeded)
        finally:
            self._joined.pop(ended.number, None)


def runs_node(node: torch.autograd.graph.Node | None) -> bool:
    """Return whether the current backward will run a node, or has run it."""
    return node is not None and torch._C._will_engine_execute_node(node)


def accumulates(parameter: Tensor) -> bool | None:
    """Return whether the current backward adds to the `grad` of a parameter.

    Return None if the gradient has to be returned to autograd instead: the parameter has hooks, or
    was given to `torch.autograd.grad`.
    """
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return None
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # raised for leaves that were given to autograd.grad
        return None
