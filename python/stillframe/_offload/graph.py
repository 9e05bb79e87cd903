"""Asks autograd's engine about a running backward, and calls listeners when a backward ends.

A *pass* is one call of the engine; the engine calls it a *task*, and numbers it. Listeners, such as
offloaded layers, join the pass that runs their nodes. They are called at the end of the pass, on
the thread that called the engine:

    caller           backward() .............. returns or raises │ listeners are called │ goes on
    device's thread      node, node, node fails │ drops the pass ──▶ the caller waits for this

The engine calls its own callbacks only after a success. So while layers are offloaded, `watch`
replaces the engine object of `torch.autograd`, through which every call from Python goes. After a
failure, threads of the engine may still run nodes. `BackwardPass.add_listener` gives the engine a
callback to learn when they end: the engine drops it after the last node.

The pass is one of torch's thread-local objects. The engine copies these objects from the caller to
every thread that runs a node. So a node finds its own pass.
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
from typing import Any, Literal

import torch
from torch import Tensor

from stillframe._offload.run_all import run_all
from stillframe.errors import StillframeError

log = logging.getLogger("stillframe")

NO_TASK = -1
_MAX_WAIT_S = 60.0  # the longest wait for the last node of a failed pass
_POLL_S = 0.0005  # the time between two checks for the end of that node
_KEY = "stillframe.pass"  # of the pass among torch's thread-local objects


def task() -> int:
    """Return the number of the backward that the calling thread runs; -1 outside one."""
    return torch._C._current_graph_task_id()


class BackwardPass:
    """One call of the engine. `outer` is the pass whose node made the call, as in reentrant
    activation checkpointing. It is None for an outermost pass."""

    def __init__(self, outer: BackwardPass | None) -> None:
        self.outer = outer
        self.number = NO_TASK  # the engine's number of the pass, once a listener has joined
        self.listeners: dict[BackwardEndListener, None] = {}  # an ordered set, to call at the end
        self.is_over = False  # the call has returned; threads may still refer to the pass
        # Refers to a callback that the engine drops together with the pass.
        self._engines_callback: weakref.ref[Any] | None = None

    def add_listener(self, listener: BackwardEndListener) -> None:
        """Have `listener` called at the end. Call this on a thread that runs a node of the pass."""
        self.number = task()
        self.listeners[listener] = None
        if self._engines_callback is None:
            # The callback does nothing. It has no Python code that Ctrl-C could interrupt.
            callback: Any = functools.partial(bool)
            torch.autograd.Variable._execution_engine.queue_callback(callback)
            self._engines_callback = weakref.ref(callback)

    def end(self, succeeded: bool) -> None:
        """Call the listeners, and raise their first error. If the pass failed, first wait until
        none of its nodes runs."""
        if not succeeded and not self._wait_until_engine_drops_pass():
            log.error(
                "stillframe: a backward has failed, and a node of it still runs after %.0f s",
                _MAX_WAIT_S,
            )
        run_all(
            [
                functools.partial(self._call_and_drop_listener, each, succeeded)
                for each in self.listeners
            ]
        )

    def _call_and_drop_listener(self, listener: BackwardEndListener, succeeded: bool) -> None:
        # After Ctrl-C, which is no Exception, the listener stays for `_end_failed_pass`.
        try:
            listener._handle_pass_end(self, succeeded)
        except Exception:
            del self.listeners[listener]
            raise
        del self.listeners[listener]

    def _wait_until_engine_drops_pass(self) -> bool:
        """Wait until the engine has dropped the pass. Return False after `_MAX_WAIT_S`."""
        end = time.monotonic() + _MAX_WAIT_S
        while self._engines_callback is not None and self._engines_callback() is not None:
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_S)
        return True


def current() -> BackwardPass | None:
    """Return the pass whose node the calling thread runs. Return None if the thread runs no node,
    or if the backward was not called through the `_WatchedAutogradEngine` that `watch` installs."""
    if task() == NO_TASK or not torch._C._is_key_in_tls(_KEY):
        return None
    found: BackwardPass | None = torch._C._get_obj_in_tls(_KEY)
    return None if found is None or found.is_over else found


def _set_current_pass(new: BackwardPass | None) -> None:
    """Set the thread-local object that `current` returns. None removes it."""
    if new is not None:
        torch._C._stash_obj_in_tls(_KEY, new)
    elif hasattr(torch._C, "_remove_obj_from_tls"):
        torch._C._remove_obj_from_tls(_KEY)
    else:  # before torch 2.13
        torch._C._stash_obj_in_tls(_KEY, None)


class _WatchedAutogradEngine(torch._C._ImperativeEngine):
    """Passes every call on to `engine`, autograd's engine, and reports the end of a backward."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        if not _nr_watching:  # other code has kept this object after `_stop_watching_backwards`
            return self.engine.run_backward(*args, **kwargs)
        new = BackwardPass(outer=current())
        try:
            try:
                _set_current_pass(new)
                result = self.engine.run_backward(*args, **kwargs)
            finally:
                new.is_over = True
                _set_current_pass(new.outer)
            new.end(True)
        except BaseException:  # the backward, or a listener, has failed or was interrupted
            _end_failed_pass(new)
            raise
        return result

    def queue_callback(self, callback: Any) -> Any:
        return self.engine.queue_callback(callback)

    def is_checkpoint_valid(self) -> Any:
        return self.engine.is_checkpoint_valid()


