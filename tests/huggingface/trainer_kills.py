"""Kills trainings at random moments, and checks that a resume finds files of one step.

    python trainer_kills.py DIRECTORY [--kills 200] [--seed 0] [--only stillframe]

A training saves after every step with `save_total_limit=1`. SIGKILL ends its process, and its
directory is checked. The next process resumes from the checkpoint in it. For comparison,
transformers' own Trainer takes turns with ours. After a checkpoint that cannot be resumed, the
training begins again in an empty directory.

Each step leaves its number in the model (a buffer), in the scheduler, in the optimizer, and as the
seed of the random number generators.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
from fix_trainer import OurTrainer, contents, is_whole, model, trainer, transformers
from transformers.trainer_utils import get_last_checkpoint, set_seed

WIDTH = 256  # a checkpoint of 20 MB
LONGEST_S = 1.5  # from the first step to the kill
CLASSES = {"stillframe": OurTrainer, "transformers": transformers.Trainer}


class Stamp(transformers.TrainerCallback):
    """A callback that writes each step's number to state that the checkpoint has to hold."""

    def __init__(self, began):
        self.began = began

    def on_step_begin(self, args, state, control, **kwargs):
        if self.began is not None:
            os.write(self.began, b"x")
            self.began = None

    def on_step_end(self, args, state, control, model=None, **kwargs):
        model.stamp.fill_(state.global_step)
        set_seed(state.global_step)


def net():
    made = model(WIDTH)
    made.register_buffer("stamp", torch.zeros(1, dtype=torch.int64))
    return made


def run(cls, directory, began):
    """Train until killed, from the newest checkpoint on."""
    os.chdir(directory)
    made = trainer(
        cls,
        net=net(),
        callbacks=[Stamp(began)],
        max_steps=10**6,
        save_steps=1,
        save_total_limit=1,
        logging_strategy="no",
    )
    resume = os.path.isdir("out") and get_last_checkpoint("out") is not None
    made.train(resume_from_checkpoint=True if resume else None)


def kill_one(cls, directory, after_s):
    """Run a training in a process of its own and kill it so many seconds after its first step."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reading)
            sys.stdout = sys.stderr = open(os.path.join(directory, "output.txt"), "a")  # noqa: SIM115
            run(cls, directory, writing)
        except BaseException:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)
    os.close(writing)
    began = os.read(reading, 1)
    os.close(reading)
    if began:
        time.sleep(after_s)
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return bool(began)


def fault_of(directory, had_one):
    """Return what is wrong with the checkpoint from which a resume begins; None if it is whole.

    had_one: An earlier checkpoint was there, so one must be there now.
    """
    newest = get_last_checkpoint(directory / "out") if (directory / "out").is_dir() else None
    if newest is None:
        return "no checkpoint is left" if had_one else None
    path, step = Path(newest), int(newest.rpartition("-")[2])
    try:
        if not is_whole(path):
            return "files are missing, or of another step than the directory"
        stamp = contents(path / "model.safetensors")[1]["stamp"][2]
        rng = torch.load(path / "rng_state.pth", weights_only=False)
    except Exception as error:
        return f"a file cannot be read: {type(error).__name__}"
    set_seed(step)
    of_step = (
        stamp == [step]
        and torch.equal(rng["cpu"], torch.random.get_rng_state())
        and rng["python"] == random.getstate()
        and np.array_equal(rng["numpy"][1], np.random.get_state()[1])
    )
    return None if of_step else "model or random numbers are of another step"


class Campaign:
    """The kills of one Trainer class.

    Attributes:
        kills: The number of trainings that were killed.
        faults: What was wrong afterwards, a sentence for each fault.
        steps: The highest step of a checkpoint.
    """

    def __init__(self, cls, directory, seed=0):
        self.cls, self.directory = cls, Path(directory)
        self.random = random.Random(seed)
        self.kills, self.faults, self.steps = 0, [], 0
        self._had_one = False
        self.directory.mkdir(exist_ok=True)

    def kill(self):
        if not kill_one(self.cls, self.directory, self.random.random() * LONGEST_S):
            self.faults.append("the resumed training failed: see output.txt")
            self._begin_anew()
            return
        self.kills += 1
        fault = fault_of(self.directory, self._had_one)
        if fault is not None:
            self.faults.append(fault)
            self._begin_anew()
            return
        newest = get_last_checkpoint(self.directory / "out")
        self._had_one = self._had_one or newest is not None
        if newest is not None:
            state = json.loads((Path(newest) / "trainer_state.json").read_text())
            self.steps = max(self.steps, state["global_step"])

    def _begin_anew(self):
        shutil.rmtree(self.directory / "out", ignore_errors=True)
        self._had_one = False


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=CLASSES, nargs="+", default=list(CLASSES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    options.directory.mkdir(parents=True, exist_ok=True)
    campaigns = {
        name: Campaign(CLASSES[name], options.directory / name, options.seed)
        for name in options.only
    }
    for _ in range(options.kills):
        for each in campaigns.values():
            each.kill()
    for name, each in campaigns.items():
        print(f"{name}: {each.kills} kills, {len(each.faults)} failures, {each.steps} steps")
        for fault in sorted(set(each.faults)):
            print(f"  {each.faults.count(fault)} x {fault}")
    ours = campaigns.get("stillframe")
    return 1 if ours is not None and ours.faults else 0


if __name__ == "__main__":
    sys.exit(main())
