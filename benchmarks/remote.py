"""What does a save to an object store cost: ours, Lightning's, and torch.save through fsspec?

    python benchmarks/remote.py [--state 200MB 1GB] [--json FILE]

Each way has a process of its own. All ways save to one S3 server on loopback (`s3_server.py`),
which discards the bytes that it receives. The ways take turns, first without added latency and then
with 20 ms added to each request. README.md in this directory says how each figure is counted.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.metadata
import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import (
    TENSOR_BYTES,
    BenchError,
    Series,
    Spec,
    end_with,
    format_size,
    format_times,
    parse_size,
    print_table,
    progress_line,
    rotated,
    write_json,
)
from machine import DISTURBING_SHARE, Others, check_memory, facts_lines, machine_facts
from process import Worker
from remote_process import BUCKET, WAYS, Saves
from s3_server import Server

LATENCIES_S = (0.0, 0.02)
STEPS = 8  # steps without a save that are measured around each save
STEP_S = 0.1  # the intended duration of a step; see find_batch
PACKAGES = ("obstore", "s3fs", "aiobotocore", "botocore")


def find_batch(worker: Worker) -> int:
    """Return how many rows a batch needs for a step to take about STEP_S."""
    batch = 8
    while batch < 4096:
        step_s = worker.call("step_s", batch)
        if step_s >= STEP_S * 0.8:
            break
        growth = min(4.0, STEP_S / step_s)  # a short step says little about a large batch
        batch = max(batch + 8, int(batch * growth))
    return batch


def send_raw(endpoint: str, nbytes: int) -> float:
    """Return the seconds that one connection needs to send `nbytes`, to show the server's limit."""
    connection = http.client.HTTPConnection(endpoint.removeprefix("http://"))
    data = bytes(nbytes)
    start = time.perf_counter()
    connection.request("PUT", f"/{BUCKET}/raw", data)
    connection.getresponse().read()
    took = time.perf_counter() - start
    connection.close()
    return took


def run(
    nbytes: int, options: argparse.Namespace, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Measure all ways with a state of `nbytes`.

    Returns:
        "raw_s": the times of `send_raw`. "saves": for each latency, way and metric a list with the
        value of each round.
    """
    nr_weights = max(3, nbytes // TENSOR_BYTES // 3)  # each has two moments
    spec = Spec(nbytes, "mlp", nr_weights, options.threads)
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Worker("the server", Server)).ready()
        endpoint = server.call("endpoint")
        raw_s = [send_raw(endpoint, nbytes) for _ in range(options.rounds)]
        server.call("take", "raw")  # so that its requests are not counted below
        progress(f"{format_size(nbytes)} in {len(options.ways)} processes")
        workers = [
            stack.enter_context(Worker(way, Saves, way, spec, endpoint)) for way in options.ways
        ]
        for worker in workers:
            worker.ready()
        batch = find_batch(workers[0])

        def measure(worker: Worker, method: str, *values: Any) -> dict[str, float]:
            """Call a method that saves; return its figures if the store has got the whole state."""
            key, figures = worker.call(method, *values)
            taken = server.call("take", key)
            if taken["nbytes"] < worker.call("nbytes"):
                raise BenchError(f"{worker.name}: the store has {taken['nbytes']} bytes only")
            return {**figures, "requests": float(taken["requests"])}

        for latency_s in options.latencies:
            server.call("set_latency", latency_s)
            key = f"{latency_s * 1e3:g} ms"
            by_way = found.setdefault(key, {way: {} for way in options.ways})
            for number in range(options.rounds + 1):  # the first one warms up
                for worker in rotated(workers, number):
                    progress(f"{latency_s * 1e3:g} ms, round {number}: {worker.name}")
                    saved = measure(worker, "save")
                    trained = measure(worker, "loop", STEPS, batch)
                    if number == 0:
                        continue
                    loop_figures = {f"loop_{name}": value for name, value in trained.items()}
                    for name, value in (saved | loop_figures).items():
                        by_way[worker.name].setdefault(name, []).append(value)
        for worker in workers:
            worker.call("close")
    return {"raw_s": raw_s, "saves": found}


def rows(latency: str, figures: dict[str, dict[str, dict[str, float]]]) -> list[list[str]]:
    """Return the rows of the table for one latency; ratios are to stillframe's figures."""
    table = [[f"{latency} for each request", "", "", "", "", "", ""]]
    ours = figures.get("stillframe")

    def ratio(theirs: dict[str, Any], metric: str) -> str:
        if ours is None or theirs is ours or ours[metric]["median"] <= 0:
            return ""
        return f" ({theirs[metric]['median'] / ours[metric]['median']:.1f} x)"

    def times(series: dict[str, float]) -> str:
        return format_times([series[name] for name in ("median", "min", "max")])

    for way, metrics in figures.items():
        lost = metrics["loop_lost_s"]
        table.append(
            [
                way,
                times(metrics["call_s"]),
                times(metrics["finished_s"]) + ratio(metrics, "finished_s"),
                f"{format_times([lost['median']])} ± {format_times([lost['error']])}"
                + ratio(metrics, "loop_lost_s"),
                f"{100 * metrics['loop_speed']['median']:.0f} %",
                f"{max(0.0, metrics['extra_rss']['max']):.2f} x the state",
                f"{metrics['requests']['median']:.0f}",
            ]
        )
    return table


COLUMNS = (
    "",
    "the call (min..max)",
    "until acknowledged",
    "lost by a save while training",
    "speed meanwhile",
    "extra memory",
    "requests",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--state", type=parse_size, nargs="+", default=[200 * 10**6])
    parser.add_argument("--rounds", type=int, default=3, help="turns of each way, 3")
    parser.add_argument("--latencies", type=float, nargs="+", default=LATENCIES_S, metavar="S")
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, metavar="PATH", help="also save every figure here")
    options = parser.parse_args()
    for package in ("obstore", "s3fs", "lightning"):
        if importlib.util.find_spec(package) is None:
            raise BenchError(f"{package} is missing: see benchmarks/requirements.txt")
    # An estimate: state and gradients of each way, and up to four copies during a save.
    check_memory(int((1.4 * len(options.ways) + 4) * max(options.state) + 5e8))
    facts = machine_facts(Path("."))
    facts |= {package: importlib.metadata.version(package) for package in PACKAGES}
    others, results = Others(), {}
    with progress_line() as progress:
        for nbytes in options.state:
            found = run(nbytes, options, progress)
            saves = {
                latency: {
                    way: {name: Series.of(values).to_json() for name, values in figures.items()}
                    for way, figures in ways.items()
                }
                for latency, ways in found["saves"].items()
            }
            raw_s = Series.of(found["raw_s"]).to_json()
            results[format_size(nbytes)] = {"raw_s": raw_s, "saves": saves}
    print("\n".join(facts_lines(facts)))
    for size, result in results.items():
        title = f"{size} of model and AdamW to S3 on loopback; medians of {options.rounds} rounds"
        table: list[list[str]] = []
        for latency, found in result["saves"].items():
            table += rows(latency, found)
        print_table(title, COLUMNS, table)
        raw_s = format_times([result["raw_s"]["median"]])
        print(f"one connection sends as many bytes of a plain buffer in {raw_s}")
    share = others.share()
    if share >= DISTURBING_SHARE:
        print(f"disturbed: other processes took {share:.0%} of the machine")
    settings = {"rounds": options.rounds, "threads": options.threads, "steps": STEPS}
    document = {"facts": facts, "settings": settings, "others": share, "results": results}
    if options.json is not None:
        write_json(options.json, document)
    return 0


if __name__ == "__main__":
    end_with(main)
