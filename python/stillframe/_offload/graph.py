"""Asks autograd's engine about a running backward, and learns when it ends.

The engine calls a backward pass a *task* and numbers it. It runs a queued callback when the
backward succeeds, before the caller goes on. When the backward fails, the engine drops the callback
uncalled. On the CPU it does so before the error reaches the caller. With a device, the device's
thread drops it, and the caller may be in its next forward by then:

    caller          backward() ───────────── raises │ zero_grad │ next forward
    device thread        node, node fails ──────────┼───────────┼── drops the callback

So a pass is an object that ends once, by what comes first: its callback, the drop of its callback,
or the next use of the layers outside of any backward.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from stillframe.errors import StillframeError

log = logging.getLogger("stillframe")

NO_TASK = -1


def task() -> int:
    """Return the number of the backward that the calling thread runs; -1 outside one."""
    return torch._C._current_graph_task_id()


class Pass:
    """One backward through offloaded layers.

    Attributes:
        number: The engine's number of it.
        outer: The backward in one of whose nodes this one was called, as a reentrant checkpoint
            does.
        caller: The thread that is taken for its caller.
        ended: Whether it has ended, or counts as failed.
        dropped: Whether the engine has let go of its callback.
    """

    def __init__(self, number: int, outer: Pass | None, caller: int) -> None:
        self.number = number
        self.outer = outer
        self.caller = caller
        self.ended = self.dropped = False


class _AtEnd:
    """A callback for the engine, which ends a pass when it is called or dropped."""

    def __init__(self, passes: Passes, one: Pass) -> None:
        self._passes, self._pass = passes, one

    def __call__(self) -> None:
        self._passes._succeeded(self._pass)

    def __del__(self) -> None:
        self._passes._dropped(self._pass)


class Passes:
    """The backwards that go through the layers of one handle.

    Calls `end(pass, succeeded)` once for each of them, one at a time.

    The lock is held while a pass ends. A drop may come on any thread and in the middle of anything,
    since the garbage collector may cause it. So a drop never waits for the lock: if another thread
    has it, the pass stays open until the next use.
    """

    def __init__(self, end: Callable[[Pass, bool], None]) -> None:
        self._end = end
        # Those that are open, and those whose callback the engine still holds.
        self._passes: dict[int, Pass] = {}
        self._lock = threading.RLock()
        self._ending = False
        # torch passes the thread's values under such a key on to the backwards that it calls.
        self._key = f"stillframe.offload.{id(self)}"

    def join(self, caller: int) -> Pass:
        """Return the backward that the calling thread runs. It is told of its end from now on.

        Args:
            caller: The thread that called it.

        Raises:
            StillframeError: The backward counts as failed already.
            RuntimeError: The calling thread runs no backward.
        """
        number = task()
        one = self._passes.get(number)
        if one is None:
            one = Pass(number, self._outer(), caller)
            self._passes[number] = one
            torch.autograd.Variable._execution_engine.queue_callback(_AtEnd(self, one))
        if one.ended:
            raise _too_late()
        torch._C._stash_obj_in_tls(self._key, one)
        return one

    def _outer(self) -> Pass | None:
        if not torch._C._is_key_in_tls(self._key):
            return None
        outer: Pass = torch._C._get_obj_in_tls(self._key)
        return None if outer.ended else outer

    def is_alone(self, one: Pass) -> bool:
        """Return whether no other pass is open."""
        return all(each is one or each.ended for each in tuple(self._passes.values()))

    def end_failed(self, caller: int | None = None) -> None:
        """End the passes that are still open outside of any backward: they have failed.

        Args:
            caller: End only those that this thread has called; by default all.
        """
        if not self._passes or task() != NO_TASK:
            return
        passes = [
            each
            for each in reversed(tuple(self._passes.values()))  # from the inside outwards
            if caller is None or each.caller == caller
        ]
        if passes:
            with self._lock:
                for one in passes:
                    self._end_once(one, False)

    def _succeeded(self, one: Pass) -> None:
        one.dropped = True
        with self._lock:
            if one.ended:
                self._passes.pop(one.number, None)
                raise _too_late()
            self._end_once(one, True)

    def _dropped(self, one: Pass) -> None:
        one.dropped = True
        if self._lock.acquire(blocking=False):
            try:
                self._end_once(one, False)
            finally:
                self._lock.release()

    def _end_once(self, one: Pass, succeeded: bool) -> None:
        """End a pass, unless another one is ending on this thread. The caller holds the lock."""
        if self._ending:
            return
        if one.ended:
            if one.dropped:
                self._passes.pop(one.number, None)
            return
        one.ended = self._ending = True
        try:
            self._end(one, succeeded)
        except Exception as error:
            if succeeded:
                raise
            # The caller has got the error of the backward itself.
            log.error("stillframe: a backward has failed, and so has its end: %r", error)
        finally:
            self._ending = False
            if one.dropped:
                self._passes.pop(one.number, None)


def _too_late() -> StillframeError:
    return StillframeError(
        "offloaded layers were used outside of a backward while the backward ran, in another"
        " thread: it counts as failed, and its gradients are not added"
    )


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
