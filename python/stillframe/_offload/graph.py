"""Asks autograd's engine about a running backward, and tells when a backward ends.

A pass is one call of the engine, which numbers it and calls it a *task*. Layers join the pass that
runs their nodes, and hear of its end on the thread that made the call, before the caller goes on:

    caller           backward() ................................ returns or raises │ ends │ goes on
    device's thread      node, node, node fails │ drops the pass ──────▶ waited for

The engine itself tells only the end of a pass that succeeds. It drops the callbacks of one that
fails. On a device it drops them on a thread of its own, when the caller may be in its next forward
already. So `watch` replaces the engine object of `torch.autograd`, through which every call of
Python's goes, for as long as layers are offloaded. A dropped callback then has one effect only: the
caller learns that no thread runs a node of the pass any more.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from stillframe._offload.run_all import run_all
from stillframe.errors import StillframeError

log = logging.getLogger("stillframe")

NO_TASK = -1
_MOST_S = 60.0  # that a failed pass is waited for: its last node may take long


def task() -> int:
    """Return the number of the backward that the calling thread runs; -1 outside one."""
    return torch._C._current_graph_task_id()


class _Held:
    """A callback that lives as long as the engine holds the pass."""

    def __init__(self, dropped: threading.Event) -> None:
        self._dropped = dropped

    def __call__(self) -> None:
        """Do nothing: the caller's thread tells the end."""

    def __del__(self) -> None:
        self._dropped.set()


class Pass:
    """One call of the engine.

    Attributes:
        around: The pass in one of whose nodes this one was called, as a reentrant checkpoint does.
        number: The engine's number of it, once its first node runs.
        nodes: Those of its outputs, one of which runs first.
        ends: Who hears of its end, in the order of joining.
    """

    def __init__(self, around: Pass | None) -> None:
        self.around = around
        self.number = NO_TASK
        self.nodes: set[Any] = set()
        self.ends: dict[Ends, None] = {}
        self._dropped: threading.Event | None = None

    @contextmanager
    def noted(self, outputs: Iterable[Any]) -> Iterator[None]:
        """Note the pass under its number when its first node runs."""
        self.nodes = {e.grad_fn if isinstance(e, Tensor) else e.node for e in outputs} - {None}
        hooks = [node.register_prehook(self._note) for node in self.nodes]
        with _lock:
            _begun.append(self)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            with _lock:
                self.nodes.clear()
                _passes.pop(self.number, None)
                if self in _begun:
                    _begun.remove(self)

    def _note(self, grads: Any) -> None:
        current()

    def join(self, ends: Ends) -> None:
        """Have `ends` hear of the end. The calling thread runs a node of this pass."""
        with _lock:
            self.ends[ends] = None
            if self._dropped is not None:
                return
            dropped = self._dropped = threading.Event()
        torch.autograd.Variable._execution_engine.queue_callback(_Held(dropped))

    def end(self, succeeded: bool) -> None:
        """Tell the end. Wait first until no thread runs a node of a pass that has failed."""
        if not succeeded and self._dropped is not None and not self._dropped.wait(_MOST_S):
            log.error(
                "stillframe: a backward has failed, and a node of it still runs after %.0f s",
                _MOST_S,
            )
        run_all([functools.partial(each._ended, self, succeeded) for each in self.ends])


_lock = threading.RLock()
_begun: list[Pass] = []  # none of their nodes has run so far
_passes: dict[int, Pass] = {}  # those that run, by number
_nr_watching = 0


def current() -> Pass | None:
    """Return the pass that the calling thread runs a node of; None outside one, and where the call
    was not seen."""
    number = task()
    if number == NO_TASK or number in _passes:
        return _passes.get(number)
    # A node of its outputs runs, and perhaps a hook that stands before the one of `Pass.noted`.
    node = torch._C._current_autograd_node()
    with _lock:
        for one in _begun:
            if node in one.nodes:
                _begun.remove(one)
                one.number = number
                _passes[number] = one
                return one
    return None


class _Engine(torch._C._ImperativeEngine):
    """Autograd's engine, which tells the end of each of its calls.

    Args:
        engine: The engine that is called.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def run_backward(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        one = Pass(current())
        succeeded = False
        try:
            with one.noted(outputs):
                result = self.engine.run_backward(outputs, *args, **kwargs)
            succeeded = True
        finally:  # Ctrl-C counts as a failure
            if not succeeded:
                _end_failed(one)
        one.end(True)
        return result

    def queue_callback(self, callback: Any) -> Any:
        return self.engine.queue_callback(callback)

    def is_checkpoint_valid(self) -> Any:
        return self.engine.is_checkpoint_valid()


def _end_failed(one: Pass) -> None:
    try:
        one.end(False)
    except Exception as error:  # the caller gets the error of the backward itself
        log.error("stillframe: a backward has failed, and so has its end: %r", error)


def watch() -> None:
    """Tell the ends of all backwards that begin from now on, until as many calls of `unwatch`."""
    global _nr_watching
    variable: Any = torch.autograd.Variable
    with _lock:
        _nr_watching += 1
        if _nr_watching == 1:
            variable._execution_engine = _Engine(variable._execution_engine)


def unwatch() -> None:
    """Take back one call of `watch`."""
    global _nr_watching
    variable: Any = torch.autograd.Variable
    with _lock:
        _nr_watching -= 1
        found = variable._execution_engine
        if _nr_watching == 0 and isinstance(found, _Engine):
            variable._execution_engine = found.engine


class Ends:
    """Calls `function(task, succeeded)` at the end of every backward that has called `join`."""

    def __init__(self, function: Callable[[int, bool], None]) -> None:
        self._function = function
        self._joined: dict[int, Pass] = {}

    def is_inside(self, number: int) -> bool:
        """Return whether a joined backward runs inside another joined one."""
        one = self._joined.get(number)
        around = None if one is None else one.around
        while around is not None and self not in around.ends:
            around = around.around
        return around is not None

    def join(self) -> int:
        """Register the current backward, and return its number.

        Raises:
            StillframeError: The call of the backward was not seen.
        """
        number = task()
        if number in self._joined:
            return number
        one = current()
        if one is None:
            raise StillframeError(
                "a backward through offloaded layers was not called through torch.autograd, or"
                " before offload_layers: call Tensor.backward or torch.autograd.backward"
            )
        self._joined[number] = one
        one.join(self)
        return number

    def _ended(self, one: Pass, succeeded: bool) -> None:
        try:
            self._function(one.number, succeeded)
        finally:
            self._joined.pop(one.number, None)


def comes(node: torch.autograd.graph.Node | None) -> bool:
    """Return whether the current backward runs a node, or has run it."""
    return node is not None and torch._C._will_engine_execute_node(node)


def accumulates(parameter: Tensor) -> bool | None:
    """Return whether the current backward adds to the `grad` of a parameter.

    None means that the gradient has to be returned to autograd instead: for
    `torch.autograd.grad`, or because the parameter has hooks.
    """
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return None
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # raised for leaves that were given to autograd.grad
        return None
