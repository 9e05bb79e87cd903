"""Weights that come to a device layer by layer and leave again: six ways to move them.

    python benchmarks/offload.py [--layers 24] [--mib 64] [--steps 5] [--device cuda] [--out FILE]

A stack of square layers, whose weights live in host memory, runs forward and then through the same
weights in reverse, as a backward does; in reverse each layer's result, as large as its weights,
leaves for the host. The ways take turns, each from the same state:

    resident    everything stays on the device: what compute alone takes
    pageable    .to(device, non_blocking=True) from ordinary memory, and back
    pinned      the same from memory pinned beforehand
    save_on_cpu torch.autograd.graph.save_on_cpu(pin_memory=True), for what autograd saves
    streams     three streams and events by hand, two buffers, pinned memory
    ours        stillframe.offload.Offloader

On a GPU each has its steps per second, the device memory it needed, and, of ours, what stats()
says: GB/s each way, and the share of the copies that was hidden; and how often its profile shows a
call that waits for the device. Without one there is no time worth telling: the loop by hand and
ours run over the tests' driver (build/libfake_cuda.so), their results are compared bit for bit with
those of plain memory, and the driver's calls are counted: none waits for the device.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FAKE = ROOT / "build" / "libfake_cuda.so"
MIB = 1 << 20

if not os.environ.get("STILLFRAME_LIBCUDA") and "--rehearse" in sys.argv and FAKE.exists():
    os.environ["STILLFRAME_LIBCUDA"] = str(FAKE)

import stillframe  # noqa: E402
import torch  # noqa: E402
from stillframe import testing  # noqa: E402
from stillframe.offload import Offloader  # noqa: E402

Weights = list[torch.Tensor]
Results = list[torch.Tensor]
Way = Callable[[Weights, torch.Tensor, torch.device], Results]


def weights(layers: int, side: int) -> Weights:
    made = torch.Generator().manual_seed(1)
    return [torch.randn(side, side, generator=made) / side**0.5 for _ in range(layers)]


def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ weight)


def reverse(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What leaves: as large as the weight, and made of it."""
    return x.t() @ (x @ weight)


def resident(host: Weights, x: torch.Tensor, device: torch.device) -> Results:
    here = [weight.to(device) for weight in host]
    for weight in here:
        x = forward(x, weight)
    return [reverse(x, weight) for weight in reversed(here)]


def plain(host: Weights, x: torch.Tensor, device: torch.device) -> Results:
    """Pageable or pinned, as `host` is."""
    for weight in host:
        x = forward(x, weight.to(device, non_blocking=True))
    out = []
    for weight in reversed(host):
        left = torch.empty(weight.shape, pin_memory=weight.is_pinned())
        left.copy_(reverse(x, weight.to(device, non_blocking=True)), non_blocking=True)
        out.append(left)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return out


def saved_on_cpu(host: Weights, x: torch.Tensor, device: torch.device) -> Results:
    """Weights come as in `plain`; what autograd saves of them goes to the host and comes back."""
    with torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda"):
        given = [weight.to(device, non_blocking=True).requires_grad_() for weight in host]
        for weight in given:
            x = forward(x, weight)
    x.sum().backward()
    return [weight.grad.cpu() for weight in reversed(given) if weight.grad is not None]


