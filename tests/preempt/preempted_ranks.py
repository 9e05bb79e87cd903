"""The scenarios of test_preempted_ranks.py: trainings of several ranks that a signal ends.

    python preempted_ranks.py DIRECTORY [NAME ...]

Each rank counts its steps without help of the others, unless the scenario says so, and prints the
step at which it has stopped. The ranks have the same work, at different speeds.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import stillframe
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from fix_preempt import LIMIT_S, Training, ended, run_all, send, start, wait_for
from fix_ranks import join
from preempted import say
from stillframe import dcp
from stillframe.testing import slow

Program = Callable[[Path, int], object]
# The program, its number of ranks, and for each rank when it gets a signal (None: never).
scenarios: dict[str, tuple[Program, list[float | None]]] = {}


def ranks(*after_s: float | None) -> Callable[[Program], Program]:
    def register(program: Program) -> Program:
        scenarios[program.__name__] = program, list(after_s)
        return program

    return register


def ready(path: Path) -> None:
    """Say that this rank trains."""
    (path.parent / f"ready{path.name}").touch()


def train(p: stillframe.Preemption, path: Path, rank: int) -> Training:  # type: ignore[name-defined]
    """Train until the rank is to stop; each rank is faster than the next."""
    training = Training(8)
    while True:
        training.step()
        time.sleep(0.004 * (1 + rank))
        if training.steps == 10:
            ready(path)
        if p.should_stop():
            say("stopped at", training.steps)
            return training


@ranks(None, 0)
def signal_at_one(path: Path, rank: int) -> None:
    with stillframe.preemption(deadline=30) as p:
        train(p, path, rank)
    say("after the block")


@ranks(0, 0)
def signal_at_all(path: Path, rank: int) -> None:
    signal_at_one(path, rank)


@ranks(0.3, 0, None, 0.15)
def signals_at_different_times(path: Path, rank: int) -> None:
    signal_at_one(path, rank)


@ranks(None, None, 0, None)
def ranks_that_meet_in_each_step(path: Path, rank: int) -> None:
    """A rank that waited for the others at a boundary would hang their collective."""
    with stillframe.preemption(deadline=30) as p:
        total, step = torch.zeros(1), 0
        while True:
            dist.all_reduce(total)
            step += 1
            time.sleep(0.002 * rank)
            if step == 10:
                ready(path)
            if p.should_stop():
                say("stopped at", step)
                break


@ranks(0, None)
def group_made_in_the_block(path: Path, rank: int) -> None:
    with stillframe.preemption(deadline=30) as p:
        meet(path, rank, 2)
        train(p, path, rank)


@ranks(None, 0)
def loop_of_its_own(path: Path, rank: int) -> None:
    """Save on rank 0 only, from loops that know nothing of preemption."""
    training = Training(8)
    with stillframe.preemption(deadline=30) as p:
        if rank == 0:
            p.save(lambda: {"steps": training.steps + 1}, path / "last.pt")
        try:
            while True:
                training.step()
                time.sleep(0.004 * (1 + rank))
                if training.steps == 10:
                    ready(path)
        finally:
            say("stopped at", training.steps + 1)


@ranks(0, None)
def one_file_of_rank_0(path: Path, rank: int) -> None:
    """The other rank must not end before the file is durable: that could end rank 0 as well."""
    with slow("fdatasync", 0.5), stillframe.preemption(deadline=30) as p:
        if rank == 0:
            p.save(lambda: {"steps": 0}, path / "last.pt")
        train(p, path, rank)
    say("durable", (path.parent / "0/last.pt").exists())


@ranks(None, 0)
def distributed_checkpoint(path: Path, rank: int) -> None:
    with stillframe.preemption(deadline=30) as p:
        training = train(p, path, rank)
        state = {f"own{rank}": torch.tensor([training.steps]), "steps": training.steps}
        dcp.save(state, path.parent / "checkpoint")
    # This rank was not signalled, so the loads are part of a program that goes on.
    loaded = {f"own{other}": torch.zeros(1, dtype=torch.int64) for other in range(2)}
    stock.load(loaded, checkpoint_id=path.parent / "checkpoint", no_dist=True)
    say("loaded", *(each.item() for each in loaded.values()))


@ranks(0, 0)
def no_boundary_of_one_rank(path: Path, rank: int) -> None:
    """The checkpoint of before stays, because one rank does not take part in the new one."""
    dcp.save({f"own{rank}": torch.ones(1), "steps": 1}, path.parent / "checkpoint")
    with stillframe.preemption(deadline=2) as p:
        if rank == 0:
            p.save(lambda: {"steps": 2}, path / "last.pt")
        ready(path)
        if rank == 1:
            time.sleep(LIMIT_S)
        while not p.should_stop():
            time.sleep(0.01)
        dcp.save({f"own{rank}": torch.zeros(1), "steps": 2}, path.parent / "checkpoint")


@ranks(None, 0)
def rank_outside_the_block(path: Path, rank: int) -> None:
    if rank == 0:
        ready(path)
        wait_for((path.parent / "over").exists, "the end of the other rank")
        return
    with stillframe.preemption(deadline=6) as p:
        train(p, path, rank)
        (path.parent / "over").touch()


@ranks(0, 0)
def block_after_block(path: Path, rank: int) -> None:
    """The answers of an earlier block do not count."""
    for last in (False, True):
        number = signal.SIGTERM if last else signal.SIGUSR1
        try:
            with stillframe.preemption((number,), deadline=30) as p:
                dist.barrier()
                if not last:
                    os.kill(os.getpid(), number)
                    assert p.should_stop() or p.should_stop()
                else:
                    train(p, path, rank)
        except SystemExit:
            if last:
                raise


def meet(path: Path, rank: int, size: int) -> None:
    join(path.parent / "store", rank, size)
    dist.barrier()


def program_of(name: str, rank: int) -> Callable[[Path], object]:
    program, after_s = scenarios[name]

    def run(path: Path) -> None:
        if program is not group_made_in_the_block:
            meet(path, rank, len(after_s))
        program(path, rank)

    return run


def main(directory: Path, names: list[str]) -> None:
    def run(name: str) -> None:
        _, after_s = scenarios[name]
        path = directory / name
        pids = [start(program_of(name, rank), path / str(rank)) for rank in range(len(after_s))]
        for rank in range(len(after_s)):
            if name != "rank_outside_the_block" or rank == 1:
                wait_for((path / f"ready{rank}").exists, f"{name}: ready")
        since = time.monotonic()
        for seconds, rank in sorted((s, rank) for rank, s in enumerate(after_s) if s is not None):
            time.sleep(max(0.0, since + seconds - time.monotonic()))
            send(pids[rank], signal.SIGTERM)
        ends = [ended(pid, since, path / str(rank)) for rank, pid in enumerate(pids)]
        (path / "ended.json").write_text(json.dumps(ends))

    gc.freeze()  # the children end sooner
    run_all(run, names or list(scenarios))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
