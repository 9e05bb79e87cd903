"""The scenarios of test_many_ranks.py: forked ranks that communicate over gloo.

    python many_ranks.py DIRECTORY

Each scenario has its own directory, in which each rank writes its notes. torch is imported once,
before the first fork.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import stillframe
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from fix_dcp import equal, zeroed
from fix_ranks import Model, Notes, fails, forked, join, loads_as, locals_of, wait_for
from fix_waits import eventually
from killed_ranks import KILLS, after_kills, few_killed, killed, killed_at
from stillframe import dcp
from stillframe._dcp import checkpoint
from stillframe._dcp.ranks import Ranks
from stillframe.testing import fault, held, slow
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

# ---- scenarios: each is given its directory and its rank ----


def fsdp2(path: Path, rank: int) -> Notes:
    """Save repeatedly to one path during training, with plans kept."""
    plans = []
    create = stock.DefaultSavePlanner.create_local_plan

    def noted(self: Any) -> Any:
        plans.append(number)
        return create(self)

    stock.DefaultSavePlanner.create_local_plan = noted
    training, good, deferred = Model(), [], []
    for number in range(4):
        wanted = locals_of(training.state())
        response = dcp.async_save(training.state(), path / f"c{number % 2}")
        for _ in range(3):
            training.step()
        response.upload_completion.result()
        good.append(loads_as(wanted, path / f"c{number % 2}"))
        deferred.append(response.report.deferred_nbytes)
    stock.DefaultSavePlanner.create_local_plan = create
    full = {name: value.full_tensor() for name, value in training.state()["model"].items()}
    dcp.save(training.state(), path / "last")
    if rank == 0:
        torch.save(full, path / "full.pt")
    leased = stillframe.default_engine().stats()["leased_bytes"]
    return {"good": good, "plans": plans, "deferred": deferred, "leased": leased}


def structures(path: Path, rank: int) -> Notes:
    """Change the structure of states; note the collectives of each save and whether it is right."""
    exchanges: list[str] = []
    # The calls under way. One collective may call another, and only the outer one is noted.
    within: list[str] = []

    def noting(name: str) -> Any:
        call = getattr(Ranks, name)

        def noted(*args: Any) -> Any:
            if not within:
                exchanges.append(name)
            within.append(name)
            try:
                return call(*args)
            finally:
                within.pop()

        return noted

    calls = {name: getattr(Ranks, name) for name in ("exchange", "gather", "scatter", "broadcast")}
    for name in calls:
        setattr(Ranks, name, noting(name))
    training, notes = Model(), {}
    for case, width, text in (
        ("first", 3, "short"),
        ("same", 3, "short"),
        ("wider on one rank", 3 + rank, "short"),
        ("that again", 3 + rank, "other"),
        ("a longer object", 3 + rank, "a long one" * 9),
        ("as the first", 3, "again"),
    ):
        training.step()
        state = {f"own{rank}": torch.rand(width), "text": text, **training.state()}
        wanted = locals_of(state)
        exchanges.clear()
        metadata = dcp.async_save(state, path / "c").upload_completion.result()
        of_the_save = [*exchanges]
        new = {**zeroed({f"own{rank}": state[f"own{rank}"]}), "text": "", **Model(seed=1).state()}
        stock.load(new, checkpoint_id=path / "c")
        good = equal(locals_of(new), wanted) and f"own{1 - rank}" in metadata.state_dict_metadata
        notes[case] = [good, *of_the_save]
    for name, call in calls.items():
        setattr(Ranks, name, call)
    return notes


class Refusing(stock.DefaultSavePlanner):
    """A planner that raises in one of the steps."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self.step = step

    def _refuse(self, step: str) -> None:
        if step == self.step:
            raise ValueError(f"no {step}")

    def create_local_plan(self) -> Any:
        self._refuse("local plan")
        return super().create_local_plan()

    def create_global_plan(self, plans: Any) -> Any:
        self._refuse("global plan")
        return super().create_global_plan(plans)

    def resolve_data(self, item: Any) -> Any:
        self._refuse("data")
        return super().resolve_data(item)


