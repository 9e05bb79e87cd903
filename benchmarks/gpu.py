"""What saving from a GPU costs, beside its peers, in one run: `make gpu`, or parts of it by hand.

    saves      every way: call, GPU memory, steps meanwhile, `.item()` of others, time to the end
    sweep      size of the pieces x pieces in flight: copy speed and `.item()` of others
    pinning    how fast memory is pinned, and a first save with nothing warmed up
    profile    torch.profiler over one save: copies under compute, no synchronise (a Perfetto file)
    ahead      a training whose host runs ahead of the device: steps with saves beside steps without

Each measured way runs in a process of its own; ours and a plain pinned copy of the same bytes stand
in every table, so that figures compare within one run. One JSON, one table. Without a GPU it says
so and ends well. `--rehearse` runs everything with a tiny state on the CPU over the tests' driver:
it shows that the script works, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import queue
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import Series, format_seconds, format_size, print_table, write_json
from gpu_state import Train
from gpu_ways import OURS, WAYS, Probe
from limits import RawDisk
from machine import machine_facts, reset_peak_rss, status_bytes

ROOT = Path(__file__).parents[1]
PARTS = ("saves", "sweep", "pinning", "profile", "ahead")
WAY_TIMEOUT_S = 150  # a way that takes longer is ended, and the table says so
MIB = 1 << 20
RAW_BYTES = 2 << 30  # of the disk's own speed; a slow one takes long enough for that


# ---- in a process of its own -----------------------------------------------------------------


@contextlib.contextmanager
def _device(options: argparse.Namespace) -> Iterator[str]:
    if not options.rehearse:
        yield "cuda"
        return
    from stillframe import testing

    with testing.host_as_device():
        yield "cpu"


def _training(options: argparse.Namespace, size: str, device: str) -> Train:
    train = Train("rehearsal" if options.rehearse else size, device)
    for _ in range(5):  # the optimizer's state exists, and is known to change only in steps
        train.step()
    train.synchronize()
    return train


def plain_copy(train: Train) -> float:
    """Seconds to copy the state's bytes into pinned memory, best of three, in one piece at a time.

    The upper bound for every way: one large source, one large pinned target, nothing else.
    """
    torch, nbytes = train.torch, train.nbytes()
    piece = min(nbytes, 512 * MIB)
    cuda = train.device == "cuda"
    source = torch.empty(piece, dtype=torch.uint8, device=train.device)
    target = torch.empty(piece, dtype=torch.uint8, pin_memory=cuda)
    best = float("inf")
    for _ in range(3):
        train.synchronize()
        start = time.perf_counter()
        for _ in range(max(nbytes // piece, 1)):
            target.copy_(source, non_blocking=True)
        train.synchronize()
        best = min(best, time.perf_counter() - start)
    return best * nbytes / (max(nbytes // piece, 1) * piece)


def one_round(train: Train, way: Any, path: Path, steps: int) -> dict[str, Any]:
    """One save, `steps` steps of training behind it, and its end."""
    train.synchronize()
    allocated, reserved = train.reset_memory()
    reset_peak_rss()
    rss = status_bytes("VmRSS")
    tree = train.tree()
    began = time.perf_counter()
    way.start(tree, path)
    called = time.perf_counter()
    # The first step behind the save: its optimizer is where who still copies has to wait.
    first = train.mark()
    train.forward_backward()
    at = time.perf_counter()
    way.gate()
    gated = time.perf_counter() - at
    train.optimizer.step()
    train.optimizer.zero_grad(set_to_none=False)
    second = train.mark()
    times = train.timed_steps(steps)
    times.insert(0, train.between(first, second))
    peak_allocated, peak_reserved = train.memory()
    more = way.finish()
    ended = time.perf_counter()
    del tree
    return {
        "call_s": called - began,
        "gate_s": gated + more.get("gate_wait_s", 0.0),
        "end_s": more.get("durable_after_s", ended - began),
        "step_s": times,
        "allocated": max(peak_allocated - allocated, 0),
        "reserved": max(peak_reserved - reserved, 0),
        "rss": max(status_bytes("VmHWM") - rss, 0),
        "report": more,
    }


def measure_way(options: argparse.Namespace, size: str, name: str, directory: Path) -> Any:
    """Figures of one way for one state."""
    with _device(options) as device:
        train = _training(options, size, device)
        nbytes = train.nbytes()
        probe = Probe(train.torch, device)
        if name == OURS:
            import stillframe

            stillframe.configure(pool_bytes=nbytes + nbytes // 8 + 64 * MIB)
            stillframe.default_engine().warm_up(nbytes)
        way = WAYS[name]()
        path = directory / "state"
        # What steps are by themselves, and what memory they take, is known before the first save.
        base = train.timed_steps(options.steps)
        idle_item = probe.for_a_while(options.probe_s)
        rounds = []
        start = time.perf_counter()
        for _ in range(options.rounds + 1):  # the first is apart
            rounds.append(one_round(train, way, path, options.steps))
            if time.perf_counter() - start > options.cap_s:
                break
        # `.item()` on another stream while bytes are copied and no step hurries them.
        way.start(train.tree(), path)
        item = probe.for_a_while(options.probe_s)
        way.gate()
        way.finish()
        copy_s = plain_copy(train)
        raw_bytes = min(nbytes, RAW_BYTES)
        raw_s = (
            RawDisk(directory, raw_bytes).direct() * nbytes / raw_bytes if name == OURS else None
        )
        result = {
            "nbytes": nbytes,
            "base_step_s": base,
            "first": rounds[0],
            "rounds": rounds[1:] or rounds,
            "item_idle_s": idle_item,
            "item_s": item,
            "plain_copy_s": copy_s,
            "raw_disk_s": raw_s,
            "durable": way.durable,
        }
        way.close()
        return result


def measure_sweep(options: argparse.Namespace, size: str, directory: Path) -> Any:
    """Pieces x pieces in flight: GB/s of a save that nobody hurries, and `.item()` meanwhile."""
    import stillframe
    from stillframe import _core

    with _device(options) as device:
        train = _training(options, size, device)
        probe, nbytes, found = Probe(train.torch, device), train.nbytes(), []
        engine = stillframe.Engine(pool_bytes=nbytes + nbytes // 8 + 64 * MIB)
        engine.warm_up(nbytes)
        idle = Series.of(probe.for_a_while(options.probe_s))
        copy_s = plain_copy(train)
        for piece in (1, 4, 16):
            for in_flight in (2, 4, 8):
                _core.cuda_tune(piece * MIB, in_flight)
                speeds, items = [], []
                for _ in range(2):
                    handle = stillframe.async_save(train.tree(), directory / "sweep", engine=engine)
                    items += probe.for_a_while(
                        20.0, until=lambda h=handle: h.state != "staging" or h.done()
                    )
                    report = handle.result()
                    speeds.append(nbytes / report.staged_after_s)
                    train.step()
                found.append(
                    {
                        "piece_mib": piece,
                        "in_flight": in_flight,
                        "bytes_per_s": max(speeds),
                        "item_s": items or [float("nan")],
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
    """Seconds of warm_up, of torch's own pinned memory of that size, and a cold first save."""
    import stillframe

    with _device(options) as device:
        train = _training(options, size, device)
        nbytes = train.nbytes()
        with stillframe.Engine(pool_bytes=nbytes + nbytes // 8 + 64 * MIB) as engine:
            start = time.perf_counter()
            report = stillframe.async_save(train.tree(), directory / "cold", engine=engine)
            called = time.perf_counter() - start
            train.step()
            cold = report.result()
        with stillframe.Engine(pool_bytes=nbytes + nbytes // 8 + 64 * MIB) as engine:
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
            "cold_call_s": called,
            "cold_gate_s": cold.gate_wait_s,
            "cold_durable_s": cold.durable_after_s,
            "fallbacks": list(cold.fallbacks),
            "driver": driver,
        }


def measure_ahead(options: argparse.Namespace, size: str, directory: Path) -> Any:
    """Steps that nobody waits for, without saves and with one every ten: the device's time of each
    and the host's, the calls of the saves, and the share of bytes that was deferred."""
    import stillframe

    with _device(options) as device:
        train = _training(options, size, device)
        nbytes = train.nbytes()
        count = 10 if options.rehearse else 40
        engine = stillframe.Engine(pool_bytes=2 * nbytes + 64 * MIB)
        engine.warm_up(2 * nbytes)

        def steps(every: int) -> dict[str, Any]:
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
                "device_s": train.between(first, last) / count,
                "host_s": host,
                "call_s": calls,
                "gate_s": [report.gate_wait_s for report in reports],
                "deferred": [report.deferred_nbytes / nbytes for report in reports],
            }

        alone, saving = steps(0), steps(10 if not options.rehearse else 5)
        engine.close()
        return {"nbytes": nbytes, "alone": alone, "saving": saving}