def _end_failed_pass(failed: BackwardPass) -> None:
    """Call the remaining listeners of a failed pass, and log their errors."""
    try:
        failed.end(False)
    except Exception as error:  # the caller gets the error of the backward
        log.error("stillframe: a backward has failed, and so has its end: %r", error)


# Re-entrant, because a garbage collection inside it may call `_stop_watching_backwards`.
_lock = threading.RLock()
_nr_watching = 0  # how many listeners are watching; protected by `_lock`


def watch(listener: BackwardEndListener) -> Callable[[], object]:
    """Observe all backwards that begin from now on, for as long as `listener` lives. Return a
    function that ends the observation earlier. That function may be called again."""
    global _nr_watching
    variable: Any = torch.autograd.Variable
    stop = weakref.finalize(listener, _stop_watching_backwards)
    stop.atexit = False  # at exit nobody needs torch's engine back
    with _lock:
        _nr_watching += 1
        if not isinstance(variable._execution_engine, _WatchedAutogradEngine):
            variable._execution_engine = _WatchedAutogradEngine(variable._execution_engine)
    return stop


def _stop_watching_backwards() -> None:
    """End one observation. After the last, restore autograd's engine."""
    global _nr_watching
    variable: Any = torch.autograd.Variable
    with _lock:
        _nr_watching -= 1
        found = variable._execution_engine
        if _nr_watching == 0 and isinstance(found, _WatchedAutogradEngine):
            variable._execution_engine = found.engine


def _renew_lock_after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # another thread of the parent may have held the old lock


os.register_at_fork(after_in_child=_renew_lock_after_fork)


class BackwardEndListener:
    """Calls `function(task, succeeded)` at the end of every backward that `join` registered."""

    def __init__(self, function: Callable[[int, bool], None]) -> None:
        self._function = function
        self._joined: dict[int, BackwardPass] = {}  # passes that have not ended, by number

    def is_nested(self, number: int) -> bool:
        """Return whether this backward, which `join` registered, runs inside another backward that
        `join` registered."""
        joined_pass = self._joined.get(number)
        outer = None if joined_pass is None else joined_pass.outer
        while outer is not None:
            if self in outer.listeners:
                return True
            outer = outer.outer
        return False

    def register_for_running_backward(self) -> int:
        """Register for the end of the backward that runs on this thread, and return its number. May
        be repeated. Raise StillframeError if the backward was not called through the
        `_WatchedAutogradEngine` that `watch` installs."""
        number = task()
        if number in self._joined:
            return number
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if compiled is not None and compiled.in_compiled_autograd_region:
            raise StillframeError("compiled autograd cannot go through offloaded layers")
        running_pass = current()
        if running_pass is None:
            raise StillframeError(
                "a backward through offloaded layers was not called through torch.autograd, or"
                " before offload_layers: call Tensor.backward or torch.autograd.backward"
            )
        self._joined[number] = running_pass
        running_pass.add_listener(self)
        return number

    def _handle_pass_end(self, ended: BackwardPass, succeeded: bool) -> None:
        try:
            self._function(ended.number, succeeded)
        finally:
            self._joined.pop(ended.number, None)


def is_node_in_current_backward(node: torch.autograd.graph.Node | None) -> bool:
    """Return whether the current backward will run a node, or has run it."""
    return node is not None and torch._C._will_engine_execute_node(node)


def gradient_target(parameter: Tensor) -> Literal["grad", "autograd", "nothing"]:
    """Return what the current backward needs a gradient for: to add it to `grad`, for autograd
    itself, or for nothing. Autograd needs it for hooks and for `torch.autograd.grad`."""
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return "autograd"
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        adds_to_grad = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # the parameter was given to `torch.autograd.grad`
        return "autograd"
    return "grad" if adds_to_grad else "nothing"
