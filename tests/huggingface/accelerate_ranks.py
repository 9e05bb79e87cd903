"""The scenarios of test_accelerate_ranks.py, under torchrun: `accelerate_ranks.py DIRECTORY`.

Each scenario has its own DIRECTORY/SCENARIO, and every rank writes its notes there. At the end the
ranks leave while a save is in flight.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import sys
import time
import traceback
from pathlib import Path

import stillframe
import torch
import torch.distributed as dist
from fix_accelerate import content, files, same, training
from stillframe._base.distributed import poll
from stillframe.accelerate import load_state, save_state
from stillframe.testing import fault, held, slow


def raised(function, *args):
    """Return the type and the text of the exception that `function` raises."""
    try:
        function(*args)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


class LateScaler(torch.amp.GradScaler):
    """A scaler that gives its state when the other rank has written its own."""

    def state_dict(self):
        if dist.get_rank() == 1:
            time.sleep(0.5)
        return super().state_dict()


def same_files(directory, rank):
    run = training()
    run.accelerator.scaler = LateScaler("cpu", init_scale=1.0 + rank)
    random.seed(rank)
    for _ in range(3):
        run.step()
    run.accelerator.save_state(str(directory / "stock"))
    dist.barrier()
    handle = save_state(run.accelerator, directory / "ours")
    handle.result(timeout=120)
    stock, ours = files(directory / "stock"), files(directory / "ours")
    equal = stock == ours and all(
        same(content(directory / "ours" / name), content(directory / "stock" / name))
        for name in stock
        if name != "scaler.pt"  # with Accelerate, either rank's may stay
    )
    scale = content(directory / "ours" / "scaler.pt")["scale"]
    return {"equal": equal, "names": ours, "state": handle.state, "scale": scale}


def resumes(directory, rank):
    run = training(directory)
    for _ in range(3):
        run.step()
    with slow("fdatasync", 0.1 if rank == 0 else 0):
        save_state(run.accelerator)
        expected = [run.step() for _ in range(3)]
        load_state(run.accelerator)
    return {"count": run.counter.count, "same": [run.step() for _ in range(3)] == expected}


def appears_whole(directory, rank):
    run = training()
    path = directory / "c"
    with held("fdatasync"):
        handle = save_state(run.accelerator, path)
        dist.barrier()
        before = path.exists(), handle.done()
        dist.barrier()
    handle.result(timeout=120)
    return {"before": before, "names": files(path)}


def keeps_the_newest(directory, rank):
    run = training(directory, total_limit=1)
    for _ in range(4):
        handle = save_state(run.accelerator)
    handle.result(timeout=120)
    stillframe.wait_all()
    dist.barrier()
    return {"names": sorted(os.listdir(directory / "checkpoints"))}


def full_disk(directory, rank):
    run = training()
    path = directory / "c"
    save_state(run.accelerator, path).result(timeout=120)
    before = path.stat().st_ino
    dist.barrier()
    with fault("fdatasync", err=errno.ENOSPC, sticky=True):
        failed = save_state(run.accelerator, path)
        error = failed.exception(timeout=120)
    dist.barrier()
    kept = path.stat().st_ino == before
    dist.barrier()
    save_state(run.accelerator, path).result(timeout=120)
    stillframe.wait_all()  # the old directory is gone then
    dist.barrier()
    return {
        "error": type(error).__name__,
        "words": str(error),
        "state": failed.state,
        "kept": kept,
        "left": os.listdir(directory),
    }


def hook_of_one_rank_fails(directory, rank):
    run = training()

    def fails(models, weights, output_dir):
        if rank == 1:
            raise RuntimeError("the hook fails")

    hook = run.accelerator.register_save_state_pre_hook(fails)
    told = raised(save_state, run.accelerator, directory / "c")
    left = sorted(os.listdir(directory))
    hook.remove()
    dist.barrier()
    save_state(run.accelerator, directory / "c").result(timeout=120)
    return {"raised": told, "left": left, "names": files(directory / "c")}


def hook_of_the_leader_fails(directory, rank, is_made_anew=False):
    """The leader fails and removes the directory while rank 1 is in the call.

    `is_made_anew`: rank 1 then makes the directory again, as Accelerate does when it comes late.
    """
    run = training(directory)

    def fails(models, weights, output_dir):
        if rank == 0:
            poll((directory / "entered").exists, 60)
            raise RuntimeError("the hook fails")
        (directory / "entered").touch()
        assert poll(lambda: not os.path.exists(output_dir), 60)
        if is_made_anew:
            os.makedirs(output_dir)

    hook = run.accelerator.register_save_state_pre_hook(fails)
    told = raised(save_state, run.accelerator)
    hook.remove()
    dist.barrier()
    left = os.listdir(directory / "checkpoints")
    dist.barrier()
    handle = save_state(run.accelerator)
    handle.result(timeout=120)
    return {"raised": told, "left": left, "name": os.path.basename(handle.path)}


def directory_is_made_anew(directory, rank):
    return hook_of_the_leader_fails(directory, rank, is_made_anew=True)


def busy_engine_skips(directory, rank):
    run = training(directory)
    with stillframe.Engine(max_in_flight=1, when_busy="skip") as engine:
        # The leader alone is busy. The other rank writes a few files, which are not kept.
        with held("fdatasync") if rank == 0 else contextlib.nullcontext():
            if rank == 0:
                stillframe.async_save(torch.zeros(9), directory / "busy.pt", engine=engine)
            handle = save_state(run.accelerator, engine=engine)
            dist.barrier()
        result = handle.result(timeout=120)
    return {"state": handle.state, "result": result, "there": os.path.exists(handle.path)}


def name_is_taken(directory, rank):
    run = training(directory)
    save_state(run.accelerator)
    run.accelerator.project_configuration.iteration = 0
    told = raised(save_state, run.accelerator)
    run.accelerator.project_configuration.iteration = 1
    save_state(run.accelerator).result(timeout=120)
    stillframe.wait_all()
    dist.barrier()
    return {"raised": told, "names": sorted(os.listdir(directory / "checkpoints"))}


def saves_on_each_node(directory, rank):
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    own = directory / f"node{rank}"
    run = training(own, save_on_each_node=True, total_limit=1)
    for _ in range(2):
        handle = save_state(run.accelerator)
    handle.result(timeout=120)
    stillframe.wait_all()
    load_state(run.accelerator)
    return {"names": files(own)}


SCENARIOS = (
    same_files,
    resumes,
    appears_whole,
    keeps_the_newest,
    full_disk,
    hook_of_one_rank_fails,
    hook_of_the_leader_fails,
    directory_is_made_anew,
    busy_engine_skips,
    name_is_taken,
    saves_on_each_node,
)


def main() -> None:
    directory, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    os.environ["ACCELERATE_USE_CPU"] = "true"
    for scenario in SCENARIOS:
        training()  # initializes the process group
        own = directory / scenario.__name__
        own.mkdir(exist_ok=True)
        dist.barrier()
        try:
            notes = scenario(own, rank)
        except Exception:
            notes = {"failed": traceback.format_exc()}
        (directory / f"{scenario.__name__}-{rank}.json").write_text(json.dumps(notes))
        dist.barrier()
    leaves_with_a_save_in_flight(directory)


def leaves_with_a_save_in_flight(directory):
    run = training()
    with slow("fdatasync", 0.5):
        handle = save_state(run.accelerator, directory / "last")
        assert handle.state != "durable"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