def planner_refuses(path: Path, rank: int) -> Notes:
    """Save with a user's planner that raises on one rank."""
    notes = {}
    for step, where in (("local plan", 1), ("global plan", 0), ("data", 1)):
        planner = Refusing(step if rank == where else "nothing")
        state = {f"w{rank}": torch.ones(10)}
        notes[step] = fails(lambda: dcp.save(state, path / "c", planner=planner))  # noqa: B023
        dist.barrier()
        notes[f"{step} left"] = os.listdir(path)
        dist.barrier()
    dcp.save(state, path / "c", planner=Refusing("nothing"))
    new = zeroed(state)
    stock.load(new, checkpoint_id=path / "c")
    return {**notes, "good": equal(new, state)}


def replicated(path: Path, rank: int) -> Notes:
    state = {"w": torch.arange(50_000.0), "step": 3, f"rng{rank}": torch.tensor([rank])}
    report = dcp.save(state, path / "c")
    new = zeroed(state)
    stock.load(new, checkpoint_id=path / "c")
    return {"good": equal(new, state), "nbytes": report.nbytes}


def crossed(path: Path, rank: int) -> Notes:
    """Combine our stager, writer and reader with PyTorch's."""
    training, good = Model(), {}
    group = dist.new_group(backend="gloo")
    for ours in ("stager", "writer", "stager writer", ""):
        stager = (
            dcp.PinnedStager()
            if "stager" in ours
            else DefaultStager(StagingOptions(False, False, False, False))
        )
        writer = (dcp if "writer" in ours else stock).FileSystemWriter(path / f"c{ours}")
        wanted = locals_of(training.state())
        response = stock.async_save(
            training.state(), storage_writer=writer, async_stager=stager, process_group=group
        )
        training.step()
        getattr(response, "upload_completion", response).result()
        for reader in (dcp.Reader, stock.FileSystemReader):
            good[f"{ours} {reader.__name__}"] = loads_as(
                wanted, path / f"c{ours}", storage_reader=reader(path / f"c{ours}")
            )
    return good


def back_to_back(path: Path, rank: int) -> Notes:
    """Make saves that only the next save waits for."""
    training, wanted = Model(), []
    for number in range(4):
        wanted.append(locals_of(training.state()))
        response = dcp.async_save(training.state(), path / f"c{number}")
        training.step()
    response.upload_completion.result()
    return {"good": [loads_as(each, path / f"c{n}") for n, each in enumerate(wanted)]}


def full_disk(path: Path, rank: int) -> Notes:
    """Fill one rank's disk. The next call raises once on all ranks; then saves work again."""
    training = Model()
    old = locals_of(training.state())
    dcp.save(training.state(), path / "c")
    before = sorted(os.listdir(path / "c"))
    training.step()
    full = fault("pwrite", err=errno.ENOSPC, sticky=True) if rank else contextlib.nullcontext()
    with full:
        response = dcp.async_save(training.state(), path / "c")
        while not response.upload_completion.done():
            time.sleep(0.01)
    dist.barrier()
    notes = {
        "next": fails(dcp.async_save, training.state(), path / "c"),
        "files": sorted(os.listdir(path / "c")) == before,
        "old": loads_as(old, path / "c"),
    }
    wanted = locals_of(training.state())
    dcp.save(training.state(), path / "c")  # no call has collected the response's error yet
    own = fails(response.upload_completion.result)
    return {**notes, "own": own, "new": loads_as(wanted, path / "c")}


def commit_fails(path: Path, rank: int) -> Notes:
    training = Model()
    old = locals_of(training.state())
    dcp.save(training.state(), path / "c")
    training.step()
    before = sorted(os.listdir(path / "c"))

    def broken(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "no metadata today")

    commit_metadata = checkpoint.commit_metadata
    if rank == 0:
        checkpoint.commit_metadata = broken
    failure = fails(dcp.save, training.state(), path / "c")
    checkpoint.commit_metadata = commit_metadata
    dist.barrier()
    files = sorted(os.listdir(path / "c")) == before
    return {"failure": failure, "files": files, "old": loads_as(old, path / "c")}


