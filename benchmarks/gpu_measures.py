"""The measures of `gpu.py`, which runs each of them in a process of its own."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import Series
from gpu_state import Train
from gpu_ways import OURS, WAYS, ItemTimer
from limits import RawDisk
from machine import reset_peak_rss, status_bytes

ROOT = Path(__file__).parents[1]
MIB = 1 << 20
# bytes written to measure the disk's own speed; more would take too long on a slow disk
RAW_BYTES = 2 << 30


@contextlib.contextmanager
def _device(options: argparse.Namespace) -> Iterator[str]:
    """Yield the device of the training: "cuda", or "cpu" over the fake driver in a rehearsal."""
    if not options.rehearse:
        yield "cuda"
        return
    from stillframe import testing

    with testing.host_as_device():
        yield "cpu"


def _training(options: argparse.Namespace, size: str, device: str) -> Train:
    """Return a training whose state may be deferred; in a rehearsal it is tiny."""
    train = Train("rehearsal" if options.rehearse else size, device)
    # after these steps the optimizer's state exists, and is known to change only in steps
    for _ in range(5):
        train.step()
    train.synchronize()
    return train


def _pool_bytes(nbytes: int) -> int:
    """Return how large a pool is for a state of `nbytes`, with room for partly filled blocks."""
    return nbytes + nbytes // 8 + 64 * MIB


def plain_copy(train: Train) -> float:
    """Return the seconds to copy as many bytes as the state has into pinned memory, best of three.

    It copies one large device tensor into one large pinned tensor, at most 512 MiB at a time. No
    way to save can copy faster.
    """
    torch, nbytes = train.torch, train.nbytes()
    length = min(nbytes, 512 * MIB)
    nr_copies = max(nbytes // length, 1)
    is_cuda = train.device == "cuda"
    source = torch.empty(length, dtype=torch.uint8, device=train.device)
    target = torch.empty(length, dtype=torch.uint8, pin_memory=is_cuda)
    best = float("inf")
    for _ in range(3):
        train.synchronize()
        start = time.perf_counter()
        for _ in range(nr_copies):
            target.copy_(source, non_blocking=True)
        train.synchronize()
        best = min(best, time.perf_counter() - start)
    # Whole multiples of `length` were copied, so the time is scaled to `nbytes`.
    return best * nbytes / (nr_copies * length)


def peak_without_save(train: Train, steps: int) -> tuple[int, int]:
    """Return the peak of device memory (allocated, reserved bytes) in steps with no save.

    It includes the activations, which come and go in each step.
    """
    train.synchronize()
    train.reset_memory()
    train.timed_steps(steps)
    return train.memory()


def one_round(
    train: Train, way: Any, path: Path, steps: int, without_save: tuple[int, int]
) -> dict[str, Any]:
    """Measure one save, `steps` steps of training after it, and its end.

    The device memory of a save is the larger of two figures: the peak in the call less what was
    allocated before it, and the peak in the steps after the call less that of steps with no save.

    Args:
        without_save: The result of `peak_without_save`.
    """
    train.synchronize()
    at_rest = train.reset_memory()
    reset_peak_rss()
    rss = status_bytes("VmRSS")
    tree = train.tree()
    began = time.perf_counter()
    way.start(tree, path)
    returned = time.perf_counter()
    in_call = train.memory()
    train.reset_memory()
    # In the first step after the call, a way that still copies has to wait before the update.
    first = train.mark()
    train.forward_backward()
    gate_began = time.perf_counter()
    way.gate()
    gate_s = time.perf_counter() - gate_began
    train.optimizer.step()
    train.optimizer.zero_grad(set_to_none=False)
    second = train.mark()
    times = train.timed_steps(steps)
    times.insert(0, train.seconds_between(first, second))
    in_steps = train.memory()
    own_figures = way.finish()  # {} for most ways
    ended = time.perf_counter()
    del tree

    def memory_of_save(index: int) -> int:
        """Return the device memory that the save took; index 0: allocated, 1: reserved."""
        during_call = in_call[index] - at_rest[index]
        during_steps = in_steps[index] - max(without_save[index], at_rest[index])
        return max(during_call, during_steps, 0)

    return {
        "call_s": returned - began,
        "gate_s": gate_s + own_figures.get("gate_wait_s", 0.0),
        "end_s": own_figures.get("durable_after_s", ended - began),
        "step_s": times,
        "allocated": memory_of_save(0),
        "reserved": memory_of_save(1),
        "rss": max(status_bytes("VmHWM") - rss, 0),
        "report": own_figures,
    }


def measure_way(options: argparse.Namespace, size: str, name: str, directory: Path) -> Any:
    """Measure the way `name` with a state of `size`; return its figures."""
    with _device(options) as device:
        train = _training(options, size, device)
        nbytes = train.nbytes()
        timer = ItemTimer(train.torch, device)
        if name == OURS:
            import stillframe

            stillframe.configure(pool_bytes=_pool_bytes(nbytes))
            stillframe.default_engine().warm_up(nbytes)
        way = WAYS[name]()
        path = directory / "state"
        # Steps by themselves, and their memory, are measured before the first save.
        base = train.timed_steps(options.steps)
        without_save = peak_without_save(train, options.steps)
        idle_item = timer.times(options.item_s)
        rounds = []
        start = time.perf_counter()
        for _ in range(options.rounds + 1):  # the first one is counted separately
            rounds.append(one_round(train, way, path, options.steps, without_save))
            if time.perf_counter() - start > options.cap_s:
                break
        # One more save, whose copy no step waits for: how long does it delay `.item()`?
        way.start(train.tree(), path)
        item = timer.times(options.item_s)
        way.gate()
        way.finish()
        copy_s = plain_copy(train)
        raw_s = None
        if name == OURS:
            raw_bytes = min(nbytes, RAW_BYTES)
            raw_s = RawDisk(directory, raw_bytes).direct() * nbytes / raw_bytes
        result = {
            "nbytes": nbytes,
            "base_step_s": base,
            "first": rounds[0],
            "rounds": rounds[1:] or rounds,  # the time may have sufficed for one only
            "item_idle_s": idle_item,
            "item_s": item,
            "plain_copy_s": copy_s,
            "raw_disk_s": raw_s,
            "durable": way.durable,
        }
        way.close()
        return result


def measure_sweep(options: argparse.Namespace, size: str, directory: Path) -> Any:
    """Measure saves with portions of 1, 4 and 16 MiB, and with 2, 4 and 8 of them in flight.

    No step waits for these saves.

    Returns:
        For each pair the bytes per second of the copy, and the times of `.item()` meanwhile.
    """
    import stillframe
    from stillframe import _core

    with _device(options) as device:
        train = _training(options, size, device)
        timer, nbytes, found = ItemTimer(train.torch, device), train.nbytes(), []
        engine = stillframe.Engine(pool_bytes=_pool_bytes(nbytes))
        engine.warm_up(nbytes)
        idle = Series.of(timer.times(options.item_s))
        copy_s = plain_copy(train)
        for portion in (1, 4, 16):
            for in_flight in (2, 4, 8):
                _core.cuda_tune(portion * MIB, in_flight)
                speeds, items = [], []
                for _ in range(2):
                    handle = stillframe.async_save(train.tree(), directory / "sweep", engine=engine)
                    # Until everything is copied, for at most 20 seconds.
                    items += timer.times(
                        20.0, until=lambda h=handle: h.state != "staging" or h.done()
                    )
                    report = handle.result()
                    speeds.append(nbytes / report.staged_after_s)
                    train.step()
                found.append(
                    {
                        "portion_mib": portion,
                        "in_flight": in_flight,
                        "bytes_per_s": max(speeds),
                        "item_s": items or [float("nan")],  # no call fell into the copies
                    }
                )
        engine.close()
        return {
            "nbytes": nbytes,
            "idle_item_s": idle.to_json(),
            "plain_copy_s": copy_s,
            "points": found,
        }


def measure_pinning(options: argparse.Namespace, size: str, directory: Path) -> Any:
    """Measure how long pinning takes: in `warm_up`, in torch, and within a first save.

    All pin as many bytes as the state has.
    """
    import stillframe

    with _device(options) as device:
        train = _training(options, size, device)
        nbytes = train.nbytes()
        with stillframe.Engine(pool_bytes=_pool_bytes(nbytes)) as engine:
            start = time.perf_counter()
            report = stillframe.async_save(train.tree(), directory / "cold", engine=engine)
            cold_call_s = time.perf_counter() - start
            train.step()
            cold = report.result()
        with stillframe.Engine(pool_bytes=_pool_bytes(nbytes)) as engine:
            start = time.perf_counter()
            engine.warm_up(nbytes)
            warm_s = time.perf_counter() - start
            driver = engine.stats()["driver"]
        start = time.perf_counter()
        train.torch.empty(nbytes, dtype=train.torch.uint8, pin_memory=device == "cuda")
        return {
            "nbytes": nbytes,
            "warm_up_s": warm_s,
            "torch_pin_s": time.perf_counter() - start,
            "cold_call_s": cold_call_s,
            "cold_gate_s": cold.gate_wait_s,
            "cold_durable_s": cold.durable_after_s,
            "fallbacks": list(cold.fallbacks),
            "driver": driver,
        }


def measure_ahead(options: argparse.Namespace, size: str, directory: Path) -> Any:
    """Measure steps whose host does not wait for the device, without saves and with saves.

    A save is made every ten steps.

    Returns:
        For both series: the device's mean time of a step and the host's times of each; for the
        saves also the time of each call and gate, and the share of the bytes that was deferred.
    """
    import stillframe

    with _device(options) as device:
        train = _training(options, size, device)
        nbytes = train.nbytes()
        count = 10 if options.rehearse else 40
        engine = stillframe.Engine(pool_bytes=2 * nbytes + 64 * MIB)
        engine.warm_up(2 * nbytes)

        def steps(every: int) -> dict[str, Any]:
            """Make `count` steps; a save precedes the last of each `every` steps (0: no saves)."""
            train.synchronize()
            handles, calls, host = [], [], []
            first = train.mark()
            for number in range(count):
                at = time.perf_counter()
                if every and number % every == every - 1:
                    path = directory / f"ahead{len(handles) % 2}"
                    handles.append(stillframe.async_save(train.tree(), path, engine=engine))
                    calls.append(time.perf_counter() - at)
                train.step()
                host.append(time.perf_counter() - at)
            last = train.mark()
            reports = [handle.result() for handle in handles]
            train.synchronize()
            return {
                "device_s": train.seconds_between(first, last) / count,
                "host_s": host,
                "call_s": calls,
                "gate_s": [report.gate_wait_s for report in reports],
                "deferred": [report.deferred_nbytes / nbytes for report in reports],
            }

        alone = steps(0)
        saving = steps(10 if not options.rehearse else 5)
        engine.close()
        return {"nbytes": nbytes, "alone": alone, "saving": saving}


SYNCHRONISES = "Synchronize"  # in the names of calls that wait for the device


def measure_profile(options: argparse.Namespace, size: str, directory: Path) -> Any:
    """Profile one save with torch.profiler; return what `read_profile` finds.

    The profiler's trace and stillframe's own timeline are left in build/.
    """
    import stillframe
    from torch.profiler import ProfilerActivity, profile

    with _device(options) as device:
        train = _training(options, size, device)
        nbytes = train.nbytes()
        engine = stillframe.Engine(pool_bytes=_pool_bytes(nbytes))
        engine.warm_up(nbytes)
        stillframe.save(train.tree(), directory / "profile", engine=engine)
        kinds = [ProfilerActivity.CPU]
        if device == "cuda":
            kinds.append(ProfilerActivity.CUDA)
        build = ROOT / "build"
        build.mkdir(exist_ok=True)
        with profile(activities=kinds) as profiler, stillframe.trace(build / "gpu_timeline.json"):
            train.step()
            handle = stillframe.async_save(train.tree(), directory / "profile", engine=engine)
            for _ in range(6):
                train.step()
            handle.result()
        profiler.export_chrome_trace(str(build / "gpu_profile.json"))
        engine.close()
        events = json.loads((build / "gpu_profile.json").read_text())["traceEvents"]
        return {"nbytes": nbytes, **read_profile(events)}


def read_profile(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a profile says about the copies from the device to the host.

    The profiler itself synchronises when it begins and ends, so calls before the first kernel and
    after the last are not counted.

    Returns:
        The number of copies, their time in microseconds, the share of that time in which a kernel
        ran (None without copies), and the names of the calls that waited for the device.
    """
    kernels, copies = [], []  # (begin, end) of each
    for event in events:
        if "dur" not in event:
            continue  # an event without an end
        kind, span = event.get("cat"), (event["ts"], event["ts"] + event["dur"])
        if kind == "kernel":
            kernels.append(span)
        elif kind == "gpu_memcpy" and "DtoH" in event.get("name", ""):
            copies.append(span)
    kernels.sort()
    first, last = (kernels[0][0], kernels[-1][1]) if kernels else (0.0, 0.0)
    waits = []
    for event in events:
        is_call = event.get("cat") in ("cuda_runtime", "cuda_driver")
        if is_call and SYNCHRONISES in event.get("name", "") and first <= event["ts"] <= last:
            waits.append(event["name"])
    covered = total = 0.0
    for begin, end in copies:
        total += end - begin
        at = begin  # time before `at` is counted already; kernels may overlap each other
        for kernel_begin, kernel_end in kernels:
            if kernel_end <= at or kernel_begin >= end:
                continue  # not during the rest of this copy
            covered += min(end, kernel_end) - max(at, kernel_begin)
            at = min(end, kernel_end)
    return {
        "nr_copies": len(copies),
        "copy_us": total,
        "under_kernels": covered / total if total else None,
        "synchronises": waits,
    }


MEASURES: dict[str, Callable[..., Any]] = {
    "saves": measure_way,
    "sweep": measure_sweep,
    "pinning": measure_pinning,
    "profile": measure_profile,
    "ahead": measure_ahead,
}


def measure(part: str, *arguments: Any) -> Any:
    """Return the result of one part; the parent calls it in a process of its own."""
    return MEASURES[part](*arguments)
