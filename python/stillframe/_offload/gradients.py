"""Copies gradients of weights that live on the CPU from the device while backward continues.

A layer's gradients are offloaded together, and a thread adds them to the parameters' `grad` when
their copies have completed. If a parameter has no `grad` yet, the offloaded tensor becomes its
`grad` without another copy. Additions have the same order as autograd's: if several layers use a
parameter, the gradients of one backward are summed first, and the sum is added to the existing
`grad`.

The end of a backward waits on the host for all of this, so every `grad` is complete then. Nothing
later could wait: the code that reads a `grad` next, such as `clip_grad_norm_`, calls no function of
this module.
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
from stillframe._offload.offloader import Offloader
from stillframe._offload.run_all import run_all
from stillframe._offload.ticket import Ticket


class Gradient(NamedTuple):
    """A gradient on the device."""

    parameter: Tensor
    value: Tensor
    last: bool  # this backward computes no further gradient of the parameter


class Gradients:
    """Sends gradients from the device to the CPU.

    Args:
        most: How many layers' gradients may be in flight. A backward that sends more first waits
            for the oldest.
    """

    def __init__(self, offloader: Offloader, most: int) -> None:
        self._offloader = offloader
        self._most = most
        self._thread: ThreadPoolExecutor | None = None  # one thread, started when it is needed
        self._under_way: deque[Future[None]] = deque()  # additions, one for each layer
        self._ending: list[Future[None]] = []  # calls of `_end`, for backwards inside another one
        # By the number of a backward: the sum so far for each parameter that will get more
        # gradients.
        self._sums: dict[int, dict[Tensor, Tensor]] = {}

    def send(self, task: int, gradients: Sequence[Gradient]) -> None:
        """Start to copy a layer's gradients, after the work queued on the current stream.

        Args:
            task: The number of the backward that computed them (`graph.task`).
        """
        if not gradients:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="sf-gradients")
        ticket = self._offloader.offload(
            [fitting(each.value, each.parameter) for each in gradients]
        )
        owners = [(each.parameter, each.last) for each in gradients]
        while len(self._under_way) >= self._most:
            self._wait_for_first()
        self._under_way.append(self._thread.submit(self._add_up, task, ticket, owners))

    def _wait_for_first(self) -> None:
        """Wait until the gradients that were sent first are added; raise the error, if any."""
        first = self._under_way.popleft()
        if not first.done():
            with self._offloader._waiting():
                first.exception()  # waits, but does not raise
        first.result()

    def fetch(self, gradients: Sequence[Gradient]) -> list[Tensor]:
        """Copy gradients that autograd itself needs to the CPU. Wait for the copies and return
        them."""
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
        """Wait until all gradients of a backward have been added; raise the first error of the
        additions.

        The sums that are left of a failed backward are dropped, as autograd drops them.
        """
        ending = [*self._under_way, *self._ending]
        self._under_way, self._ending = deque(), []
        added = False
        try:
            run_all(each.result for each in ending)
            added = True
        finally:
            self._end(task, succeeded and added)

    def finish(self, task: int, succeeded: bool) -> None:
        """Have the thread end a backward that ran inside another one. Do not wait for the thread.

        The thread first adds all gradients that this backward sent. The `join` of the outer
        backward waits for the end.

        Args:
            succeeded: False drops the sums that are left.
        """
        if self._thread is not None:
            self._ending.append(self._thread.submit(self._end, task, succeeded))

    def _end(self, task: int, succeeded: bool) -> None:
        """Add the remaining sums of a backward to the parameters' `grad`, or drop them."""
        sums = self._sums.pop(task, {})
        if succeeded:
            with torch.no_grad():
                for parameter, total in sums.items():
                    _add(parameter, total)

    def join_all(self) -> None:
        """Wait until all gradients that were sent have been added; raise the first error."""
        # The first join waits for everything. The others add the sums that are left.
        run_all(functools.partial(self.join, task) for task in [graph.NO_TASK, *self._sums])

    def close(self) -> None:
        """Wait until the gradients in flight are added, and end the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None

    def _add_up(self, task: int, ticket: Ticket, owners: list[tuple[Tensor, bool]]) -> None:
        """Wait for the copies of a layer's gradients, and add them to the sums of their parameters.
        Add a sum to `grad` if it is complete. Runs on the thread.

        Args:
            owners: Each gradient's parameter, and whether this gradient completes its sum.
        """
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
    """Return a gradient with its parameter's strides, which autograd would also give to `grad`."""
    if value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _add(parameter: Tensor, total: Tensor) -> None:
    """Add the sum of a backward's gradients to a parameter's `grad`."""
    if parameter.grad is None:
        parameter.grad = total
    elif parameter.grad.layout is torch.strided:
        parameter.grad += total
    else:  # a sparse `grad` cannot be added to in place
        parameter.grad = parameter.grad + total
