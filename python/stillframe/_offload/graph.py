"""What is asked of autograd's engine in the middle of a backward.

A backward pass is a *task* with a number. What has to happen at its end is queued with the engine,
which runs it when the backward has succeeded. When it fails nothing is called, but what was
queued is dropped before the error reaches the caller. That is noticed: so one that failed
leaves nothing of ours half done.
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
    """The number of the backward that the calling thread is in; -1 outside one."""
    return torch._C._current_graph_task_id()


class _AtEnd:
    """What is queued with the engine: runs once, at the end or when it is dropped."""

    def __init__(self, function: Callable[[bool], None]) -> None:
        self._function: Callable[[bool], None] | None = function

    def __call__(self, succeeded: bool = True) -> None:
        function, self._function = self._function, None
        if function is not None:
            function(succeeded)

    def __del__(self) -> None:
        try:
            self(False)
        except Exception as error:  # the caller gets the one that the backward has failed with
            log.error("stillframe: a backward has failed, and so has its end: %r", error)


class Ends:
    """Calls `function(task, succeeded)` at the end of every backward that was joined."""

    def __init__(self, function: Callable[[int, bool], None]) -> None:
        self._function = function
        self._joined: set[int] = set()
        self._lock = threading.Lock()

    def is_inside(self) -> bool:
        """Whether another backward that was joined is still to end: the one that ends is inside it,
        as a checkpoint's is."""
        return bool(self._joined)

    def join(self) -> int:
        """Has the end of this backward told. Returns its number.

        Raises:
            RuntimeError: The calling thread is in no backward.
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
    """Whether this backward goes through a node, or has done so."""
    return node is not None and torch._C._will_engine_execute_node(node)


def accumulates(parameter: Tensor) -> bool | None:
    """Whether this backward adds to the `grad` of a parameter; None where it wants to be handed the
    gradient instead (`torch.autograd.grad`), or a hook of the parameter does."""
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return None
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # said of leaves that autograd.grad was given
        return None