def stage_fails(path: Path, rank: int) -> Notes:
    """Fail the copy on one rank in the call; the other gets the reason instead of waiting."""
    training = Model()
    small = stillframe.Engine(pool_bytes=4096, block_bytes=4096) if rank else None
    began = time.monotonic()
    try:
        response = dcp.async_save(training.state(), path / "c", engine=small)
    except stillframe.StillframeError as error:
        failure = f"call: {type(error).__name__}"
    else:
        failure = fails(response.upload_completion.result)
    took = time.monotonic() - began
    wanted = locals_of(training.state())
    dcp.save(training.state(), path / "c")
    return {"failure": failure, "in time": took < 20, "new": loads_as(wanted, path / "c")}


def seen_by_one(path: Path, rank: int) -> Notes:
    """Let one rank collect the error, and the other's next call raise it.

    That call saves nothing and makes no rank wait; the next one saves."""
    training = Model()
    with fault("pwrite", err=errno.ENOSPC, sticky=True):
        response = dcp.async_save(training.state(), path / "c")
        while not response.upload_completion.done():
            time.sleep(0.01)
    dist.barrier()
    if rank == 0:
        response.upload_completion.exception()
    try:
        second = dcp.async_save(training.state(), path / "c")
        failure = fails(second.upload_completion.result)
    except BaseException as error:
        failure = f"call: {type(error).__name__}"
    wanted = locals_of(training.state())
    dcp.save(training.state(), path / "c")
    return {"failure": failure, "new": loads_as(wanted, path / "c")}


def busy(path: Path, rank: int) -> Notes:
    """Make one rank busy; all ranks must raise."""
    training = Model()
    with held("pwrite") if rank else contextlib.nullcontext():
        first = dcp.async_save(training.state(), path / "c", when_busy="raise")
        failure = fails(lambda: dcp.async_save(training.state(), path / "d", when_busy="raise"))
    first.upload_completion.result()
    dist.barrier()
    dcp.async_save(training.state(), path / "d", when_busy="raise").upload_completion.result()
    mine = [dist.new_group([each], backend="gloo") for each in range(2)][rank]
    state = {"w": torch.ones(3)}
    few = fails(lambda: dcp.async_save(state, path / "e", process_group=mine, when_busy="raise"))
    dcp.save(state, path / f"own{rank}", process_group=mine)
    new = zeroed(state)
    stock.load(new, checkpoint_id=path / f"own{rank}", no_dist=True)
    return {"failure": failure, "few": few, "own": equal(new, state)}


def out_of_step(path: Path, rank: int) -> Notes:
    """Let one rank make an extra call; all ranks must get an error."""
    from stillframe._dcp import api

    group = api._saver.group(None, False)
    api._saver._rounds[group]._calls += rank
    failure = fails(dcp.save, Model().state(), path / "c")
    api._saver._rounds[group]._calls -= rank
    return {"failure": failure}


def wrong_order(path: Path, rank: int) -> Notes:
    """Save to two paths in a different order on each rank, then in the same order."""
    state = {f"w{rank}": torch.zeros(1000)}
    for name in "ab":
        dcp.save(state, path / name)
    before = [sorted(os.listdir(path / name)) for name in "ab"]
    dist.barrier()
    os.chdir(path)  # one rank gives this path as a relative one
    state[f"w{rank}"].fill_(1)
    failure = [
        fails(dcp.save, state, name if rank else path / name) for name in "ab"[:: 1 - 2 * rank]
    ]
    files = [sorted(os.listdir(path / name)) for name in "ab"] == before
    new = zeroed(state)
    good = []
    for name in "ab":
        stock.load(new, checkpoint_id=path / name)
        good.append(equal(new[f"w{rank}"], torch.zeros(1000)))
    dcp.save(state, "./a" if rank else path / "a")
    stock.load(new, checkpoint_id=path / "a")
    return {"failure": failure, "files": files, "good": [*good, equal(new, state)]}


