"""How long does a step right after the call wait, and what do calls cost while the pool is new?

    python benchmarks/waiting.py [--dir DIR] [--megabytes 400] [--rounds 9] [--only QUESTION ...]

It answers four questions. For each question the ways that are compared take turns in this process:

gate: Is a deferred save with a step right after it as fast as a call that copies everything? A
model and its AdamW are saved. The time of a deferred `async_save` and of the wait before the step
is divided by the time of a call with `overlap=False`. The goal is at most 1.05.

growth: What do calls 1 to 4 of a new engine cost, whose pool has no memory yet? The state has no
optimizer, so each call copies it. Each call is compared with one plain copy into existing memory.
The bytes that the pool took from the system and the minor page faults of the call are shown too.

unowned: How fast does a call copy a state without an optimizer if the pool is warm? The times of
`async_save` and `snapshot` are divided by that of torch's own copy into existing memory. The goal
is at most 1.3.

snapshot: How long does an optimizer step right after a deferred snapshot take, while `--busy`
processes compute? The step is compared with the same step without a snapshot.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import stillframe
import torch
from stillframe import _core


def plain_copy_s(state: dict[str, torch.Tensor]) -> float:
    """Return the seconds of one copy of the state into existing memory, the best of five."""
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for name, tensor in state.items():
            into[name].copy_(tensor)
        best = min(best, time.perf_counter() - start)
    return best


def growth(nbytes: int, directory: Path) -> None:
    """Print the cost of the first four calls of a new engine."""
    state = {f"t{i}": torch.ones(nbytes // 64 // 4) for i in range(64)}  # float32
    copy_s = plain_copy_s(state)
    print(f"growth: {nbytes / 1e6:.0f} MB, one plain copy {copy_s * 1e3:.0f} ms")
    with stillframe.Engine() as engine:
        for call in range(1, 5):
            before, faults = engine.stats(), resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            start = time.perf_counter()
            handle = stillframe.async_save(state, directory / "g.pt", engine=engine)
            took = time.perf_counter() - start
            faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults
            grown = engine.stats()["committed_bytes"] - before["committed_bytes"]
            handle.result()
            print(
                f"  call {call}: {took * 1e3:6.0f} ms, {took / copy_s:5.1f} copies,"
                f" {grown / 1e6:6.0f} MB of new memory, {faults} minor faults of the caller"
            )
            os.sync()


def unowned(nbytes: int, directory: Path, rounds: int) -> None:
    """Print the median and least times of `async_save`, `snapshot` and torch's copy."""
    state = {f"t{i}": torch.ones(nbytes // 64 // 4) for i in range(64)}  # float32
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    took: dict[str, list[float]] = {"torch's copy": [], "async_save": [], "snapshot": []}
    with stillframe.Engine(pool_bytes=2 * nbytes) as engine:
        engine.warm_up(2 * nbytes)
        for turn in range(rounds + 1):
            for way, times in took.items():
                start = time.perf_counter()
                if way == "snapshot":
                    taken = stillframe.snapshot(state, engine=engine)
                elif way == "async_save":
                    saved = stillframe.async_save(
                        state, directory / "u.pt", engine=engine, durable=False
                    )
                else:
                    for name, tensor in state.items():
                        into[name].copy_(tensor)
                if turn > 0:  # the first turn warms up
                    times.append(time.perf_counter() - start)
                if way == "snapshot":
                    taken.release()
                elif way == "async_save":
                    saved.result()
    copy = took["torch's copy"]
    print(f"unowned: {nbytes / 1e6:.0f} MB, {torch.get_num_threads()} threads of torch")
    for way, times in took.items():
        print(
            f"  {way:12} {statistics.median(times) * 1e3:6.0f} ms, at best {min(times) * 1e3:.0f};"
            f" {statistics.median(times) / statistics.median(copy):.2f} x torch's copy, at best"
            f" {min(times) / min(copy):.2f}"
        )


def snapshot(nbytes: int, rounds: int, nr_busy: int) -> None:
    """Print the medians of a step alone and of one right after a deferred snapshot.

    `nbytes` is the size of the state. Steps with and without a snapshot alternate, `rounds` of
    each, while `nr_busy` other processes compute. The first of each is not counted.
    """
    size = nbytes // 12 // 16  # numbers in each of 16 weights: 4 bytes, and two moments of 4
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(size)) for _ in range(16)])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    for _ in range(4):
        optimizer.step()
    torch.set_num_threads(1)  # with busy processes, torch's threads would wait for each other
    took: dict[bool, list[float]] = {True: [], False: []}  # by `after_snapshot`
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(nr_busy)]
    try:
        with stillframe.Engine(pool_bytes=2 * nbytes) as engine:
            engine.warm_up(2 * nbytes)
            for turn in range(2 * rounds + 2):
                state: dict[str, Any] = {"m": model.state_dict(), "o": optimizer.state_dict()}
                after_snapshot = turn % 2 == 0
                if after_snapshot:
                    taken = stillframe.snapshot(state, overlap=True, engine=engine)
                start = time.perf_counter()
                optimizer.step()
                if turn >= 2:
                    took[after_snapshot].append(time.perf_counter() - start)
                if after_snapshot:
                    taken.wait()
                    taken.release()
    finally:
        for process in busy:
            process.kill()
            process.wait()
    times, alone = took[True], took[False]
    print(
        f"snapshot: {nbytes / 1e6:.0f} MB with {nr_busy} busy processes, a step alone"
        f" {statistics.median(alone) * 1e3:.0f} ms, after a deferred snapshot"
        f" {statistics.median(times) * 1e3:.0f} ms ({min(times) * 1e3:.0f} to"
        f" {max(times) * 1e3:.0f})"
    )


