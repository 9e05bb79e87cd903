"""Copies gradients of weights that live on the CPU from the device while backward continues.

The gradients of a layer are offloaded together. When their copies have completed, a thread adds
them to the parameters' `grad`, in autograd's order: if several layers use a parameter, their
gradients are summed first, and the sum is added to the existing `grad`.

The end of a backward waits for this on the host, because the code that reads a `grad` next, such as
`clip_grad_norm_`, calls no function of this module.
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


class DeviceGradient(NamedTuple):
    """A gradient on the device."""

    parameter: Tensor
    value: Tensor
    is_complete: bool  # with this gradient, the parameter's sum is complete in this backward


class Gradients:
    """Sends gradients from the device to the CPU."""

    def __init__(self, offloader: Offloader, max_in_flight: int) -> None:
        self._offloader = offloader
        self._max_in_flight = max_in_flight  # how many layers' gradients may be in flight
        self._thread: ThreadPoolExecutor | None = None  # one thread, started when it is needed
        self._additions: deque[Future[None]] = (
            deque()
        )  # work of the thread: calls of `_add_to_gradient_sums`
        self._ends: list[Future[None]] = []  # work of the thread: calls of `_end`
        # For each backward, by its number: the incomplete sum of each parameter.
        self._sums: dict[int, dict[Tensor, Tensor]] = {}

    def send(self, task: int, gradients: Sequence[DeviceGradient]) -> None:
        """Start to copy a layer's gradients, after the work queued on the current stream. `task` is
        the number of the backward."""
        if not gradients:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="sf-gradients")
        ticket = self._offloader.offload(
            [with_strides_of(each.value, each.parameter) for each in gradients]
        )
        owners = [(each.parameter, each.is_complete) for each in gradients]
        while len(self._additions) >= self._max_in_flight:
            self._wait_for_oldest_gradients()
        self._additions.append(
            self._thread.submit(self._add_to_gradient_sums, task, ticket, owners)
        )

    def _wait_for_oldest_gradients(self) -> None:
        """Wait until the oldest gradients in flight are added. Raise their error, if any."""
        first = self._additions.popleft()
        if not first.done():
            with self._offloader._waiting():
                first.exception()  # waits, but does not raise
        first.result()

    def fetch(self, gradients: Sequence[DeviceGradient]) -> list[Tensor]:
        """Return copies on the CPU of gradients that autograd itself needs."""
        if not gradients:
            return []
        ticket = self._offloader.offload(
            [with_strides_of(each.value, each.parameter) for each in gradients]
        )
        pairs = zip(ticket.tensors(), gradients, strict=True)
        return [value.to(gradient.parameter.dtype) for value, gradient in pairs]

    def join(self, task: int, succeeded: bool = True) -> None:
        """Wait until all gradients of a backward have been added. Raise the first error. Drop the
        incomplete sums of a failed backward, as autograd does."""
        work = [*self._additions, *self._ends]
        self._additions, self._ends = deque(), []
        all_added = False
        try:
            run_all(each.result for each in work)
            all_added = True
        finally:
            self._end(task, succeeded and all_added)

    def finish(self, task: int, succeeded: bool) -> None:
        """Have the thread end a backward that ran inside another backward. Do not wait: the `join`
        of the outer backward waits."""
        if self._thread is not None:
            self._ends.append(self._thread.submit(self._end, task, succeeded))

    def _end(self, task: int, succeeded: bool) -> None:
        """Add the remaining sums of a backward to the parameters' `grad`. Drop them after a
        failure."""
        sums = self._sums.pop(task, {})
        if succeeded:
            with torch.no_grad():
                for parameter, total in sums.items():
                    _add(parameter, total)

    def wait_for_all_gradients(self) -> None:
        """Wait until all gradients have been added. Raise the first error."""
        # The first `join` waits for all backwards, and has no sums. The others add their sums.
        run_all(functools.partial(self.join, task) for task in [graph.NO_TASK, *self._sums])

    def close(self) -> None:
        """Wait until the gradients in flight are added, and end the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None

    def _add_to_gradient_sums(
        self, task: int, ticket: Ticket, owners: list[tuple[Tensor, bool]]
    ) -> None:
        """Add a layer's gradients to the sums of their parameters, and complete sums to `grad`.
        Runs on the thread. `owners`: each gradient's parameter, and whether the sum is complete."""
        sums = self._sums.setdefault(task, {})
        with torch.no_grad():
            for (parameter, is_complete), value in zip(owners, ticket.tensors(), strict=True):
                total = value.to(parameter.dtype)
                sum_so_far = sums.pop(parameter, None)
                if sum_so_far is not None:
                    total = sum_so_far.add_(total)
                if is_complete:
                    _add(parameter, total)
                else:
                    sums[parameter] = total


def with_strides_of(value: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient with the parameter's strides, which autograd gives to a `grad`."""
    if value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _add(parameter: Tensor, total: Tensor) -> None:
    """Add a gradient to the parameter's `grad`."""
    if parameter.grad is None:
        parameter.grad = total
    elif parameter.grad.layout is torch.strided:
        parameter.grad += total
    else:  # a sparse `grad` cannot be added to in place
        parameter.grad = parameter.grad + total
