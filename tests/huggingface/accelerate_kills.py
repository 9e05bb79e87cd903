"""Kills a training with Accelerate at random moments, and counts the failed resumes.

    python tests/huggingface/accelerate_kills.py DIRECTORY [--kills 200] [--with ours stock]

The training saves after every step, with `total_limit=1`. Each time it is killed it starts again,
resumes, and checks that model, optimizer, scheduler, random states and a registered object are all
of one step. The exit status is 1 if a resume from our checkpoints fails once.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import logging
import os
import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
from fix_accelerate import training
from stillframe.accelerate import load_state, save_state

WIDTH = 500
LONGEST_S = 0.3  # between the first save of a training and its end
OUTCOMES = {
    0: "resumed",
    1: "an error that has nothing to do with checkpoints",
    3: "resumed with parts of several steps",
    4: "no checkpoint is left",
    5: "the checkpoint cannot be loaded",
}


def train(kind: str, directory: Path, ready: int) -> int:
    """Resume, compare, and train until killed. Return a key of OUTCOMES if it cannot resume."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    run = training(directory, width=WIDTH, total_limit=1)
    run.accelerator.step = 0
    has_saved = (directory / "saved").exists()
    if has_saved:
        try:
            if kind == "ours":
                load_state(run.accelerator)
            else:
                run.accelerator.load_state()
        except (FileNotFoundError, IndexError) as error:
            names = os.listdir(directory / "checkpoints")
            print(f"{type(error).__name__}: {error}; there: {names}", flush=True)
            return 4 if not [name for name in names if re.match("checkpoint_", name)] else 5
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            return 5
        steps = steps_of(run)
        if len(set(steps.values())) != 1:
            print(f"steps: {steps}", flush=True)
            return 3
    names = os.listdir(directory / "checkpoints") if has_saved else []
    numbers = [int(match[1]) for name in names if (match := re.match(r"checkpoint_(\d+)$", name))]
    run.accelerator.project_configuration.iteration = max(numbers, default=-1) + 1
    for number in itertools.count():
        run.step()
        if kind == "ours":
            handle = save_state(run.accelerator)
            if number == 0:
                handle.result()
        else:
            run.accelerator.save_state()
        if number == 0:
            (directory / "saved").touch()
            os.write(ready, b"1")
    return 0


def steps_of(run) -> dict[str, int]:
    """Return for each part of the state the step after which it was saved."""
    optimizer = next(iter(run.optimizer.state_dict()["state"].values()))
    return {
        "model": int(run.model.norm.num_batches_tracked),
        "optimizer": int(optimizer["step"]),
        "scheduler": run.scheduler.scheduler.last_epoch,
        "random states": run.accelerator.step,
        "registered object": run.counter.count,
    }


def child(kind: str, directory: Path, ready: int) -> None:
    code = 1
    try:
        code = train(kind, directory, ready)
    finally:
        os._exit(code)


def campaign(kind: str, directory: Path, kills: int, seed: int) -> collections.Counter[str]:
    """Kill `kills` trainings; return how often each outcome was met."""
    moments = random.Random(seed)
    found: collections.Counter[str] = collections.Counter()
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    while found.total() < kills:
        ready, written = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ready)
            child(kind, directory, written)
        os.close(written)
        if os.read(ready, 1):
            found[OUTCOMES[0]] += 1
            time.sleep(moments.uniform(0, LONGEST_S))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        else:
            status = os.waitpid(pid, 0)[1]
            found[OUTCOMES[os.waitstatus_to_exitcode(status)]] += 1
            shutil.rmtree(directory)  # begin again
            directory.mkdir()
        os.close(ready)
    shutil.rmtree(directory)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("directory", type=Path, help="made, and removed afterwards")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--with", nargs="+", choices=["ours", "stock"], default=["ours", "stock"])
    given = parser.parse_args()
    failed = False
    for kind in getattr(given, "with"):
        found = campaign(kind, given.directory / kind, given.kills, given.seed)
        print(f"{kind}: " + ", ".join(f"{count} {what}" for what, count in found.items()))
        failed |= kind == "ours" and set(found) != {OUTCOMES[0]}
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
