"""Scenarios of many_ranks.py in which a rank is killed: during a write, and between any two steps
of writing and committing its files."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from fix_dcp import equal, zeroed
from fix_entries import Step, stepping
from fix_ranks import Notes, fails, loses_a_rank
from stillframe import _core, dcp
from stillframe._dcp import checkpoint
from stillframe._dcp.checkpoint import RankFiles
from stillframe._dcp.writer import FileSystemWriter
from stillframe.testing import held


@loses_a_rank
def killed(path: Path, rank: int) -> Notes:
    """Kill the last rank but one (of two, the last) while it writes. This ends its world."""
    state = {f"w{rank}": torch.ones(1000)}
    group = None
    if dist.get_world_size() > 2:
        group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=45))
    dcp.save(state, path / "c", process_group=group)
    state[f"w{rank}"].fill_(2)
    if rank == max(1, dist.get_world_size() - 2):
        FileSystemWriter.start = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    response = dcp.async_save(state, path / "c", process_group=group)
    failure = fails(response.upload_completion.result, 100)
    took = time.monotonic() - began
    call_until_noticed(path, dist.get_world_size() - 1)
    again = functools.partial(dcp.async_save, process_group=group)
    return {"failure": failure, "took": took, "next": fails(again, state, path / "c")}


def call_until_noticed(path: Path, living: int) -> None:
    """Keep calling, as a training would, until the killed rank is noticed."""
    began, store = time.monotonic(), dist.FileStore(f"{path}/counted")
    store.add("counted", 1)
    while store.add("counted", 0) < living and time.monotonic() - began < 90:
        time.sleep(0.05)


@loses_a_rank
def few_killed(path: Path, rank: int) -> Notes:
    """Kill one of four ranks of a user's group; a fifth rank of the world is not in the group."""
    limit = datetime.timedelta(seconds=5)
    group = dist.new_group([0, 1, 2, 3], backend="gloo", timeout=limit)
    if rank == 4:
        return {}
    state = {f"w{rank}": torch.ones(1000)}
    dcp.save(state, path / "c", process_group=group)
    state[f"w{rank}"].fill_(2)
    if rank == 2:
        FileSystemWriter.start = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    response = dcp.async_save(state, path / "c", process_group=group)
    failure = fails(response.upload_completion.result, 60)
    call_until_noticed(path, 3)
    return {"failure": failure}


def end(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


@contextlib.contextmanager
def end_at_rename() -> Iterator[None]:
    """Stop this process at its first rename, that of its data file."""

    def check_files() -> None:
        while not stands.hits:
            time.sleep(0.001)
        end()

    with held("rename") as stands:
        threading.Thread(target=check_files, daemon=True).start()
        yield


@contextlib.contextmanager
def end_with_named_data() -> Iterator[None]:
    wait = RankFiles.wait
    RankFiles.wait = lambda *given: end(wait(*given))
    yield


@contextlib.contextmanager
def end_at_commit(*, taken: bool) -> Iterator[None]:
    """Stop this process before or after the rename of `.metadata`."""

    def on_step(step: Step, is_taken: bool) -> None:
        if step[0] == _core.STEP_RENAME and is_taken == taken:
            end()

    _core.take_steps = stepping(on_step)
    yield


@contextlib.contextmanager
def end_with_commit() -> Iterator[None]:
    """Stop this process when the checkpoint is durable, before any rank knows."""
    commit_metadata = checkpoint.commit_metadata
    checkpoint.commit_metadata = lambda *given, **named: end(commit_metadata(*given, **named))
    yield


# The rank that is killed, and the step at which it dies.
KILLS: dict[str, tuple[int, Callable[[], contextlib.AbstractContextManager[None]]]] = {
    "data written": (1, end_at_rename),
    "data named": (1, end_with_named_data),
    "data of the first written": (0, end_at_rename),
    "metadata written": (0, functools.partial(end_at_commit, taken=False)),
    "metadata named": (0, functools.partial(end_at_commit, taken=True)),
    "committed": (0, end_with_commit),
}


@loses_a_rank
def killed_at(path: Path, rank: int) -> Notes:
    """Kill one rank at the step that the world's name gives."""
    who, ending = KILLS[path.parent.name]
    state = {f"w{rank}": torch.ones(1000)}
    dcp.save(state, path / "c")
    state[f"w{rank}"].fill_(2)
    began = time.monotonic()
    with ending() if rank == who else contextlib.nullcontext():
        failure = fails(dcp.save, state, path / "c")
    return {"failure": failure, "took": time.monotonic() - began}


def after_kills(path: Path, rank: int) -> Notes:
    """Load the remaining checkpoint in new processes, and save there again."""
    notes = {}
    for name in KILLS:
        directory = path.parent.parent / name / "killed_at" / "c"
        state = {f"w{each}": torch.zeros(1000) for each in range(2)}
        left = sorted(os.listdir(directory))
        stock.load(state, checkpoint_id=directory)
        values = {float(value) for each in state.values() for value in each}
        dist.barrier()
        state = {f"w{rank}": torch.full((1000,), 3.0)}
        dcp.save(state, directory)
        dist.barrier()
        new = zeroed(state)
        stock.load(new, checkpoint_id=directory)
        files = sorted(os.listdir(directory))
        notes[name] = [left, sorted(values), equal(new, state), files]
    return notes
