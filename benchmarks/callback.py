"""What does CPUOffloadCallback cost a save, against a callback that copies tensor by tensor?

    python benchmarks/callback.py [--rounds N] [--only NAME ...] [--json FILE]

Three ways handle the same checkpoint: no callback, a naive callback that calls `.to("cpu",
copy=True)` on each tensor, and stillframe's callback. A fourth process makes one memcpy of as many
bytes between two buffers that are already in memory. Each way runs in a process of its own, and the
processes take turns, one save each. If torch sees a GPU, the checkpoint is on it. README.md says
how each figure is counted.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common import Series, format_size, format_times, print_table, write_json
from machine import (
    DISTURBING_SHARE,
    Others,
    check_memory,
    facts_lines,
    machine_facts,
    status_bytes,
)
from process import Worker

STATES = {"1 GB in 1,200 tensors": (10**9, 1_200), "64 MB in 20,000 tensors": (64 * 10**6, 20_000)}
WAYS = ("memcpy", "none", "naive", "stillframe")
GOAL = 1.1  # at most this many times one memcpy of the bytes, on CPU tensors


def plain_tensors(nbytes: int, nr_tensors: int) -> dict[str, Any]:
    """Return a dict of float32 tensors that no optimizer owns; `nbytes` in all."""
    import torch

    numel = max(1, nbytes // (4 * nr_tensors))
    return {f"tensor{i}": torch.randn(numel) for i in range(nr_tensors)}


def _memcpy_hook(nbytes: int) -> Any:
    """Return a hook that ignores the checkpoint and copies `nbytes` once: the least possible
    work."""
    import torch

    source = torch.randint(255, (nbytes,), dtype=torch.uint8)
    target = torch.zeros(nbytes, dtype=torch.uint8)
    return lambda _: ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)


def _callback_hook(way: str) -> Any:
    """Return the function `on_save_checkpoint(checkpoint)` of a way other than memcpy."""
    if way == "none":
        return lambda checkpoint: None
    if way == "naive":

        def naive(checkpoint: dict[str, Any]) -> None:
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {
                key: tensor.to("cpu", copy=True) for key, tensor in state.items()
            }

        return naive
    from stillframe.lightning import CPUOffloadCallback

    callback = CPUOffloadCallback()
    # No Trainer is needed: the callback reads only these two of its attributes.
    trainer = SimpleNamespace(global_rank=0, strategy=None)
    return lambda checkpoint: callback.on_save_checkpoint(trainer, None, checkpoint)


class Saves:
    """One way to handle a checkpoint of `nr_tensors` tensors, in the process that is measured."""

    def __init__(self, way: str, nbytes: int, nr_tensors: int) -> None:
        import torch

        self._gpu = torch.cuda if torch.cuda.is_available() else None
        self._state: dict[str, Any] | None = None
        if way == "memcpy":
            self._hook = _memcpy_hook(nbytes)
        else:
            tensors, device = plain_tensors(nbytes, nr_tensors), "cuda" if self._gpu else "cpu"
            self._state = {key: each.to(device) for key, each in tensors.items()}
            self._hook = _callback_hook(way)
        gc.collect()
        self._rss_before = status_bytes("VmRSS")

    def save(self) -> tuple[float, int, int]:
        """Call the hook once on a checkpoint.

        Returns:
            Seconds in the hook; bytes of resident memory now, less those before the first save;
            bytes of GPU memory that the hook freed.
        """
        gpu = self._gpu
        gpu_bytes_before = gpu.memory_allocated() if gpu else 0
        checkpoint = {} if self._state is None else {"state_dict": dict(self._state)}
        if gpu:
            gpu.synchronize()
        start = time.perf_counter()
        self._hook(checkpoint)
        seconds = time.perf_counter() - start
        freed = gpu_bytes_before - gpu.memory_allocated() if gpu else 0
        return seconds, status_bytes("VmRSS") - self._rss_before, freed


def run_state(name: str, rounds: int) -> dict[str, Any]:
    """Return the figures of every way for one state.

    The first round fills pools and heaps. It is in "first_s", not in the medians. "others" is the
    share of the machine that other processes took.
    """
    nbytes, nr_tensors = STATES[name]
    saves: dict[str, list[tuple[float, int, int]]] = {way: [] for way in WAYS}
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(way, Saves, way, nbytes, nr_tensors)).ready() for way in WAYS
        ]
        others = Others()
        for _ in range(rounds + 1):
            for worker in workers:
                saves[worker.name].append(worker.call("save"))
        share = others.share()
    return {
        "nbytes": nbytes,
        "nr_tensors": nr_tensors,
        "others": share,
        "ways": {way: _summary(saves[way]) for way in WAYS},
    }


def _summary(saves: list[tuple[float, int, int]]) -> dict[str, Any]:
    """Return the figures of one way from the results of `Saves.save`."""
    seconds = [seconds for seconds, _, _ in saves]
    return {
        "first_s": seconds[0],
        "seconds": Series.of(seconds[1:]),
        "extra_rss": max(extra_rss for _, extra_rss, _ in saves),
        "freed": max(freed for _, _, freed in saves),
    }


def rows(results: dict[str, dict[str, Any]], on_gpu: bool) -> list[list[str] | None]:
    """Return the rows of the table: a heading for each state, then a row for each way."""
    table: list[list[str] | None] = []
    for name, result in results.items():
        memcpy = result["ways"]["memcpy"]["seconds"].median
        table.append([name, "", "", "", "", "", ""])
        for way in WAYS:
            figures = result["ways"][way]
            series = figures["seconds"]
            ratio = series.median / memcpy
            verdict = ""
            if way == "stillframe" and not on_gpu:
                verdict = f"<= {GOAL}: {'met' if ratio <= GOAL else 'MISSED'}"
            copies = way != "none"
            speed = f"{result['nbytes'] / series.median / 1e9:.1f} GB/s" if copies else ""
            table.append(
                [
                    f"  {way}",
                    format_times(series.spread),
                    f"{ratio:.2f}",
                    speed,
                    format_times([figures["first_s"]]),
                    format_size(max(0, figures["extra_rss"])),
                    verdict or (f"freed {format_size(figures['freed'])}" if on_gpu else ""),
                ]
            )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="saves of each way, 9 by default")
    parser.add_argument("--only", nargs="+", choices=["1GB", "64MB"], default=["1GB", "64MB"])
    parser.add_argument("--json", type=Path, help="where to save every value")
    options = parser.parse_args()
    import torch

    check_memory(7 * 10**9 if "1GB" in options.only else 10**9)
    results = {}
    for name in STATES:
        size = name.split(" in ")[0].replace(" ", "")  # "1GB" of "1 GB in 1,200 tensors"
        if size in options.only:
            results[name] = run_state(name, options.rounds)
    facts = machine_facts(Path.cwd())
    print("\n".join(facts_lines(facts)))
    print_table(
        "time in on_save_checkpoint",
        ("", "median (min..max)", "of memcpy", "", "first", "extra memory", ""),
        rows(results, torch.cuda.is_available()),
    )
    for name, result in results.items():
        if result["others"] >= DISTURBING_SHARE:
            print(f"disturbed: other processes took {result['others']:.0%} of the machine ({name})")
    if options.json:
        for result in results.values():
            for figures in result["ways"].values():
                figures["seconds"] = figures["seconds"].to_json()
        write_json(options.json, {"machine": facts, "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
