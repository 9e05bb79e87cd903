"""Copies gradients of weights that live on the CPU from the device while backward continues.

A layer's gradients are offloaded together, and a thread collects them when their copies have
completed. They are added to the parameters' `grad` when the backward has succeeded, before it
returns to its caller. A backward that fails adds nothing: its caller has the error, and may have
called `zero_grad` already, while a copy is still on its way.

If a parameter has no `grad` yet, the offloaded tensor becomes it without another copy. The other
gradients move to ordinary memory until they are added, so that the pool need not hold two for one
parameter. The additions are those of autograd, in its order: the gradients that one backward gives
to a parameter used by several layers are summed first, and the sum is added to the existing `grad`.

The end of a backward waits on the host for all of this, so every `grad` is then complete. The host
must wait: code that reads a `grad` next, such as `clip_grad_norm_`, calls nothing here that could.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from stillframe._offload.every import every
from stillframe._offload.offloader import Offloader
from stillframe._offload.ticket import Ticket


class Gradient(NamedTuple):
    parameter: Tensor
    value: Tensor
    last: bool  # this backward adds nothing more to the parameter's gradient


class Sent:
    """Gradients that one backward has sent.

    A backward that runs inside another one adds when the outermost one succeeds, its root. So the
    root has the complete sums of both.

    Args:
        outer: The gradients of the backward around this one.
    """

    def __init__(self, outer: Sent | None = None) -> None:
        self.root: Sent = self if outer is None else outer.root
        self.sums: dict[Tensor, Tensor] = {}  # incomplete: this backward adds more to them
        # Of the root alone:
        self.under_way: deque[Future[None]] = deque()
        self.ended_inside: list[Future[None]] = []
        self.whole: list[tuple[Sent, Tensor, Tensor]] = []  # in the order of their additions

    def has(self, parameter: Tensor) -> bool:
        """Return whether something is to be added to the parameter's gradient already."""
        return parameter in self.sums or any(each is parameter for _, each, _ in self.root.whole)


class Gradients:
    """Sends gradients from the device to the CPU.

    Args:
        most: How many layers' gradients may be in flight before a backward waits for the first.
    """

    def __init__(self, offloader: Offloader, most: int) -> None:
        self._offloader = offloader
        self._most = most
        self._threads: ThreadPoolExecutor | None = None

    def send(self, sent: Sent, gradients: Sequence[Gradient]) -> None:
        """Start to copy a layer's gradients, after the work queued on the current stream.

        Args:
            sent: The gradients that this backward has sent so far.
        """
        if not gradients:
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="sf-gradients")
        ticket = self._offloader.offload(
            [fitting(each.value, each.parameter) for each in gradients]
        )
        owners = [(each.parameter, each.last) for each in gradients]
        under_way = sent.root.under_way
        while len(under_way) >= self._most:
            self._wait_for_first(under_way)
        under_way.append(self._threads.submit(_land, sent, ticket, owners))

    def _wait_for_first(self, under_way: deque[Future[None]]) -> None:
        first = under_way[0]
        if not first.done():
            with self._offloader._waiting():
                first.exception()
        first.result()  # one that has failed stays, so that the end of the backward finds it
        under_way.popleft()

    def fetch(self, gradients: Sequence[Gradient]) -> list[Tensor]:
        """Copy gradients to the CPU and wait for them."""
        if not gradients:
            return []
        ticket = self._offloader.offload(
            [fitting(each.value, each.parameter) for each in gradients]
        )
        return [
            came.to(each.parameter.dtype)
            for came, each in zip(ticket.tensors(), gradients, strict=True)
        ]

    def finish(self, sent: Sent, succeeded: bool) -> None:
        """End a backward that ran inside another one, after everything it has sent.

        Does not wait: `join` of the outer backward does, and adds.
        """
        if self._threads is not None:
            sent.root.ended_inside.append(self._threads.submit(_finish, sent, succeeded))

    def join(self, sent: Sent, succeeded: bool) -> None:
        """End a backward: wait until all its gradients are there, and add them if it succeeded.

        Adds nothing if one of them could not be brought, and raises the first error of that. Of a
        failed backward, whose caller has an error already, it raises none.
        """
        ending = [*sent.under_way, *sent.ended_inside]
        try:
            every(each.result if succeeded else each.exception for each in ending)
            _finish(sent, succeeded)
            if succeeded:
                with torch.no_grad():
                    every(functools.partial(_add, each, total) for _, each, total in sent.whole)
        finally:
            for each in (sent.under_way, sent.ended_inside, sent.whole, sent.sums):
                each.clear()

    def close(self) -> None:
        """End the thread after the gradients that are in flight."""
        if self._threads is not None:
            self._threads.shutdown(wait=True)
            self._threads = None


def _land(sent: Sent, ticket: Ticket, owners: list[tuple[Tensor, bool]]) -> None:
    with torch.no_grad():
        for (parameter, last), came in zip(owners, ticket.tensors(), strict=True):
            total = came.to(parameter.dtype)
            before = sent.sums.pop(parameter, None)
            if before is not None:
                total = before.add_(total)
            elif total is came and (parameter.grad is not None or sent.has(parameter)):
                total = came.clone()
            if last:
                sent.root.whole.append((sent, parameter, total))
            else:
                sent.sums[parameter] = total


def _finish(sent: Sent, succeeded: bool) -> None:
    """Complete a backward's sums; drop what it has sent if it failed, as it adds nothing."""
    root = sent.root
    if succeeded:
        root.whole += [(sent, parameter, total) for parameter, total in sent.sums.items()]
    else:
        root.whole = [each for each in root.whole if each[0] is not sent]
    sent.sums.clear()


def fitting(value: Tensor, parameter: Tensor) -> Tensor:
    """Return the gradient with its parameter's strides, as autograd keeps gradients."""
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
