"""Signals at random moments of a training, and SIGKILL some seconds later: what is on the disk?

    python preempt_campaign.py [--runs N] [--seed S] [--grace SECONDS] [--directory DIR]

Each run is a training in a process of its own, with two workers, a save every few steps and a
block of `stillframe.preemption`. It writes down what it is doing. SIGTERM comes while it does the
chosen thing, to the process or to its whole group, and SIGKILL follows. Afterwards:

    the state file is whole, and holds the last step boundary that was completed before the signal
    the other files are whole
    the exit status is 143
    no process is left

Every tenth run has 0.2 s until SIGKILL and a slow disk: there the old file has to be whole. This
program's exit status is 1 if anything of this does not hold.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import mmap
import os
import random
import shutil
import signal
import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import stillframe
import torch
from fix_preempt import Ended, Training, adopt_orphans, ended, send, start, steps_in, wait_for
from stillframe.testing import slow
from torch.utils.data import DataLoader

SAVING = ("call", "staging", "writing", "committing")  # a short run makes no save of its own
DOING = ("forward", "backward", "step", *SAVING, "waiting for data", "sleep", "boundary")
SHARED = struct.Struct("qq")  # what it does, and its completed steps
WAIT_S, SLOW_S, SHORT_S = 0.01, 0.02, 0.2


class Shared:
    """Memory shared with a training, which writes there what it does and how many steps it made."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, mmap.PAGESIZE)
        self.tell("forward", 0)

    def tell(self, doing: str, steps: int) -> None:
        SHARED.pack_into(self.memory, 0, DOING.index(doing), steps)

    @property
    def doing(self) -> str:
        return DOING[SHARED.unpack_from(self.memory)[0]]

    @property
    def steps(self) -> int:
        return int(SHARED.unpack_from(self.memory)[1])


class Data(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.005)
        return torch.ones(1)


def train(path: Path, shared: Shared, slow_call: str | None, short: bool, own: bool) -> None:
    training = Training(512)
    training.step()
    stillframe.save(training.state(), path / "last.pt")

    def tell(doing: str) -> None:
        shared.tell(doing, training.steps)

    # The state is a function of the steps, so a step may be divided into what it consists of.
    def step() -> None:
        training.optimizer.zero_grad()
        tell("forward")
        loss = training.model(torch.ones(2, 512)).sum()
        tell("backward")
        loss.backward()
        tell("step")
        training.optimizer.step()
        training.steps += 1

    slowly = contextlib.ExitStack()
    if short:
        slowly.enter_context(slow("fdatasync", 5))
    elif slow_call is not None:
        slowly.enter_context(slow(slow_call, SLOW_S))
    with slowly, stillframe.preemption(deadline=4) as p:
        if not own:
            p.save(training.state, path / "last.pt")
        tell("waiting for data")
        for _ in DataLoader(Data(), num_workers=2):
            step()
            tell("boundary")
            if p.should_stop():
                if own:
                    stillframe.save(training.state(), path / "last.pt")
                break
            if training.steps % 4 == 0 and not short:
                tell("call")
                name = f"other{training.steps % 8}.pt"
                handle = stillframe.async_save(training.state(), path / name)
                tell("staging")
                time.sleep(0.002)
                tell("writing")
                time.sleep(0.01)
                tell("committing")
                time.sleep(0.02)
                del handle
            tell("sleep")
            time.sleep(WAIT_S)
            tell("waiting for data")


def run(directory: Path, number: int, seed: int, grace_s: float) -> tuple[str, str, float]:
    """Make one run.

    Returns:
        What was interrupted, what is wrong ("" if nothing is), and the seconds from the signal to
        the end of the process.
    """
    choice = random.Random(f"{seed} {number}")
    short = number % 10 == 9
    doing = DOING[number % len(DOING)]
    slow_call = {"writing": "pwrite", "committing": choice.choice(("fdatasync", "rename"))}
    if short:
        doing = choice.choice([each for each in DOING if each not in SAVING])
    group, own = choice.random() < 0.5, choice.random() < 0.5
    path, shared = directory / str(number), Shared()
    pid = start(lambda p: train(p, shared, slow_call.get(doing), short, own), path)
    wanted = choice.randrange(4, 16)
    if doing == "staging":
        doing = choice.choice(("staging", "call"))
    wait_for(lambda: shared.steps >= wanted and shared.doing == doing, f"run {number}: {doing}")
    time.sleep(choice.random() * 0.01)
    completed = shared.steps - (shared.doing == "step")  # it may be before or after the update
    since = time.monotonic()
    send(pid, signal.SIGTERM, group=group)
    killed = False
    end_s = since + (SHORT_S if short else grace_s)
    while not (gone := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
        if time.monotonic() >= end_s:
            killed = True
            send(pid, signal.SIGKILL)
            break
        time.sleep(0.005)
    del gone
    end = ended(pid, since, path)
    wrong = judge(path, end, 1 if short else completed, killed=killed, short=short)
    label = f"{doing}{', group' if group else ''}{', short' if short else ''}"
    if wrong:
        wrong = f"run {number} ({label}): {wrong}\n{end.output}"
    else:
        shutil.rmtree(path)
    return label, wrong, end.seconds


def judge(path: Path, end: Ended, completed: int, *, killed: bool, short: bool) -> str:
    """Return what is wrong with the end of a run."""
    if end.left:
        return f"{len(end.left)} processes are left"
    try:
        found = steps_in(path / "last.pt")
        for other in path.glob("other*.pt"):
            steps_in(other)
    except Exception as error:
        return f"damaged: {error}"
    if found < completed:
        return f"the file holds step {found}, and {completed} were completed"
    if short:
        return ""
    if killed or end.status != 143:
        return f"status {end.status} after {end.seconds:.1f} s"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grace", type=float, default=5.0)
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    adopt_orphans()
    gc.freeze()  # the children end sooner
    directory = Path(tempfile.mkdtemp(prefix="preempt-", dir=options.directory))
    counts: collections.Counter[str] = collections.Counter()
    durations: list[float] = []
    wrong = 0
    for number in range(options.runs):
        label, what, seconds = run(directory, number, options.seed, options.grace)
        counts[label] += 1
        durations.append(seconds)
        if what:
            wrong += 1
            print(what, flush=True)
    if not wrong:
        shutil.rmtree(directory)
    for label, count in sorted(counts.items()):
        print(f"{count:5} {label}")
    middle = statistics.median(durations)
    print(f"seconds from the signal to the end: median {middle:.2f}, max {max(durations):.2f}")
    print(f"{options.runs} runs, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
