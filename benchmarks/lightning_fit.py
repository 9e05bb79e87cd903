"""What do checkpoints cost a Lightning training, with each way to save them?

    python benchmarks/lightning_fit.py --dir DIR [--state 160MB ...] [--every 20 5] [--json FILE]

The same `Trainer.fit`: with no checkpoints, with Lightning's synchronous saving, its
AsyncCheckpointIO, and ours, by ModelCheckpoint every N steps (`save_top_k=1`). Each way has a
process of its own. In its turn a process runs a fit without checkpoints and one with them, and what
saving took is the difference between the two: processes differ in the memory that they have got,
and minutes of the machine in their speed. README.md says how each figure is counted.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import multiprocessing
import os
import statistics
import sys
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pictures
from common import (
    BenchError,
    Series,
    format_size,
    format_times,
    parse_size,
    print_table,
    turned,
    write_json,
)
from machine import (
    Others,
    add_directory_options,
    check_memory,
    facts_lines,
    keep_memory,
    machine_facts,
    scratch_directory,
)

WAYS = ("none", "synchronous", "lightning", "stillframe")
STEP_S = 0.12  # a step takes at least 0.1 s
SKIPPED = 3  # steps at the start of each fit that are not counted
GOAL = 0.02  # of the steps per second, with 160 MB and one save every 20 steps
GOAL_BYTES, GOAL_EVERY = 160 * 10**6, 20


def worker(connection: Connection, way: str, nbytes: int, directory: str) -> None:
    """In a process of its own: one fit for each message `(batch, steps, every)`, until None."""
    warnings.simplefilter("ignore")
    from fit_training import Training

    fit = Training(way, nbytes, Path(directory)).fit
    for name in ("lightning.pytorch", "lightning.fabric"):  # which set their levels on import
        logging.getLogger(name).setLevel(logging.ERROR)
    keep_memory()
    connection.send("ready")
    while (message := connection.recv()) is not None:
        os.sync()  # nobody pays for what another has left to write
        connection.send(fit(*message))


class Workers:
    """A process for each way."""

    def __init__(self, nbytes: int, directory: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes: dict[str, Connection] = {}
        self.processes = []
        for way in WAYS:
            self.pipes[way], theirs = context.Pipe()
            process = context.Process(target=worker, args=(theirs, way, nbytes, str(directory)))
            process.start()
            theirs.close()
            self.processes.append(process)
            self._answer(way)

    def fit(self, way: str, batch: int, steps: int, every: int) -> dict[str, float]:
        self.pipes[way].send((batch, steps, every))
        answer: dict[str, float] = self._answer(way)
        return answer

    def _answer(self, way: str) -> Any:
        try:
            return self.pipes[way].recv()
        except EOFError:
            raise BenchError(f"the process of {way} ended; what it said stands above") from None

    def close(self) -> None:
        for pipe in self.pipes.values():
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(20)


def find_batch(workers: Workers) -> int:
    """Rows a batch, so that a step takes STEP_S."""
    batch = 16
    while True:
        step = workers.fit("none", batch, SKIPPED + 5, 0)["step_s"]
        if step >= STEP_S * 0.9:
            return batch
        batch = max(batch + 8, int(batch * min(4.0, STEP_S / step)))


def run_state(nbytes: int, everies: list[int], rounds: int, saves: int, directory: Path) -> Any:
    workers = Workers(nbytes, directory)
    try:
        batch = find_batch(workers)
        for way in WAYS:  # pool and allocator are warm from here on
            workers.fit(way, batch, 2 * SKIPPED + 4, SKIPPED)
        others = Others()
        found: dict[int, dict[str, list[dict[str, float]]]] = {}
        steps = SKIPPED + max(everies) * saves
        for number in range(rounds):
            for way in turned(WAYS, number):
                plain = workers.fit(way, batch, steps, 0)["steps_per_s"]
                for every in turned(everies, number):
                    fit = workers.fit(way, batch, steps, every)
                    fit["lost"] = 1 - fit["steps_per_s"] / plain
                    found.setdefault(every, {}).setdefault(way, []).append(fit)
        return {"batch": batch, "others": others.share(), "every": found}
    finally:
        workers.close()


def judge(shares: dict[str, Series], goal: float | None) -> str:
    """Met or missed where the errors leave no doubt."""
    ours = shares["stillframe"]
    apart = [
        (shares[way].median - ours.median) / (shares[way].error + ours.error or 1e-9)
        for way in ("synchronous", "lightning")
    ]
    ahead = "met" if min(apart) > 1 else "MISSED" if min(apart) < -1 else "within the error"
    said = f"ahead of both: {ahead}"
    if goal is not None:
        met = "met" if ours.median + ours.error <= goal else "within the error"
        said += f"; <= {goal:.0%}: {met if ours.median - ours.error <= goal else 'MISSED'}"
    return said


def rows(nbytes: int, result: Any) -> list[list[str] | None]:
    table: list[list[str] | None] = []
    for every, fits in result["every"].items():
        table.append([f"{format_size(nbytes)}, a save every {every} steps", "", "", "", "", "", ""])
        peak = {way: max(fit["peak_rss"] for fit in fits[way]) for way in WAYS}
        shares = {way: Series.of([fit["lost"] for fit in fits[way]]) for way in WAYS}
        goal = GOAL if (nbytes, every) == (GOAL_BYTES, GOAL_EVERY) else None
        for way in WAYS:
            speed = Series.of([fit["steps_per_s"] for fit in fits[way]])
            table.append(
                [
                    f"  {way}",
                    f"{speed.median:.2f} ({min(speed.values):.2f}..{max(speed.values):.2f})",
                    f"{shares[way].median:.1%} ± {shares[way].error:.1%}",
                    format_times([statistics.median(fit["longest_s"] for fit in fits[way])]),
                    format_times([statistics.median(fit["end_s"] for fit in fits[way])]),
                    format_size(max(0.0, peak[way] - peak["none"])),
                    judge(shares, goal) if way == "stillframe" else " ",
                ]
            )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_directory_options(parser)
    parser.add_argument("--state", type=parse_size, nargs="+", default=[160 * 10**6, 10**9])
    parser.add_argument("--every", type=int, nargs="+", default=[20, 5])
    parser.add_argument("--saves", type=int, default=3, help="of the fits with the fewest, 3")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each way, 8 by default")
    options = parser.parse_args()
    largest = max(options.state)
    check_memory(9 * largest)
    results: dict[int, Any] = {}
    with scratch_directory(
        options.dir, allow_tmpfs=options.allow_tmpfs, need_bytes=8 * largest
    ) as directory:
        facts = machine_facts(directory)
        for nbytes in options.state:
            results[nbytes] = run_state(
                nbytes, options.every, options.rounds, options.saves, directory
            )
    print("\n".join(facts_lines(facts)))
    print_table(
        "a fit with checkpoints",
        ("", "steps/s (min..max)", "lost", "longest step", "wait at the end", "extra memory", ""),
        [row for nbytes, result in results.items() for row in rows(nbytes, result)],
    )
    for nbytes, result in results.items():
        if result["others"] >= 0.03:
            share = f"{result['others']:.0%}"
            print(f"disturbed: other processes took {share} of the machine ({format_size(nbytes)})")
    if options.json:
        document = {"machine": facts, "results": results}
        write_json(options.json, document)
        pictures.beside(options.json, document)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as error:
        sys.exit(f"lightning_fit.py: {error}")