def alone(path: Path, rank: int) -> Notes:
    state = {"w": torch.full((1000,), float(rank))}
    dcp.save(state, path / f"c{rank}", no_dist=True)
    new = zeroed(state)
    stock.load(new, checkpoint_id=path / f"c{rank}", no_dist=True)
    return {"good": equal(new, state)}


def groups(path: Path, rank: int) -> Notes:
    """Destroy and make all process groups: between saves, and during a save."""
    from stillframe._dcp import api
    from stillframe._dcp.joint import JointSave

    state = {f"w{rank}": torch.zeros(1000)}
    new, good, failures = zeroed(state), [], []
    plan, destroyed = JointSave._plan, threading.Event()

    def plan_late(save: JointSave) -> Any:
        assert destroyed.wait(60)
        return plan(save)

    def plan_without_a_group(save: JointSave) -> Any:
        assert destroyed.wait(60)
        raise RuntimeError("the backend has closed its connections")

    def join_again(number: int) -> None:
        dist.destroy_process_group()
        destroyed.set()
        join(path / f"store{number}", rank, 2)

    def load() -> float:
        stock.load(new, checkpoint_id=path / "c")
        return float(new[f"w{rank}"].mean())

    for number in range(3):
        state[f"w{rank}"].fill_(number)
        dcp.save(state, path / "c")
        join_again(number)
        good.append(load() == number)
    dcp.save(state, path / "c")
    JointSave._plan = plan_late
    for number in range(3, 5):  # one save with a kept plan, and one that is planned: both succeed
        destroyed.clear()
        state[f"w{rank}"].fill_(number)
        with slow("pwrite", 0.1), slow("lane_copy", 0.1):
            response = dcp.async_save(state, path / "c")
            join_again(number)
            failure = response.upload_completion.exception(60)
        failures.append("" if failure is None else f"{type(failure).__name__}: {failure}")
        good.append(load() == number)
        state["more"] = torch.ones(5)
    JointSave._plan = plan
    dcp.save(state, path / "c")
    good.append(load() == 4)
    JointSave._plan = plan_without_a_group
    destroyed.clear()
    state["still more"] = torch.ones(5)
    response = dcp.async_save(state, path / "c")
    dist.destroy_process_group()
    destroyed.set()
    failures.append(str(response.upload_completion.exception(60)))
    JointSave._plan = plan
    join(path / "store5", rank, 2)

    def is_forgotten() -> bool:
        # The thread that has reported the last save's end may reference the group for a moment
        # longer. Then the group may remain in the cycle of an error and its traceback.
        gc.collect()
        return len(api._saver._rounds) == 0

    eventually(is_forgotten)
    threads = sum(each.name == "sf-dcp" for each in threading.enumerate())
    return {"good": good, "failure": failures, "kept": len(api._saver._rounds), "threads": threads}


