"""The six ways that offload.py measures: a stack of layers that runs forward and in reverse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from stillframe.offload import Offloader

Weights = list[torch.Tensor]
Results = list[torch.Tensor]
Way = Callable[[Weights, torch.Tensor, torch.device], Results]


def weights(layers: int, side: int) -> Weights:
    """Return a random square weight for each layer, in ordinary host memory."""
    random = torch.Generator().manual_seed(1)
    return [torch.randn(side, side, generator=random) / side**0.5 for _ in range(layers)]


def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ weight)


def leaving_result(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the tensor that leaves the device: computed from the weight, and as large."""
    return x.t() @ (x @ weight)


def resident(on_device: Weights, x: torch.Tensor) -> Results:
    """Compute with weights that are on the device already; copy nothing."""
    for weight in on_device:
        x = forward(x, weight)
    return [leaving_result(x, weight) for weight in reversed(on_device)]


def plain(host: Weights, x: torch.Tensor, device: torch.device) -> Results:
    """Copy each weight to the device when it is needed; `host` is pageable or pinned memory."""
    for weight in host:
        x = forward(x, weight.to(device, non_blocking=True))
    out = []
    for weight in reversed(host):
        on_host = torch.empty(weight.shape, pin_memory=weight.is_pinned())
        on_host.copy_(leaving_result(x, weight.to(device, non_blocking=True)), non_blocking=True)
        out.append(on_host)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return out


def saved_on_cpu(host: Weights, x: torch.Tensor, device: torch.device) -> Results:
    """Copy all weights first, and let autograd keep the tensors that it saves in host memory.

    Unlike the other ways, it returns gradients.
    """
    with torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda"):
        on_device = [weight.to(device, non_blocking=True).requires_grad_() for weight in host]
        for weight in on_device:
            x = forward(x, weight)
    x.sum().backward()
    return [weight.grad.cpu() for weight in reversed(on_device) if weight.grad is not None]


class Streams:
    """A device's streams, events and asynchronous copies, for loops that overlap by hand.

    `new_pinned` returns new pinned memory of the host, and `finish` waits until the device has done
    everything.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.compute = torch.cuda.current_stream(device)

    def stream(self) -> Any:
        return torch.cuda.Stream(self.device)

    def event(self) -> Any:
        return torch.cuda.Event()

    def record(self, event: Any, stream: Any) -> None:
        event.record(stream)

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def copy_to_device(self, to: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)

    def copy_to_host(self, to: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        self.copy_to_device(to, source, stream)  # torch copies both ways with the same call
        source.record_stream(stream)  # so that torch keeps its memory until the copy is complete

    def new_pinned(self, shape: torch.Size) -> torch.Tensor:
        return torch.empty(shape, pin_memory=True)

    def finish(self) -> None:
        torch.cuda.synchronize(self.device)


def three_streams(host: Weights, x: torch.Tensor, streams: Streams) -> Results:
    """Overlap by hand with two buffers: one is filled while the computation uses the other."""
    compute, inward, outward = streams.compute, streams.stream(), streams.stream()
    buffers = [torch.empty_like(host[0], device=streams.device) for _ in range(2)]
    filled = [streams.event() for _ in buffers]  # the copy of a weight into the buffer is done
    used = [streams.event() for _ in buffers]  # the computation with the buffer's weight is done
    order = [*range(len(host)), *reversed(range(len(host)))]
    out: Results = []

    def fetch(turn: int) -> None:
        """Copy the weight that the computation needs in this turn, once its buffer is free."""
        streams.wait(inward, used[turn % 2])
        streams.copy_to_device(buffers[turn % 2], host[order[turn]], inward)
        streams.record(filled[turn % 2], inward)

    for event in used:  # at first both buffers are free
        streams.record(event, compute)
    fetch(0)
    for turn in range(len(order)):
        if turn + 1 < len(order):
            fetch(turn + 1)
        streams.wait(compute, filled[turn % 2])
        weight = buffers[turn % 2]
        if turn < len(host):  # the first half runs forward, the second one in reverse
            x = forward(x, weight)
        else:
            result = leaving_result(x, weight)
            computed = streams.event()
            streams.record(computed, compute)
            streams.wait(outward, computed)
            out.append(streams.new_pinned(result.shape))
            streams.copy_to_host(out[-1], result, outward)
        streams.record(used[turn % 2], compute)
    streams.finish()
    return out


def ours(offloader: Offloader, tickets: list[Any], x: torch.Tensor) -> Results:
    """Let an Offloader move weights and results; `tickets` are what `adopt` returned."""
    order = [*tickets, *reversed(tickets)]
    result_tickets = []
    for index, ticket in enumerate(order):
        (weight,) = offloader.onload(ticket)
        if index + 1 < len(order):
            offloader.prefetch(order[index + 1])
        if index < len(tickets):
            x = forward(x, weight)
        else:
            result_tickets.append(offloader.offload([leaving_result(x, weight)]))
        offloader.release([weight])
        del weight
    return [each.tensors()[0] for each in result_tickets]  # a ticket's group is one result