SYNCHRONISES = ("Synchronize",)


def measure_profile(options: argparse.Namespace, size: str, directory: Path) -> Any:
    """One save under torch.profiler: what it called, and how much of the copies ran under compute.

    Kineto's trace and our own timeline are left in build/.
    """
    import stillframe
    from torch.profiler import ProfilerActivity, profile

    with _device(options) as device:
        train = _training(options, size, device)
        nbytes = train.nbytes()
        engine = stillframe.Engine(pool_bytes=nbytes + nbytes // 8 + 64 * MIB)
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
    """Copies to pinned memory, the share of their time under kernels, and waits for the device.

    The profiler itself synchronises when it begins and ends: what stands outside the first and last
    kernel is its own.
    """
    kernels = sorted(
        (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "kernel" and "dur" in e
    )
    copies = [
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("cat") == "gpu_memcpy" and "DtoH" in e.get("name", "") and "dur" in e
    ]
    first, last = (kernels[0][0], kernels[-1][1]) if kernels else (0.0, 0.0)
    waits = [
        e["name"]
        for e in events
        if any(word in e.get("name", "") for word in SYNCHRONISES)
        and e.get("cat") in ("cuda_runtime", "cuda_driver")
        and first <= e["ts"] <= last
    ]
    covered = total = 0.0
    for begin, end in copies:
        total += end - begin
        at = begin
        for kernel_begin, kernel_end in kernels:
            if kernel_end <= at or kernel_begin >= end:
                continue
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


def _run(answers: Any, part: str, arguments: tuple[Any, ...]) -> None:
    try:
        answers.put((True, MEASURES[part](*arguments)))
    except Exception as error:
        answers.put((False, f"{type(error).__name__}: {error}"))


def in_process(part: str, limit_s: float, *arguments: Any) -> Any:
    """What a measure returns, or a sentence on why it did not."""
    limit_s = min(limit_s, WAY_TIMEOUT_S)
    if limit_s < 1:
        return "not begun: the time was over"
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=_run, args=(answers, part, arguments))
    process.start()
    end = time.monotonic() + limit_s
    answer: tuple[bool, Any] = (False, f"took more than {limit_s:.0f} s and was ended")
    while time.monotonic() < end:
        with contextlib.suppress(queue.Empty):
            answer = answers.get(timeout=0.5)
            break
        if not process.is_alive():
            answer = (False, f"its process ended with status {process.exitcode}")
            break
    process.join(10 if answer[0] else 1)
    if process.is_alive():
        process.kill()
        process.join()
    return answer[1] if answer[0] else str(answer[1])


# ---- the table -------------------------------------------------------------------------------


def verdict(good: bool, what: str) -> str:
    return f"{what}: {'met' if good else 'MISSED'}"


def saves_rows(size: str, ways: dict[str, Any]) -> list[list[str] | None]:
    rows: list[list[str] | None] = [[f"saves, {size} state"] + [""] * 8]
    for name, result in ways.items():
        if isinstance(result, str):
            rows.append([f"  {name}", "failed", result[:60], "", "", "", "", "", ""])
            continue
        warm = result["rounds"]
        blocked = Series.of([each["call_s"] + each["gate_s"] for each in warm]).median
        base = Series.of(result["base_step_s"]).median
        # The mean: what one step waits for another has no share in.
        step = Series.of([statistics.fmean(each["step_s"]) for each in warm]).median
        item, idle = Series.of(result["item_s"]), Series.of(result["item_idle_s"])
        staged = [each["report"].get("staged_after_s") for each in warm]
        speed = result["nbytes"] / min(s for s in staged if s) / 1e9 if staged[0] else 0.0
        plain = result["nbytes"] / result["plain_copy_s"] / 1e9
        end = Series.of([each["end_s"] for each in warm]).median
        rows.append(
            [
                f"  {name}",
                format_seconds(blocked),
                format_size(max(each["allocated"] for each in warm)),
                format_size(max(each["reserved"] for each in warm)),
                f"{step / base:.3f} x",
                f"{speed:.1f} of {plain:.1f}" if speed else f"- of {plain:.1f}",
                f"+{(max(item.values) - idle.median) * 1e3:.2f} ms",
                format_seconds(end) + ("" if result["durable"] else ", not synced"),
                format_size(max(each["rss"] for each in warm)),
            ]
        )
        if name == OURS:
            rows.append(goal_row(result, blocked, step / base, speed / plain, end))
    return rows


def goal_row(
    result: dict[str, Any], blocked: float, step: float, copy: float, end: float
) -> list[str]:
    """The issue's goals beside what was reached."""
    warm = result["rounds"]
    allowed = 2e-6 * warm[0]["report"]["num_tensors"] + 2e-3
    most = max(max(each["allocated"], each["reserved"]) for each in warm)
    extra = max(result["item_s"]) - Series.of(result["item_idle_s"]).median
    raw = result["raw_disk_s"]
    return [
        "    goals",
        verdict(blocked <= allowed, f"<= {allowed * 1e3:.1f} ms"),
        verdict(most == 0, "0 B"),
        "",
        verdict(step <= 1.02, "<= 1.02 x"),
        verdict(copy >= 0.95, ">= 95 %"),
        verdict(extra <= 1e-3, "<= +1 ms"),
        verdict(end <= 1.2 * raw, f"<= 1.2 x {raw:.2f} s") if raw == raw else "no O_DIRECT here",
        "",
    ]


def other_rows(name: str, size: str, result: Any) -> list[list[str] | None]:
    blank = [""] * 8
    rows: list[list[str] | None] = [[f"{name}, {size} state", *blank]]
    if isinstance(result, str):
        return [*rows, [f"  failed: {result}", *blank[:-1], " "]]
    if name == "sweep":
        for point in result["points"]:
            worst = max(point["item_s"]) - result["idle_item_s"]["median"]
            rows.append(
                [
                    f"  {point['piece_mib']} MiB x {point['in_flight']}",
                    *("", "", "", ""),
                    f"{point['bytes_per_s'] / 1e9:.1f}"
                    f" of {result['nbytes'] / result['plain_copy_s'] / 1e9:.1f}",
                    f"+{worst * 1e3:.2f} ms",
                    "",
                    "",
                ]
            )
    elif name == "pinning":
        speed, torchs = (
            result["nbytes"] / result[key] / 1e9 for key in ("warm_up_s", "torch_pin_s")
        )
        rows += [
            [
                "  warm_up (torch's pin_memory)",
                *blank[:4],
                f"{speed:.1f} ({torchs:.1f})",
                "",
                "",
                "",
            ],
            [
                "  cold first save",
                format_seconds(result["cold_call_s"] + result["cold_gate_s"]),
                *blank[:5],
                format_seconds(result["cold_durable_s"]),
                "",
            ],
            *([f"  {sentence}", *blank[:-1], " "] for sentence in result["fallbacks"]),
        ]
    elif name == "ahead":
        alone, saving = result["alone"], result["saving"]
        ratio = saving["device_s"] / alone["device_s"]
        blocked = max(a + b for a, b in zip(saving["call_s"], saving["gate_s"], strict=True))
        rows.append(
            [
                f"  {min(saving['deferred']):.0%} deferred at least",
                format_seconds(blocked),
                "",
                "",
                f"{ratio:.3f} x",
                *("", "", "", ""),
            ]
        )
    else:
        share = result["under_kernels"]
        rows += [
            [
                f"  {result['nr_copies']} copies, "
                + (
                    f"{share:.0%} of their time under kernels" if share is not None else "none seen"
                ),
                *blank[:-1],
                verdict(not result["synchronises"], "no synchronise"),
            ]
        ]
    return rows


# ---- the run ---------------------------------------------------------------------------------


def missing() -> str:
    """Why there is nothing to measure, or ""."""
    try:
        import torch
    except ImportError as error:
        return f"no torch here ({error})"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return ""


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--states", nargs="+", choices=("small", "large"), default=["small", "large"]
    )
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=2, help="warm saves of each way (2)")
    parser.add_argument("--steps", type=int, default=6, help="steps timed in each round (6)")
    parser.add_argument("--cap-s", type=float, default=40.0, help="no new round after this (40)")
    parser.add_argument(
        "--probe-s", type=float, default=0.5, help="seconds of .item() probes (0.5)"
    )
    parser.add_argument("--dir", type=Path, default=Path("."), help="on the disk to write to")
    parser.add_argument(
        "--until-s",
        type=float,
        default=3600.0,
        help="nothing is begun after so many seconds (3600)",
    )
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "gpu.json")
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny, on the CPU: does the script work?"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    why = missing()
    if options.rehearse:
        os.environ["STILLFRAME_LIBCUDA"] = str(ROOT / "build" / "libfake_cuda.so")
    elif why:
        print(f"benchmarks/gpu.py skips: {why}")
        return 0
    results: dict[str, Any] = {}
    rows: list[list[str] | None] = []
    until = time.monotonic() + options.until_s

    def left() -> float:
        return until - time.monotonic()

    def keep() -> None:
        """What there is so far: figures come out of the parts that ran, whatever comes."""
        write_json(options.json, {"options": str(options), "results": results})

    directory = Path(tempfile.mkdtemp(prefix="stillframe-gpu-", dir=options.dir)).resolve()
    try:
        # Where the time may be cut short, the cheap and the telling come first.
        for size in options.states:
            if "saves" in options.parts:
                ways: dict[str, Any] = {}
                for name in options.ways:
                    print(f"saves, {size}: {name}", file=sys.stderr, flush=True)
                    ways[name] = in_process("saves", left(), options, size, name, directory)
                    results[f"saves {size}"] = ways
                    keep()
                    for each in directory.iterdir():
                        shutil.rmtree(each) if each.is_dir() else each.unlink()
                rows += [*saves_rows(size, ways), None]
        size = options.states[0]
        for part in options.parts:
            if part != "saves":
                print(f"{part}, {size}", file=sys.stderr, flush=True)
                found = in_process(part, left(), options, size, directory)
                results[part] = found
                keep()
                rows += [*other_rows(part, size, found), None]
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    facts = machine_facts(options.dir)
    facts["gpu"] = gpu_name() if not options.rehearse else "none: a rehearsal"
    print(f"{facts['gpu']}; {facts['cpu']}, {facts['cores']} cores; Linux {facts['kernel']};")
    print(f"Python {facts['python']}, torch {facts['torch']}, lightning {facts['lightning']}")
    print_table(
        "saving from a GPU"
        + (" (REHEARSAL: no figure means anything)" if options.rehearse else ""),
        ("", "blocked", "GPU memory", "reserved", "steps", "D2H GB/s", ".item()", "end", "RSS"),
        rows,
    )
    write_json(options.json, {"machine": facts, "options": str(options), "results": results})
    failed = [
        name
        for name, found in {
            **results,
            **results.get("saves small", {}),
            **results.get("saves large", {}),
        }.items()
        if isinstance(found, str)
    ]
    return 1 if failed and any(name in (OURS, *PARTS) for name in failed) else 0


def gpu_name() -> str:
    import torch

    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"


if __name__ == "__main__":
    sys.exit(main())
