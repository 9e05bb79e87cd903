"""How fast do weights come to a device layer by layer and leave again? Six ways, and goals.

    python benchmarks/offload.py [--layers 24] [--mib 64] [--steps 5] [--device cuda] [--out FILE]

A stack of square layers, whose weights are in host memory, runs forward and then through the same
weights in reverse, as a backward does. On the way back each layer computes a result as large as its
weights, which is copied to the host. The ways take turns, each from the same state:

    resident    everything is on the device: the time of compute alone
    copies      the copies alone: pinned memory, a stream each way, both at once
    pageable    .to(device, non_blocking=True) from ordinary memory, and back
    pinned      the same from memory pinned beforehand
    save_on_cpu torch.autograd.graph.save_on_cpu(pin_memory=True) moves the tensors autograd keeps
    streams     three streams and events by hand, two buffers, pinned memory
    ours        stillframe.offload.Offloader

On a GPU each way gets its steps per second, the device memory that it needed, and the number of
calls in its profile that wait for the device. For ours, stats() adds GB/s in both directions and
the share of the copies' time that computation hid. Then these goals are judged:

    at least 90 % of the copies hidden, if compute takes at least as long as the copies
    at least 95 % of the speed of the copies alone, each way
    a step of at most 1.05 times the longer of compute and copies
    no call that waits

Without a GPU times mean nothing. The ways then run over the tests' fake driver
(build/libfake_cuda.so), and their results must equal those computed in plain memory bit for bit.
The driver's calls are counted, and the script fails if the loop by hand or ours waits for the
device. No goal is measured then.
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

# The library is chosen before the imports below, which load it.
if "--rehearse" in sys.argv and FAKE.exists() and not os.environ.get("STILLFRAME_LIBCUDA"):
    os.environ["STILLFRAME_LIBCUDA"] = str(FAKE)

import stillframe  # noqa: E402
import torch  # noqa: E402
from offload_fake import count_driver_calls  # noqa: E402
from offload_ways import (  # noqa: E402
    Results,
    Streams,
    Weights,
    ours,
    plain,
    resident,
    saved_on_cpu,
    three_streams,
    weights,
)
from stillframe.offload import Offloader  # noqa: E402


def count_waiting_calls(way: Callable[[], Results], of_profiler: dict[str, int]) -> dict[str, int]:
    """Profile a way; return how often it makes each call that waits for the device.

    The loops by hand wait once, at their end, because only then are their copies complete.

    Args:
        of_profiler: The number of such calls that the profiler itself makes; they are subtracted.
    """
    with torch.profiler.profile() as profile:
        way()
    found = {}
    for call in profile.key_averages():
        count = call.count - of_profiler.get(call.key, 0)
        if "Synchronize" in call.key and count > 0:
            found[call.key] = count
    return found


def copy_speeds(pinned: Weights, device: torch.device) -> dict[str, float]:
    """Return the seconds of a step's copies without compute, and the GB/s in each direction.

    Both directions run at the same time.
    """
    directions = []
    for direction, per_layer in (
        ("in", 2),
        ("out", 1),
    ):  # each weight comes twice, one result leaves
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        nr_copies = per_layer * len(pinned)
        directions.append((direction, nr_copies, begin, end, torch.cuda.Stream(device)))
    buffer, result = (torch.empty_like(pinned[0], device=device) for _ in range(2))
    on_host = torch.empty_like(pinned[0], pin_memory=True)
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    for direction, nr_copies, begin, end, stream in directions:
        to, source = (buffer, pinned[0]) if direction == "in" else (on_host, result)
        with torch.cuda.stream(stream):
            begin.record()
            for _ in range(nr_copies):
                to.copy_(source, non_blocking=True)
            end.record()
    torch.cuda.synchronize(device)
    figures = {"seconds": time.perf_counter() - began}
    for direction, nr_copies, begin, end, _ in directions:
        nbytes = nr_copies * pinned[0].nbytes
        figures[f"{direction}_gb_per_s"] = nbytes / begin.elapsed_time(end) / 1e6  # from bytes/ms
    return figures


def goals(figures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return each goal by its name: what was found, the bound, and whether the goal is met.

    None stands for a figure that was not measured.
    """
    bounds: dict[str, tuple[float, bool]] = {  # name -> (bound, whether it is a lower one)
        "share hidden": (0.90, True),
        "speed inward, of the copies alone": (0.95, True),
        "speed outward, of the copies alone": (0.95, True),
        "step, of the longer of compute and copies": (1.05, False),
        "calls that wait for the device": (0, False),
    }
    found: dict[str, float | None] = dict.fromkeys(bounds)
    if "seconds" in figures.get("resident", {}):
        compute, step = (statistics.median(figures[way]["seconds"]) for way in ("resident", "ours"))
        alone, stats = figures["copies"], figures["ours"]["stats"]
        can_hide_all = compute >= alone["seconds"]
        hidden = stats["share_hidden"] if can_hide_all else None
        values = (  # in the order of `bounds`
            hidden,
            stats["onload_gb_per_s"] / alone["in_gb_per_s"],
            stats["offload_gb_per_s"] / alone["out_gb_per_s"],
            step / max(compute, alone["seconds"]),
            sum(figures["ours"]["synchronised"].values()),
        )
        found = dict(zip(bounds, values, strict=True))
    judged: dict[str, dict[str, Any]] = {}
    for name, (bound, is_lower) in bounds.items():
        value, met = found[name], None
        if value is not None:
            met = value >= bound if is_lower else value <= bound
        judged[name] = {"found": value, "at least" if is_lower else "at most": bound, "met": met}
    return judged