class Streams:
    """What a loop by hand needs of a device: streams, events, copies that nobody waits for."""

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

    def bring(self, to: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)

    def send(self, to: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        self.bring(to, source, stream)
        source.record_stream(stream)

    def host(self, shape: torch.Size) -> torch.Tensor:
        return torch.empty(shape, pin_memory=True)

    def finish(self) -> None:
        torch.cuda.synchronize(self.device)


class FakeStreams(Streams):
    """The same over the tests' driver, whose calling thread is its default stream."""

    def __init__(self, driver: Any) -> None:
        self.device, self.compute = torch.device("cpu"), ctypes.c_void_p(None)
        self.driver, self.call = driver, driver._library
        self.sent: list[torch.Tensor] = []
        self.pinned: list[ctypes.c_void_p] = []
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
        self._check(self.call.cuEventCreate(ctypes.byref(event), 2))  # takes no time
        return event

    def record(self, event: Any, stream: Any) -> None:
        self._check(self.call.cuEventRecord(event, stream))

    def wait(self, stream: Any, event: Any) -> None:
        self._check(self.call.cuStreamWaitEvent(stream, event, 0))

    def bring(self, to: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        self._copy(self.call.cuMemcpyHtoDAsync_v2, to, source, stream)

    def send(self, to: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        self._copy(self.call.cuMemcpyDtoHAsync_v2, to, source, stream)
        self.sent.append(source)

    def host(self, shape: torch.Size) -> torch.Tensor:
        memory, nbytes = ctypes.c_void_p(), 4 * shape.numel()
        self._check(self.call.cuMemHostAlloc(ctypes.byref(memory), ctypes.c_size_t(nbytes), 0))
        self.pinned.append(memory)
        held = (ctypes.c_char * nbytes).from_address(memory.value or 0)
        return torch.frombuffer(held, dtype=torch.float32).view(shape)

    def finish(self) -> None:
        done = self.event()
        self.record(done, self.last)
        while self.call.cuEventQuery(done):
            time.sleep(1e-4)

    def _copy(self, call: Any, to: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        places = [to.data_ptr(), source.data_ptr()]
        places[call is self.call.cuMemcpyDtoHAsync_v2] |= testing._DEVICE
        self._check(call(*map(ctypes.c_uint64, places), ctypes.c_size_t(to.nbytes), stream))
        self.last = stream

    def _check(self, code: int) -> None:
        assert code == 0, f"the driver says {code}"


def three_streams(host: Weights, x: torch.Tensor, streams: Streams) -> Results:
    """As one writes it by hand: a buffer comes while the other is computed with."""
    compute, inward, outward = streams.compute, streams.stream(), streams.stream()
    buffers = [torch.empty_like(host[0], device=streams.device) for _ in range(2)]
    come, used = ([streams.event() for _ in range(2)] for _ in range(2))
    order = [*range(len(host)), *reversed(range(len(host)))]
    out: Results = []

    def bring(turn: int) -> None:
        slot = turn % 2
        streams.wait(inward, used[slot])
        streams.bring(buffers[slot], host[order[turn]], inward)
        streams.record(come[slot], inward)

    for event in used:
        streams.record(event, compute)
    bring(0)
    for turn in range(len(order)):
        if turn + 1 < len(order):
            bring(turn + 1)
        streams.wait(compute, come[turn % 2])
        weight = buffers[turn % 2]
        if turn < len(host):
            x = forward(x, weight)
        else:
            result = reverse(x, weight)
            made = streams.event()
            streams.record(made, compute)
            streams.wait(outward, made)
            out.append(streams.host(result.shape))
            streams.send(out[-1], result, outward)
        streams.record(used[turn % 2], compute)
    streams.finish()
    return out


def ours(offloader: Offloader, tickets: list[Any], x: torch.Tensor) -> Results:
    order = [*tickets, *reversed(tickets)]
    sent = []
    for turn, ticket in enumerate(order):
        (weight,) = offloader.onload(ticket)
        if turn + 1 < len(order):
            offloader.prefetch(order[turn + 1])
        if turn < len(tickets):
            x = forward(x, weight)
        else:
            sent.append(offloader.offload([reverse(x, weight)]))
        offloader.release([weight])
        del weight
    return [each.tensors()[0] for each in sent]


def synchronised(way: Callable[[], Results]) -> dict[str, int]:
    """How often each call that waits for the device stands in the profile of a way. Those by hand
    wait once, at their end, since nothing else tells them of it."""
    with torch.profiler.profile() as profile:
        way()
    return {each.key: each.count for each in profile.key_averages() if "Synchronize" in each.key}


def on_a_gpu(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device)
    host = weights(options.layers, options.side)
    pinned = [weight.pin_memory() for weight in host]
    x = torch.randn(options.batch, options.side, device=device)
    engine = stillframe.Engine(pool_bytes=4 * options.layers * (host[0].nbytes + 16 * MIB))
    offloader = Offloader(device, slots=2, engine=engine)
    tickets = [offloader.adopt([weight]) for weight in host]
    ways: dict[str, Callable[[], Results]] = {
        "resident": lambda: resident(host, x, device),
        "pageable": lambda: plain(host, x, device),
        "pinned": lambda: plain(pinned, x, device),
        "save_on_cpu": lambda: saved_on_cpu(pinned, x, device),
        "streams": lambda: three_streams(pinned, x, Streams(device)),
        "ours": lambda: ours(offloader, tickets, x),
    }
    wanted = [each.cpu() for each in resident(host, x, device)]
    figures: dict[str, Any] = {name: {"seconds": []} for name in ways}
    for step in range(options.steps + 1):
        for name, way in ways.items():
            torch.cuda.reset_peak_memory_stats(device)
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            got = way()
            torch.cuda.synchronize(device)
            took = time.perf_counter() - began
            if step:
                figures[name]["seconds"].append(took)
            figures[name]["peak_device_bytes"] = torch.cuda.max_memory_allocated(device)
            if name != "save_on_cpu":  # whose gradients are others
                assert all(map(torch.equal, (each.cpu() for each in got), wanted)), name
            del got
    for name, way in ways.items():
        figures[name]["synchronised"] = synchronised(way)
    for each in figures.values():
        each["steps_per_s"] = 1 / statistics.median(each["seconds"])
    figures["ours"]["stats"] = dict(offloader.stats())
    offloader.close()
    engine.close()
    return figures


CALLS = (
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuMemHostRegister_v2",
    "sync",
)


def counted(driver: Any, way: Callable[[], Results], wanted: Results) -> dict[str, int]:
    """The calls that a way makes of the driver. None waits for the device, or breaks a rule."""
    driver.reset()
    got = way()
    calls = {name: driver.calls(name) for name in CALLS}
    assert all(map(torch.equal, got, wanted)), "its results differ"
    assert calls["sync"] == 0 and driver.violations == [], (calls, driver.violations)
    return calls


def over_the_fake(options: argparse.Namespace) -> dict[str, Any]:
    """Counts and correctness: on a machine without a GPU."""
    host = weights(options.layers, options.side)
    x = torch.randn(options.batch, options.side, generator=torch.Generator().manual_seed(2))
    wanted = resident(host, x, torch.device("cpu"))
    block = MIB
    room = 4 * options.layers * (host[0].nbytes + 2 * block)
    with (
        testing.host_as_device() as driver,
        stillframe.Engine(pool_bytes=room, block_bytes=block) as engine,
        Offloader("cpu", slots=2, engine=engine) as offloader,
        FakeStreams(driver) as streams,
    ):
        pinned = [streams.host(weight.shape).copy_(weight) for weight in host]
        tickets = [offloader.adopt([weight]) for weight in host]
        ways = {
            "streams": lambda: three_streams(pinned, x, streams),
            "ours": lambda: ours(offloader, tickets, x),
        }
        calls = {name: counted(driver, way, wanted) for name, way in ways.items()}
        stats = dict(offloader.stats())
    return {"groups": 3 * options.layers, "calls": calls, "stats": stats}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--mib", type=float, default=64.0, help="of one layer's weights")
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rehearse", action="store_true", help="small, and without a GPU")
    options = parser.parse_args()
    gpu = torch.cuda.is_available() and not options.rehearse
    if not gpu:
        options.layers, options.mib, options.batch = min(options.layers, 8), 0.25, 16
    options.side = int((options.mib * MIB / 4) ** 0.5)
    figures = on_a_gpu(options) if gpu else over_the_fake(options)
    text = json.dumps(figures, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
