"""What do checkpoints cost a Lightning training, with each way to save them?

    python benchmarks/lightning_fit.py --dir DIR [--state 160MB ...] [--every 20 5] [--json FILE]

The same `Trainer.fit` runs with no checkpoints, with Lightning's synchronous saving, with
Lightning's AsyncCheckpointIO, and with stillframe's. ModelCheckpoint saves every N steps
(`save_top_k=1`). Each way has a process of its own. In its turn a process runs a fit without
checkpoints and a fit with them, and the cost of saving is the difference between these two. Fits of
two processes cannot be compared, because their memory differs, and the machine's speed changes from
minute to minute.
README.md says how each figure is counted.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import statistics
import warnings
from pathlib import Path
from typing import Any

import pictures
from common import Series, end_with, format_size, format_times, parse_size, print_table, rotated
from machine import (
    DISTURBING_SHARE,
    Others,
    add_directory_options,
    facts_lines,
    keep_memory,
    measured_in,
)
from process import Worker

WAYS = ("none", "synchronous", "lightning", "stillframe")
STEP_S = 0.12  # the batch is made so large that a step takes about so long
SKIPPED = 3  # steps at the start of each fit that are not counted
GOAL = 0.02  # the largest share of the steps per second that saving may cost, in one case:
GOAL_BYTES, GOAL_EVERY = 160 * 10**6, 20  # a state of 160 MB, and a save every 20 steps


class Fits:
    """The fits of one way, in the process that is measured."""

    def __init__(self, way: str, nbytes: int, directory: Path) -> None:
        warnings.simplefilter("ignore")
        from fit_training import Training

        self._fit = Training(way, nbytes, directory).fit
        # these loggers set their levels on import
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.ERROR)
        keep_memory()

    def fit(self, batch: int, steps: int, every: int) -> dict[str, float]:
        os.sync()  # so that earlier writes of other ways do not slow this fit
        return self._fit(batch, steps, every)


def find_batch(without_saves: Worker) -> int:
    """Return how many rows a batch needs for a step to take STEP_S."""
    batch = 16
    while True:
        step_s = without_saves.call("fit", batch, steps=SKIPPED + 5, every=0)["step_s"]
        if step_s >= STEP_S * 0.9:
            return batch
        growth = min(4.0, STEP_S / step_s)  # a short step says little about a large batch
        batch = max(batch + 8, int(batch * growth))


def run_state(nbytes: int, intervals: list[int], rounds: int, saves: int, directory: Path) -> Any:
    """Return the batch, the share of other processes, and the figures of each fit.

    Args:
        intervals: Numbers of steps from save to save; each has a fit in each turn.
        saves: The saves in a fit with the longest interval.
    """
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(way, Fits, way, nbytes, directory)).ready() for way in WAYS
        ]
        batch = find_batch(workers[0])
        for worker in workers:  # a short fit with saves warms up pool and allocator
            worker.call("fit", batch, steps=2 * SKIPPED + 4, every=SKIPPED)
        others = Others()
        found: dict[int, dict[str, list[dict[str, float]]]] = {}
        steps = SKIPPED + max(intervals) * saves
        for number in range(rounds):
            for worker in rotated(workers, number):
                plain = worker.call("fit", batch, steps, every=0)["steps_per_s"]
                for every in rotated(intervals, number):
                    fit = worker.call("fit", batch, steps, every)
                    fit["lost"] = 1 - fit["steps_per_s"] / plain
                    found.setdefault(every, {}).setdefault(worker.name, []).append(fit)
        return {"batch": batch, "others": others.share(), "every": found}


def judge(shares: dict[str, Series], goal: float | None) -> str:
    """Return the verdicts on the share of speed that stillframe's checkpoints cost.

    A goal is met or missed if the difference exceeds the standard errors.

    Args:
        shares: The share that is lost with each way to save.
        goal: The most that stillframe may lose, or None if there is no such goal for this run.
    """
    ours = shares["stillframe"]
    leads = []  # by how many standard errors each other way loses more than ours
    for way in ("synchronous", "lightning"):
        error = shares[way].error + ours.error
        if error == 0:  # all values are equal
            error = 1e-9
        leads.append((shares[way].median - ours.median) / error)
    verdict = "within the error"
    if min(leads) > 1:
        verdict = "met"
    elif min(leads) < -1:
        verdict = "MISSED"
    text = f"ahead of both: {verdict}"
    if goal is not None:
        verdict = "within the error"
        if ours.median + ours.error <= goal:
            verdict = "met"
        elif ours.median - ours.error > goal:
            verdict = "MISSED"
        text += f"; <= {goal:.0%}: {verdict}"
    return text


def rows(nbytes: int, result: Any) -> list[list[str] | None]:
    """Return the rows of one state: a heading for each interval, then a row for each way."""
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
                    f"{speed.median:.2f} ({speed.min:.2f}..{speed.max:.2f})",
                    f"{shares[way].median:.1%} ± {shares[way].error:.1%}",
                    format_times([statistics.median(fit["longest_s"] for fit in fits[way])]),
                    format_times([statistics.median(fit["end_s"] for fit in fits[way])]),
                    format_size(max(0.0, peak[way] - peak["none"])),
                    judge(shares, goal) if way == "stillframe" else "",
                ]
            )
    return table


def with_statistics(result: dict[str, Any]) -> dict[str, Any]:
    """Return `result` with the statistics of each figure in place of one value for each fit."""
    every = {
        number: {
            way: {name: Series.of([fit[name] for fit in turns]).to_json() for name in turns[0]}
            for way, turns in fits.items()
        }
        for number, fits in result["every"].items()
    }
    return {**result, "every": every}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_directory_options(parser)
    parser.add_argument("--state", type=parse_size, nargs="+", default=[160 * 10**6, 10**9])
    parser.add_argument("--every", type=int, nargs="+", default=[20, 5])
    parser.add_argument("--saves", type=int, default=3, help="saves of a fit with the fewest, 3")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each way, 8 by default")
    options = parser.parse_args()
    largest = max(options.state)
    results: dict[int, Any] = {}
    # An estimate: trainings and copies of four ways, and an old and a new checkpoint of each.
    with measured_in(options, memory=9 * largest, disk=8 * largest) as (directory, facts):
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
        if result["others"] >= DISTURBING_SHARE:
            share = f"{result['others']:.0%}"
            print(f"disturbed: other processes took {share} of the machine ({format_size(nbytes)})")
    found = {nbytes: with_statistics(result) for nbytes, result in results.items()}
    pictures.save_and_draw(options.json, {"machine": facts, "results": found})
    return 0


if __name__ == "__main__":
    end_with(main)
