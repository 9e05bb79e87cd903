"""The ways of offload.py on a machine without a GPU, over the tests' fake CUDA driver.

The driver calls of each way are counted, and its results are compared with those that the same
computation has in plain memory.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from typing import Any

import stillframe
import torch
from offload_ways import (
    Results,
    Streams,
    Weights,
    forward,
    leaving_result,
    ours,
    resident,
    saved_on_cpu,
    three_streams,
    weights,
)
from stillframe import testing
from stillframe.offload import Offloader

MIB = 1 << 20


class FakeStreams(Streams):
    """The streams, events and copies of `Streams`, made with calls of the fake driver.

    The fake driver's default stream, `compute`, is the calling thread: its work is done when the
    call returns. "Device memory" is host memory. `_copy` sets a bit in its addresses, by which the
    driver takes it for device memory.
    """

    def __init__(self, driver: Any) -> None:
        self.device, self.compute = torch.device("cpu"), ctypes.c_void_p(None)
        self.driver, self.call = driver, driver._library  # `call` has the functions of libcuda
        self.sent: list[torch.Tensor] = []  # sources, which must live until they are copied
        self.pinned: list[ctypes.c_void_p] = []
        self.copy_stream: Any = None  # made by the first call of `in_stream_order`
        self.used: set[int] = set()  # streams with copies for which `finish` has to wait
        self.context = ctypes.c_void_p()

    def __enter__(self) -> FakeStreams:
        self._check(self.call.cuDevicePrimaryCtxRetain(ctypes.byref(self.context), 0))
        self._check(self.call.cuCtxPushCurrent_v2(self.context))
        return self

    def __exit__(self, *error: object) -> None:
        for memory in self.pinned:
            self._check(self.call.cuMemFreeHost(memory))
        self._check(self.call.cuCtxPopCurrent_v2(ctypes.byref(self.context)))
        self._check(self.call.cuDevicePrimaryCtxRelease_v2(0))

    def stream(self) -> Any:
        return ctypes.c_void_p(self.driver.stream())

    def event(self) -> Any:
        event = ctypes.c_void_p()
        self._check(self.call.cuEventCreate(ctypes.byref(event), 2))  # 2: CU_EVENT_DISABLE_TIMING
        return event

    def record(self, event: Any, stream: Any) -> None:
        self._check(self.call.cuEventRecord(event, stream))

    def wait(self, stream: Any, event: Any) -> None:
        self._check(self.call.cuStreamWaitEvent(stream, event, 0))

    def copy_to_device(self, to: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        self._copy(self.call.cuMemcpyHtoDAsync_v2, to, source, stream)

    def copy_to_host(self, to: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        self._copy(self.call.cuMemcpyDtoHAsync_v2, to, source, stream)
        self.sent.append(source)

    def new_pinned(self, shape: torch.Size) -> torch.Tensor:
        memory, nbytes = ctypes.c_void_p(), 4 * shape.numel()
        self._check(self.call.cuMemHostAlloc(ctypes.byref(memory), ctypes.c_size_t(nbytes), 0))
        self.pinned.append(memory)
        held = (ctypes.c_char * nbytes).from_address(memory.value or 0)
        return torch.frombuffer(held, dtype=torch.float32).view(shape)

    def finish(self) -> None:
        """Wait for all copies, by polling events: no call of the driver waits."""
        for handle in self.used:
            done = self.event()
            self.record(done, ctypes.c_void_p(handle))
            while self.call.cuEventQuery(done) != 0:
                time.sleep(1e-4)
        self.used.clear()

    def in_stream_order(
        self, copy: Callable[..., None], to: torch.Tensor, source: torch.Tensor
    ) -> None:
        """Copy after the computation so far and before the computation to come.

        torch copies on the stream that computes, which keeps this order by itself. The fake driver
        makes no copies on its default stream, so this copy has a stream of its own, and events
        order the two streams.
        """
        if self.copy_stream is None:
            self.copy_stream = self.stream()
        self._make_stream_wait(self.compute, self.copy_stream)
        copy(to, source, self.copy_stream)
        self._make_stream_wait(self.copy_stream, self.compute)

    def _make_stream_wait(self, first: Any, second: Any) -> None:
        """Let the stream `second` wait for what is queued on the stream `first`."""
        reached = self.event()
        self.record(reached, first)
        self.wait(second, reached)

    def synchronize(self) -> None:
        self._check(self.call.cuStreamSynchronize(self.copy_stream))

    def _copy(self, call: Any, to: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        target, origin = to.data_ptr(), source.data_ptr()
        if call is self.call.cuMemcpyDtoHAsync_v2:
            origin |= testing._DEVICE_BIT  # the driver takes it for device memory
        else:
            target |= testing._DEVICE_BIT
        nbytes = ctypes.c_size_t(to.nbytes)
        self._check(call(ctypes.c_uint64(target), ctypes.c_uint64(origin), nbytes, stream))
        self.used.add(stream.value)

    def _check(self, code: int) -> None:
        assert code == 0, f"the driver says {code}"


def copies(host: Weights, streams: FakeStreams) -> None:
    """Copy as many bytes as a step, both directions at once, each on a stream of its own."""
    inward, outward, computed = streams.stream(), streams.stream(), streams.event()
    streams.record(computed, streams.compute)
    for stream in (inward, outward):
        streams.wait(stream, computed)
    buffer = torch.empty_like(host[0], device=streams.device)
    result = torch.empty_like(host[0], device=streams.device)  # its values do not matter
    on_host = streams.new_pinned(host[0].shape)
    for weight in host:  # forward
        streams.copy_to_device(buffer, weight, inward)
    for weight in reversed(host):  # in reverse each weight comes again, and a result leaves
        streams.copy_to_device(buffer, weight, inward)
        streams.copy_to_host(on_host, result, outward)
    streams.finish()


# The calls that are counted. "sync" stands for all calls that wait for the device.
COPIES = ("cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "sync")
CALLS = (*COPIES, "cuEventRecord", "cuStreamWaitEvent", "cuMemHostRegister_v2")


def plain_by_driver(host: Weights, x: torch.Tensor, streams: FakeStreams, pinned: bool) -> Results:
    """Compute as `plain` of offload_ways.py, with the driver calls that torch would make for it."""
    out = []
    streams.driver.allow_pageable(not pinned)

    def fetch(weight: torch.Tensor) -> torch.Tensor:
        on_device = torch.empty_like(weight)
        streams.in_stream_order(streams.copy_to_device, on_device, weight)
        return on_device

    for weight in host:
        x = forward(x, fetch(weight))
    for weight in reversed(host):
        result = leaving_result(x, fetch(weight))  # on the device
        out.append(streams.new_pinned(result.shape) if pinned else torch.empty_like(result))
        streams.in_stream_order(streams.copy_to_host, out[-1], result)
    streams.finish()
    return out


def saved_by_driver(host: Weights, x: torch.Tensor, streams: FakeStreams) -> Results:
    """Compute as `saved_on_cpu`, with the driver calls that torch would make for it.

    Like torch, it waits for each copy to the host.
    """

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        source = tensor.detach().contiguous()
        on_host = streams.new_pinned(source.shape)
        streams.in_stream_order(streams.copy_to_host, on_host, source)
        streams.synchronize()
        if tensor.is_contiguous():
            return on_host.view_as(source)
        return on_host.t().contiguous().t()  # `tensor` is a transposed weight: keep its strides

    def unpack(on_host: torch.Tensor) -> torch.Tensor:
        unpacked = torch.empty_like(on_host)
        streams.in_stream_order(streams.copy_to_device, unpacked, on_host)
        return unpacked

    on_device = [torch.empty_like(weight) for weight in host]
    for device_weight, weight in zip(on_device, host, strict=True):
        streams.in_stream_order(streams.copy_to_device, device_weight, weight)
        device_weight.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        for weight in on_device:
            x = forward(x, weight)
    x.sum().backward()
    return [weight.grad for weight in reversed(on_device) if weight.grad is not None]


def run_counted(
    driver: Any, way: Callable[[], Any], expected: Results | None, names: tuple[str, ...] = CALLS
) -> dict[str, int]:
    """Run a way; return how often it made each driver call in `names`.

    Raises:
        AssertionError: The way's results are not `expected` (None: it has no results), or it broke
            a rule that the fake driver checks.
    """
    driver.reset()
    results = way()
    calls = {name: driver.calls(name) for name in names}
    if expected is not None:
        assert all(map(torch.equal, results, expected)), "its results differ"
    assert driver.violations == [], driver.violations
    return calls


def count_driver_calls(options: argparse.Namespace) -> dict[str, Any]:
    """Run all ways but `resident` over the fake driver; return their calls, after checks.

    Raises:
        AssertionError: A way's results are wrong, or the loop by hand or ours waits for the device.
    """
    host = weights(options.layers, options.side)
    x = torch.randn(options.batch, options.side, generator=torch.Generator().manual_seed(2))
    expected = resident(host, x)
    # Twice the room for each weight and result, each with two partly filled blocks.
    pool_bytes = 4 * options.layers * (host[0].nbytes + 2 * MIB)
    with (
        testing.host_as_device() as driver,
        stillframe.Engine(pool_bytes=pool_bytes, block_bytes=MIB) as engine,
        Offloader("cpu", slots=2, engine=engine) as offloader,
        FakeStreams(driver) as streams,
    ):
        pinned = [streams.new_pinned(weight.shape).copy_(weight) for weight in host]
        tickets = [offloader.adopt([weight]) for weight in host]
        device = torch.device("cpu")

        def count_calls(way: Callable[[], Any], expected: Any, *names: str) -> dict[str, int]:
            """Return the counts of `names` (default: CALLS), after a check of the results."""
            return run_counted(driver, way, expected, names or CALLS)

        calls = {
            "copies": count_calls(lambda: copies(pinned, streams), None),
            "pageable": count_calls(
                lambda: plain_by_driver(host, x, streams, pinned=False), expected, *COPIES
            ),
            "pinned": count_calls(
                lambda: plain_by_driver(pinned, x, streams, pinned=True), expected, *COPIES
            ),
            "save_on_cpu": count_calls(
                lambda: saved_by_driver(pinned, x, streams), saved_on_cpu(host, x, device), *COPIES
            ),
            "streams": count_calls(lambda: three_streams(pinned, x, streams), expected),
            "ours": count_calls(lambda: ours(offloader, tickets, x), expected),
        }
        assert calls["streams"]["sync"] == calls["ours"]["sync"] == 0, calls
        stats = dict(offloader.stats())
    # A group is what is moved at once: each weight comes twice, and one result leaves a layer.
    return {"groups": 3 * options.layers, "calls": calls, "stats": stats}
