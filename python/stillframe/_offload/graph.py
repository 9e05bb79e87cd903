"""Asks autograd's engine about a running backward, and learns when it ends.

The engine calls a backward pass a *task* and numbers it. It runs a queued callback when the
backward succeeds. When the backward fails, the engine drops the callback uncalled before the error
reaches the caller. The callback's destructor detects that, so a failed backward is cleaned up too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch
from torch import Tensor

log = logging.getLogger("stillframe")

NO_TASK = -1


def task() -> int:
    """Return the number of the backward that the calling thread runs; -1 outside one."""
    return torch._C._current_graph_task_id()


class _AtEnd:
    """A callback for the engine that runs once: at the end, or when it is dropped."""

    def __init__(self, function: Callable[[bool], None]) -> None:
        self._function: Callable[[bool], None] | None = function

    def __call__(self, succeeded: bool = True) -> None:
        function, self._function = self._function, None
        if function is not None:
            function(succeeded)

    def __del__(self) -> None:
        try:
            self(False)
        except Exception as error:  # the caller gets the error of the backward itself
            log.error("stillframe: a backward has failed, and so has its end: %r", error)


class Ends:
    """Calls `function(task, succeeded)` at the end of every backward that has called `join`."""

    def __init__(self, function: Callable[[int, bool], None]) -> None:
        self._function = function
        self._joined: set[int] = set()
        self._lock = threading.Lock()

    def is_inside(self) -> bool:
        """Return whether the backward that ends now ran inside another one, as a checkpoint's
        does: whether another joined backward is still to end."""
        return bool(self._joined)

    def join(self) -> int:
        """Register the current backward, and return its number.


        Raises:
            RuntimeError: The calling thread runs no backward.
        """
        number = task()
        with self._lock:
            if number in self._joined:
                return number
            self._joined.add(number)

        def end(succeeded: bool) -> None:
            self._joined.discard(number)
            self._function(number, succeeded)

        torch.autograd.Variable._execution_engine.queue_callback(_AtEnd(end))
        return number


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