def fsdp1(path: Path, rank: int) -> Notes:
    """Save FSDP1's ShardedTensors and the full states that it makes of them."""

    def trained(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(64, 64) for _ in range(3)]
        model = FullyShardedDataParallel(
            torch.nn.Sequential(*layers), device_id=torch.device("cpu"), use_orig_params=True
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        step(model, optimizer)
        return model, optimizer

    def step(model: Any, optimizer: Any) -> None:
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    notes: Notes = {}
    for full in (False, True):
        options = StateDictOptions(full_state_dict=full)
        model, optimizer = trained(0)
        state = {"all": get_state_dict(model, optimizer, options=options)}
        state = dict(zip(("model", "optimizer"), state["all"], strict=True))
        wanted = locals_of(state)
        response = dcp.async_save(state, path / f"c{full}")
        for _ in range(3):
            step(model, optimizer)
        response.upload_completion.result()
        kinds = {type(each).__name__ for each in state["model"].values()}
        new = dict(
            zip(
                ("model", "optimizer"),
                get_state_dict(*trained(1), options=options),
                strict=True,
            )
        )
        stock.load(new, checkpoint_id=path / f"c{full}")
        notes[f"full {full}"] = [equal(locals_of(new), wanted), *sorted(kinds)]
        if not full:
            stager = dcp.PinnedStager()
            notes["stager"] = fails(lambda: stager.stage(state))  # noqa: B023
    return notes


def other_world(path: Path, rank: int) -> Notes:
    """Load on three ranks what two have saved, and save it."""
    saved = path.parent.parent / "2" / "fsdp2"
    new = Model(seed=1)
    state = new.state()
    stock.load(state, checkpoint_id=saved / "last")
    full = torch.load(saved / "full.pt")
    good = all(
        torch.equal(value.full_tensor(), full[name]) for name, value in state["model"].items()
    )
    dcp.save(state, path / "c")
    return {"good": good}


def removed(path: Path, rank: int) -> Notes:
    """Remove a path on all ranks while other entries of the log come before it, and save to it at
    once."""
    training = Model()
    dcp.save(training.state(), path / "c")
    training.step()
    wanted = locals_of(training.state())
    with slow("fdatasync", 0.1 * rank, sticky=False):
        stillframe.async_save([rank], path / f"file{rank}")
        stillframe.remove(path / "c")
        response = dcp.async_save(training.state(), path / "c")
        stillframe.wait_all()
    done = response.upload_completion.done()
    dist.barrier()
    return {
        "done": done,
        "there": stillframe.exists(path / "c"),
        "new": loads_as(wanted, path / "c"),
    }


def four(path: Path, rank: int) -> Notes:
    """Slow down one of four ranks' disks, then fill another's, with several files per rank."""
    training = Model()
    wanted = locals_of(training.state())
    with slow("pwrite", 0.05) if rank == 2 else contextlib.nullcontext():
        dcp.save(training.state(), path / "last")
    good = loads_as(wanted, path / "last")
    full = {name: value.full_tensor() for name, value in training.state()["model"].items()}
    if rank == 0:
        torch.save(full, path / "full.pt")
    training.step()
    writer = dcp.FileSystemWriter(path / "last", thread_count=2)
    no_room = fault("pwrite", err=errno.ENOSPC, sticky=True) if rank == 3 else None
    with no_room or contextlib.nullcontext():
        failure = fails(lambda: stock.save(training.state(), storage_writer=writer))
    return {"good": good, "failure": failure, "old": loads_as(wanted, path / "last")}


def from_four(path: Path, rank: int) -> Notes:
    """Load on fewer ranks what four have saved."""
    saved = path.parent.parent / "4" / "four"
    state = Model(seed=1).state()
    stock.load(state, checkpoint_id=saved / "last")
    full = torch.load(saved / "full.pt")
    return {
        "good": all(
            torch.equal(value.full_tensor(), full[name]) for name, value in state["model"].items()
        )
    }


WORLDS = {
    4: [four, killed],
    2: [
        *(
            fsdp2,
            fsdp1,
            structures,
            planner_refuses,
            replicated,
            crossed,
            back_to_back,
            full_disk,
            commit_fails,
            stage_fails,
        ),
        *(seen_by_one, busy, out_of_step, wrong_order, alone, removed, from_four, groups, killed),
    ],
    3: [other_world, from_four],
}
# Scenarios of five ranks. They mostly wait, so they run at the same time as the others.
MOSTLY_WAITING = [few_killed]


def main(directory: Path) -> None:
    others = forked(directory, "beside", 5, MOSTLY_WAITING)
    for name in KILLS:
        others += forked(directory, name, 2, [killed_at])
    for size, scenarios in WORLDS.items():
        wait_for(forked(directory, str(size), size, scenarios))
    wait_for(others)
    wait_for(forked(directory, "after", 2, [after_kills]))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
