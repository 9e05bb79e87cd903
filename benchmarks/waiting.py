"""What a step right behind the call waits for, and what calls cost while the pool is new.

    python benchmarks/waiting.py [--dir DIR] [--megabytes 400] [--rounds 9]

Two questions, each with its ways taking turns in one process:

* gate: a model and AdamW of so many megabytes; ``async_save`` and at once ``optimizer.step``'s gate
  (deferred), against copying all of it in the call (``overlap=False``). The ratio is to stay
  at most 1.05.
* growth: the same bytes with no optimizer, in a new engine: calls 1 to 4, beside one plain copy of
  them into memory that is there, with the bytes the pool took and the minor faults in each call.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import stillframe
import torch
from stillframe import _core


def plain_copy_s(state: dict[str, torch.Tensor]) -> float:
    """Seconds of one copy of the state into memory that is there, the best of five."""
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for name, tensor in state.items():
            into[name].copy_(tensor)
        best = min(best, time.perf_counter() - start)
    return best


def growth(nbytes: int, directory: Path) -> None:
    """Prints what the first four calls of a new engine cost."""
    state = {f"t{i}": torch.ones(nbytes // 64 // 4) for i in range(64)}
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


def gate(nbytes: int, directory: Path, rounds: int) -> None:
    """Prints the medians of both ways and their ratio."""
    size = nbytes // 12 // 16
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(size)) for _ in range(16)])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(4):
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    took: dict[bool, list[float]] = {True: [], False: []}
    with stillframe.Engine() as engine:
        for turn in range(2 * rounds + 2):
            overlap = turn % 2 == 0
            state: dict[str, Any] = {"m": model.state_dict(), "o": optimizer.state_dict()}
            start = time.perf_counter()
            handle = stillframe.async_save(
                state, directory / "s.pt", engine=engine, overlap=overlap, durable=False
            )
            handle._ticket.wait(_core.WAIT_COPIED, None)  # type: ignore[union-attr]
            if turn >= 2:
                took[overlap].append(time.perf_counter() - start)
            report = handle.result()
            assert report is not None and (report.deferred_nbytes > 0.9 * nbytes) == overlap
            optimizer.step()
            os.sync()
    behind, inside = (statistics.median(took[key]) * 1e3 for key in (True, False))
    print(
        f"gate: {nbytes / 1e6:.0f} MB, call and gate at once {behind:.0f} ms, copied in the call"
        f" {inside:.0f} ms, ratio {behind / inside:.2f}"
    )


def main() -> None:
    """Both questions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", default=None)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        gate(args.megabytes * 1_000_000, Path(directory), args.rounds)
        growth(args.megabytes * 1_000_000, Path(directory))


if __name__ == "__main__":
    main()
