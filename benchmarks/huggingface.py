"""What do checkpoints cost a training with transformers' Trainer?

    python benchmarks/huggingface.py --dir DIR [--state 500MB] [--every 6] [--json FILE]

The same training of a GPT-2 saves with transformers' Trainer, with stillframe's Trainer, and with
one plain `async_save` of the same tensors in a callback. Each way has a process of its own. In its
turn a process trains once without checkpoints and once with them. The time lost by a checkpoint is
the difference between these two times, divided by the number of checkpoints. README.md says how
each figure is counted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
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

WAYS = ("transformers", "async_save", "stillframe")
STEP_S = 0.15  # the batch is made so large that a step takes about so long
SKIPPED = 3  # steps at the start of each training that are not counted
BLOCKED_GOAL = 1 / 20  # most time that a checkpoint may block, relative to transformers
LOST_GOAL = 1.5  # most time that a checkpoint may cost, relative to one plain async_save


class Fits:
    """The trainings of one way, in the process that is measured."""

    def __init__(self, way: str, nbytes: int, directory: Path) -> None:
        warnings.simplefilter("ignore")
        from hf_training import Training

        self._fit = Training(way, nbytes, directory).fit
        keep_memory()

    def fit(self, batch: int, steps: int, every: int) -> dict[str, float]:
        """Train, with a checkpoint after each `every` steps (0: none). Return the measurements."""
        os.sync()  # so that earlier writes of other ways do not slow this training
        return self._fit(batch, steps, every)


def find_batch(worker: Worker) -> int:
    """Return how many rows a batch needs for a step to take STEP_S."""
    batch = 4
    while True:
        step_s = worker.call("fit", batch, steps=SKIPPED + 4, every=0)["step_s"]
        if step_s >= STEP_S * 0.9:
            return batch
        growth = min(4.0, STEP_S / step_s)  # a short step says little about a large batch
        batch = max(batch + 2, int(batch * growth))


def run(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Return the batch, the share of other processes, and the measurements of each way."""
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(way, Fits, way, options.state, directory)).ready()
            for way in WAYS
        ]
        batch = find_batch(workers[0])
        for worker in workers:  # a short training with saves warms up pool and allocator
            worker.call("fit", batch, steps=2 * SKIPPED + 4, every=SKIPPED)
        others = Others()
        steps = SKIPPED + options.every * options.saves
        found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for number in range(options.rounds):
            for worker in rotated(workers, number):
                plain = worker.call("fit", batch, steps, every=0)
                fit = worker.call("fit", batch, steps, every=options.every)
                fit["lost_s"] = (fit["counted_s"] - plain["counted_s"]) / fit["saves"]
                fit["extra_rss"] = max(0.0, fit["peak_rss"] - plain["peak_rss"])
                found[worker.name].append(fit)
        return {"batch": batch, "others": others.share(), "fits": found}


def verdict(share: float, error: float, goal: float) -> str:
    """Return whether `share` is at most `goal`, or that the difference is within `error`."""
    if share + error <= goal:
        return "met"
    return "MISSED" if share - error > goal else "within the error"


def rows(fits: dict[str, list[dict[str, float]]]) -> list[list[str] | None]:
    """Return a row for each way; ours has the verdicts on the goals."""
    series = {  # way -> metric -> statistics
        way: {metric: Series.of([fit[metric] for fit in turns]) for metric in turns[0]}
        for way, turns in fits.items()
    }
    table: list[list[str] | None] = []
    for way in WAYS:
        found, verdicts = series[way], " "
        if way == "stillframe":
            blocked = found["blocked_s"].median / series["transformers"]["blocked_s"].median
            plain = series["async_save"]["lost_s"]
            lost = found["lost_s"].median / plain.median
            # The error of a quotient, to first order, where the quotient is LOST_GOAL.
            error = (found["lost_s"].error + LOST_GOAL * plain.error) / plain.median
            verdicts = (
                f"blocked: 1/{1 / blocked:.0f} of transformers, goal 1/{1 / BLOCKED_GOAL:.0f}:"
                f" {verdict(blocked, 0.0, BLOCKED_GOAL)};"
                f" lost: {lost:.2f} x async_save, goal {LOST_GOAL}:"
                f" {verdict(lost, error, LOST_GOAL)}"
            )
        table.append(
            [
                way,
                format_times(found["blocked_s"].spread),
                f"{format_times([found['lost_s'].median])}"
                f" ± {format_times([found['lost_s'].error])}",
                format_times([found["end_s"].median]),
                format_size(found["extra_rss"].median),
                verdicts,
            ]
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_directory_options(parser)
    parser.add_argument("--state", type=parse_size, default=500 * 10**6)
    parser.add_argument("--every", type=int, default=6, help="steps from save to save, 6")
    parser.add_argument("--saves", type=int, default=8, help="of each training, 8")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each way, 7")
    options = parser.parse_args()
    # An estimate: trainings and copies of three ways, and an old and a new checkpoint of each.
    need = {"memory": 9 * options.state, "disk": 9 * options.state}
    with measured_in(options, **need) as (directory, facts):
        result = run(options, directory)
    print("\n".join(facts_lines(facts)))
    step = Series.of([fit["step_s"] for fit in result["fits"]["stillframe"]]).median
    print_table(
        f"{format_size(options.state)} of model and AdamW, a checkpoint every {options.every} steps"
        f" of {format_times([step])}",
        ("", "blocked by a checkpoint (min..max)", "lost by it", "wait at the end", "memory", ""),
        rows(result["fits"]),
    )
    if result["others"] >= DISTURBING_SHARE:
        print(f"disturbed: other processes took {result['others']:.0%} of the machine")
    summary = {
        way: {name: Series.of([fit[name] for fit in turns]).to_json() for name in turns[0]}
        for way, turns in result["fits"].items()
    }
    pictures.save_and_draw(options.json, {"machine": facts, "results": {**result, "fits": summary}})
    return 0


if __name__ == "__main__":
    end_with(main)