def gate(nbytes: int, directory: Path, rounds: int) -> None:
    """Print two median times and their ratio: of a deferred save's call and the wait for its copy,
    and of the call of a save that captures everything."""
    size = nbytes // 12 // 16  # numbers in each of 16 weights: 4 bytes, and two moments of 4
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(size)) for _ in range(16)])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(4):
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    took: dict[bool, list[float]] = {True: [], False: []}  # by `overlap`
    with stillframe.Engine() as engine:
        for turn in range(2 * rounds + 2):
            overlap = turn % 2 == 0
            state: dict[str, Any] = {"m": model.state_dict(), "o": optimizer.state_dict()}
            start = time.perf_counter()
            handle = stillframe.async_save(
                state, directory / "s.pt", engine=engine, overlap=overlap, durable=False
            )
            # The step would wait here too, until everything is copied.
            handle._ticket.wait(_core.WAIT_COPIED, None)  # type: ignore[union-attr]
            if turn >= 2:  # the first save of each kind is not counted
                took[overlap].append(time.perf_counter() - start)
            report = handle.result()
            assert report is not None and (report.deferred_nbytes > 0.9 * nbytes) == overlap
            optimizer.step()
            os.sync()
    deferred_ms = statistics.median(took[True]) * 1e3
    captured_ms = statistics.median(took[False]) * 1e3
    print(
        f"gate: {nbytes / 1e6:.0f} MB, call and gate at once {deferred_ms:.0f} ms,"
        f" copied in the call {captured_ms:.0f} ms, ratio {deferred_ms / captured_ms:.2f}"
    )


def main() -> None:
    """Answer the questions that `--only` names, or all."""
    questions = ("gate", "growth", "unowned", "snapshot")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", default=None)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=questions, default=questions)
    parser.add_argument("--busy", type=int, default=2, help="busy processes during a snapshot (2)")
    args = parser.parse_args()
    nbytes = args.megabytes * 1_000_000
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        if "gate" in args.only:
            gate(nbytes, Path(directory), args.rounds)
        if "growth" in args.only:
            growth(nbytes, Path(directory))
        if "unowned" in args.only:
            unowned(nbytes, Path(directory), args.rounds)
        if "snapshot" in args.only:
            snapshot(nbytes, args.rounds, args.busy)


if __name__ == "__main__":
    main()
