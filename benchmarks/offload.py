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
says: GB/s each way, and the share of the copies that was hidden. Without one there is no time worth
telling: ours runs over the tests' driver (build/libfake_cuda.so), its results are compared bit for
bit with those of plain memory, and the driver's calls are counted: none waits for the device.
"""

from __future__ import annotations

import argparse
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


def three_streams(host: Weights, x: torch.Tensor, device: torch.device) -> Results:
    """As one writes it by hand: a buffer comes while the other is computed with."""
    compute = torch.cuda.current_stream(device)
    inward, outward = torch.cuda.Stream(device), torch.cuda.Stream(device)
    buffers = [torch.empty_like(host[0], device=device) for _ in range(2)]
    come = [torch.cuda.Event() for _ in range(2)]
    used = [torch.cuda.Event() for _ in range(2)]
    order = [*range(len(host)), *reversed(range(len(host)))]
    out: Results = []
    leaving: list[torch.Tensor] = []

    def bring(turn: int) -> None:
        slot = turn % 2
        inward.wait_event(used[slot])
        with torch.cuda.stream(inward):
            buffers[slot].copy_(host[order[turn]], non_blocking=True)
            come[slot].record(inward)

    for event in used:
        event.record(compute)
    bring(0)
    for turn in range(len(order)):
        if turn + 1 < len(order):
            bring(turn + 1)
        compute.wait_event(come[turn % 2])
        weight = buffers[turn % 2]
        if turn < len(host):
            x = forward(x, weight)
        else:
            result = reverse(x, weight)
            made = torch.cuda.Event()
            made.record(compute)
            outward.wait_event(made)
            left = torch.empty(result.shape, pin_memory=True)
            with torch.cuda.stream(outward):
                left.copy_(result, non_blocking=True)
            result.record_stream(outward)
            leaving.append(result)
            out.append(left)
        used[turn % 2].record(compute)
    torch.cuda.synchronize(device)
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
        "streams": lambda: three_streams(pinned, x, device),
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
    for each in figures.values():
        each["steps_per_s"] = 1 / statistics.median(each["seconds"])
    figures["ours"]["stats"] = dict(offloader.stats())
    offloader.close()
    engine.close()
    return figures


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
    ):
        tickets = [offloader.adopt([weight]) for weight in host]
        driver.reset()
        got = ours(offloader, tickets, x)
        assert all(map(torch.equal, got, wanted)), "ours differs"
        calls = {
            name: driver.calls(name)
            for name in (
                "cuMemcpyHtoDAsync_v2",
                "cuMemcpyDtoHAsync_v2",
                "cuEventRecord",
                "cuStreamWaitEvent",
                "cuMemHostRegister_v2",
                "sync",
            )
        }
        stats = dict(offloader.stats())
        broken = driver.violations
    assert calls["sync"] == 0 and broken == [], (calls, broken)
    return {"groups": 3 * options.layers, "calls": calls, "stats": stats, "violations": broken}


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
