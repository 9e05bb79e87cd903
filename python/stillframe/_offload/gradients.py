"""Gradients of weights that live on the CPU: they leave the device while backward goes on.

A layer's gradients are offloaded in one go, and a thread adds them to the parameters' `grad` when
they have come. Where there is none yet, what has come becomes it: nothing is copied a second time.
The additions are those that autograd makes, in its order: what one backward gives a parameter that
several layers use is summed up first, and the sum is added to what was there.

The end of a backward waits for all this, so afterwards every `grad` is what it would have been.
The host has to: whoever reads a `grad` next, such as `clip_grad_norm_`, asks nobody, so there is
nothing of theirs that could wait instead.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from stillframe._offload import graph
from stillframe._offload.every import every
from stillframe._offload.offloader import Offloader
from stillframe._offload.ticket import Ticket


class Gradient(NamedTuple):
    parameter: Tensor
    value: Tensor
    last: bool  # nothing more is to come for the parameter in this backward


class Gradients:
    """The way of gradients from the device to the CPU.

    Args:
        most: how many layers' gradients may be on their way before a backward waits for the first.
    """

    def __init__(self, offloader: Offloader, most: int) -> None:
        self._offloader = offloader
        self._most = most
        self._threads: ThreadPoolExecutor | None = None
        self._under_way: deque[Future[None]] = deque()
        self._ending: list[Future[None]] = []  # of backwards inside another one
        self._sums: dict[int, dict[Tensor, Tensor]] = {}  # of each backward

    def send(self, task: int, gradients: Sequence[Gradient]) -> None:
        """Starts the way of a layer's gradients, behind the current stream's work.

        Args:
            task: The backward that they are of.
        """
        if not gradients:
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="sf-gradients")
        ticket = self._offloader.offload(
            [fitting(each.value, each.parameter) for each in gradients]
        )
        owners = [(each.parameter, each.last) for each in gradients]
        while len(self._under_way) >= self._most:
            self._wait_for_first()
        self._under_way.append(self._threads.submit(self._land, task, ticket, owners))

    def _wait_for_first(self) -> None:
        first = self._under_way.popleft()
        if not first.done():
            with self._offloader._waiting():
                first.exception()
        first.result()

    def fetch(self, gradients: Sequence[Gradient]) -> list[Tensor]:
        """The gradients on the CPU, waited for."""
        if not gradients:
            return []
        ticket = self._offloader.offload(
            [fitting(each.value, each.parameter) for each in gradients]
        )
        return [
            came.to(each.parameter.dtype)
            for came, each in zip(ticket.tensors(), gradients, strict=True)
        ]

    def join(self, task: int, succeeded: bool = True) -> None:
        """Returns when all gradients of a backward have been added. Raises what has gone wrong on
        the way. Of one that failed, sums that were not complete are dropped, as autograd does."""
        ending = [*self._under_way, *self._ending]
        self._under_way, self._ending = deque(), []
        whole = False
        try:
            every(each.result for each in ending)
            whole = True
        finally:
            self._end(task, succeeded and whole)

    def finish(self, task: int, succeeded: bool) -> None:
        """Ends a backward inside another one, behind all that it has sent. Nobody waits: `join` of
        the one around does."""
        if self._threads is not None:
            self._ending.append(self._threads.submit(self._end, task, succeeded))

    def _end(self, task: int, succeeded: bool) -> None:
        sums = self._sums.pop(task, {})
        if succeeded:
            with torch.no_grad():
                for parameter, total in sums.items():
                    _add(parameter, total)

    def join_all(self) -> None:
        """Returns when everything sent has been added."""
        every(functools.partial(self.join, task) for task in [graph.NO_TASK, *self._sums])

    def close(self) -> None:
        """Ends the thread; what is under way is waited for."""
        if self._threads is not None:
            self._threads.shutdown(wait=True)
            self._threads = None

    def _land(self, task: int, ticket: Ticket, owners: list[tuple[Tensor, bool]]) -> None:
        sums = self._sums.setdefault(task, {})
        with torch.no_grad():
            for (parameter, last), came in zip(owners, ticket.tensors(), strict=True):
                total = came.to(parameter.dtype)
                before = sums.pop(parameter, None)
                if before is not None:
                    total = before.add_(total)
                if last:
                    _add(parameter, total)
                else:
                    sums[parameter] = total


def fitting(value: Tensor, parameter: Tensor) -> Tensor:
    """A gradient laid out as its parameter is, which is how autograd lays out what it keeps."""
    if value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _add(parameter: Tensor, total: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = total
    elif parameter.grad.layout is torch.strided:
        parameter.grad += total
    else:
        parameter.grad = parameter.grad + total
