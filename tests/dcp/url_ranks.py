"""Two ranks that save below URLs of the S3 server that the environment names.

python url_ranks.py DIRECTORY
"""

from __future__ import annotations

import errno
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from fix_ranks import Model, Notes, fails, forked, join, loads_as, locals_of, wait_for
from stillframe import dcp
from stillframe._dcp.joint import JointSave
from stillframe._remote import stores
from stillframe._remote.stores import open_store


def load(state: Any, url: str) -> None:
    stock.load(state, storage_reader=dcp.Reader(url))


def saves(path: Path, rank: int) -> Notes:
    """Save repeatedly to one URL during training."""
    training, good = Model(), []
    for _ in range(3):
        wanted = locals_of(training.state())
        response = dcp.async_save(training.state(), "s3://bkt/saves")
        for _ in range(2):
            training.step()
        response.upload_completion.result()
        reader = dcp.Reader("s3://bkt/saves")
        good.append(loads_as(wanted, None, storage_reader=reader))
    assert response.report is not None
    return {"good": good, "io_mode": response.report.io_mode}


def one_fails(path: Path, rank: int) -> Notes:
    """Let the store refuse what rank 1 sends."""
    url = "s3://bkt/one_fails"
    state = {f"w{rank}": torch.zeros(1000)}
    dcp.save(state, url)
    store, _ = open_store(url)
    before = sorted(each.key for each in store.list("one_fails"))
    put = stores.Store.put

    def refused(store: Any, key: str, *given: Any) -> None:
        if "__1_" in key:
            raise OSError(errno.EIO, "not on this rank", key)
        put(store, key, *given)

    stores.Store.put = refused
    failure = fails(dcp.save, {f"w{rank}": torch.ones(1000)}, url)
    stores.Store.put = put
    dist.barrier()
    same = sorted(each.key for each in store.list("one_fails")) == before
    state[f"w{rank}"].fill_(2)
    load(state, url)
    old = bool((state[f"w{rank}"] == 0).all())
    dcp.save({f"w{rank}": torch.ones(1000)}, url)
    load(state, url)
    return {
        "failure": failure,
        "same objects": same,
        "old": old,
        "new": bool((state[f"w{rank}"] == 1).all()),
    }


def group_is_gone(path: Path, rank: int) -> Notes:
    """Destroy the process group during a save."""
    url, plan, destroyed = "s3://bkt/gone", JointSave._plan, threading.Event()

    def plan_late(save: JointSave) -> Any:
        assert destroyed.wait(60)
        return plan(save)

    JointSave._plan = plan_late
    state = {f"w{rank}": torch.ones(1000)}
    response = dcp.async_save(state, url)
    dist.destroy_process_group()
    destroyed.set()
    response.upload_completion.result()
    join(path / "store", rank, 2)
    state[f"w{rank}"].zero_()
    load(state, url)
    return {"good": bool((state[f"w{rank}"] == 1).all())}


def main(directory: Path) -> None:
    wait_for(forked(directory, "2", 2, [saves, one_fails, group_is_gone]))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