def are_equal(results: Results, expected: Results) -> bool:
    """Return whether the results, on any device, equal the expected ones, on the CPU."""
    return all(map(torch.equal, (result.cpu() for result in results), expected))


def measure_on_gpu(options: argparse.Namespace) -> dict[str, Any]:
    """Run all ways on the device; return their figures, after a check of their results.

    The first step of each way warms up and is not counted.
    """
    device = torch.device(options.device)
    host = weights(options.layers, options.side)
    pinned = [weight.pin_memory() for weight in host]
    on_device = [weight.to(device) for weight in host]
    x = torch.randn(options.batch, options.side, device=device)
    # Twice the room for each weight and result, each with a partly filled block of 16 MiB.
    engine = stillframe.Engine(pool_bytes=4 * options.layers * (host[0].nbytes + 16 * MIB))
    offloader = Offloader(device, slots=2, engine=engine)
    tickets = [offloader.adopt([weight]) for weight in host]
    ways: dict[str, Callable[[], Results]] = {
        "resident": lambda: resident(on_device, x),
        "pageable": lambda: plain(host, x, device),
        "pinned": lambda: plain(pinned, x, device),
        "save_on_cpu": lambda: saved_on_cpu(pinned, x, device),
        "streams": lambda: three_streams(pinned, x, Streams(device)),
        "ours": lambda: ours(offloader, tickets, x),
    }
    expected = [each.cpu() for each in resident(on_device, x)]
    figures: dict[str, Any] = {name: {"seconds": []} for name in ways}
    before = offloader.stats()
    copies_alone = []  # of each step: seconds and speeds of its copies without compute
    for step in range(options.steps + 1):
        for name, way in ways.items():
            torch.cuda.reset_peak_memory_stats(device)
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            results = way()
            torch.cuda.synchronize(device)
            took = time.perf_counter() - began
            if step > 0:  # step 0 warms up
                figures[name]["seconds"].append(took)
            peak = torch.cuda.max_memory_allocated(device)
            if name != "resident":  # its weights are on the device all the time
                peak -= sum(weight.nbytes for weight in on_device)
            figures[name]["peak_device_bytes"] = peak
            if name != "save_on_cpu":  # its results are gradients
                assert are_equal(results, expected), name
            del results
        copies_alone.append(copy_speeds(pinned, device))
        if step == 0:
            before = offloader.stats()
    figures["ours"]["stats"] = stats_between(before, offloader.stats())
    of_profiler = count_waiting_calls(list, {})  # `list` is a way that does nothing
    for name, way in ways.items():
        figures[name]["synchronised"] = count_waiting_calls(way, of_profiler)
        figures[name]["steps_per_s"] = 1 / statistics.median(figures[name]["seconds"])
    figures["copies"] = {
        name: statistics.median(each[name] for each in copies_alone[1:]) for name in copies_alone[0]
    }
    offloader.close()
    engine.close()
    return figures


def stats_between(before: Any, after: Any) -> dict[str, Any]:
    """Return the counters of stats() for the steps between two calls of it.

    Values that are no counters, such as the number of slots, are taken from the second call.
    """
    not_counters = {"slots", "slots_in_use", "bytes_lingering"}
    stats = dict(after)
    for name in stats.keys() - not_counters:
        stats[name] -= before[name]
    for way in ("offload", "onload"):
        seconds = stats[f"{way}_copy_s"]
        stats[f"{way}_gb_per_s"] = stats[f"bytes_{way}ed"] / seconds / 1e9 if seconds else 0.0
    waited, copied = stats["stream_waited_s"], stats["onload_copy_s"]
    stats["share_hidden"] = max(0.0, 1 - waited / copied) if copied else 0.0
    return stats


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--mib", type=float, default=64.0, help="MiB of one layer's weights")
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rehearse", action="store_true", help="small, and without a GPU")
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available() and not options.rehearse
    if not has_gpu:
        options.layers, options.mib, options.batch = min(options.layers, 8), 0.25, 16
    options.side = int((options.mib * MIB / 4) ** 0.5)
    figures = measure_on_gpu(options) if has_gpu else count_driver_calls(options)
    figures["goals"] = goals(figures)
    text = json.dumps(figures, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
