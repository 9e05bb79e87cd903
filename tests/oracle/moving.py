"""Replaces the memory of storages right after a save, in every way that torch has.

test_moves.py runs ``python moving.py``. For each way a forked process saves and snapshots
parameters, replaces their memory in the next line, and compares the result with the state at the
call. A missing wait may crash the process. The output has the name and wait status of each way.
"""

from __future__ import annotations

import copy
import faulthandler
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import stillframe
import torch
from stillframe.testing import slow
from torch import multiprocessing
from torch.multiprocessing.reductions import reduce_storage

NUMEL = 1 << 20  # 4 MiB: memory that malloc gives back to the system at once
WAYS: dict[str, Callable[[torch.nn.ParameterList], object]] = {}


def way(function: Callable[[torch.nn.ParameterList], object]) -> Callable[..., object]:
    WAYS[function.__name__] = function
    return function


@way
def share_memory(model: torch.nn.ParameterList) -> None:
    model.share_memory()


@way
def share_memory_by_name(model: torch.nn.ParameterList) -> None:
    multiprocessing.set_sharing_strategy("file_system")
    model.share_memory()


@way
def put_into_a_queue(model: torch.nn.ParameterList) -> None:
    queue = multiprocessing.Queue()
    queue.put(model.state_dict())  # the queue's thread shares the tensors
    queue.get()


@way
def reduce_for_another_process(model: torch.nn.ParameterList) -> None:
    for p in model.parameters():
        reduce_storage(p.untyped_storage())


@way
def free(model: torch.nn.ParameterList) -> None:
    for p in model.parameters():
        p.untyped_storage().resize_(0)


@way
def free_as_fsdp_does(model: torch.nn.ParameterList) -> None:
    for p in model.parameters():
        p.data._typed_storage()._resize_(0)


@way
def grow(model: torch.nn.ParameterList) -> None:
    for p in model.parameters():
        p.untyped_storage().resize_(8 * NUMEL)


@way
def replace(model: torch.nn.ParameterList) -> None:
    """Give a tensor another storage and keep the old one alive."""
    first, second, third = list(model.parameters())[:3]
    first.data = torch.empty(0)
    second.data.set_()
    third.data.set_(torch.zeros(3))
    model.to_empty(device="cpu")
    model.double()


def trained() -> torch.nn.ParameterList:
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(NUMEL)) for _ in range(6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    optimizer.zero_grad()
    model.optimizer = [optimizer]  # lives as long as the model
    return model


def after_save(state: dict[str, Any], then: Callable[[], object], directory: str) -> Any:
    """Save the state, call `then` during the copy, and return the loaded file."""
    path = Path(directory) / "state.pt"
    handle = stillframe.async_save(state, path)
    then()
    report = handle.result()
    assert report is not None and report.deferred_nbytes == 6 * 4 * NUMEL
    return torch.load(path)


def after_snapshot(state: dict[str, Any], then: Callable[[], object], directory: str) -> Any:
    """Take a snapshot of the state, call `then` during the copy, and return the snapshot's tree."""
    snapshot = stillframe.snapshot(state, overlap=True)
    then()
    return snapshot.tree


def try_way(name: str) -> None:
    """Move the memory in one way during a save and a snapshot; check that both hold the state."""
    for copied in (after_save, after_snapshot):
        model = trained()
        state = dict(model.state_dict())
        wanted = copy.deepcopy(state)
        with tempfile.TemporaryDirectory() as directory, slow("lane_copy", 0.02):
            got = copied(state, lambda model=model: WAYS[name](model), directory)
        assert all(torch.equal(got[key], wanted[key]) for key in wanted), copied


def main() -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    trained()  # the first step of a process imports many modules of torch
    for name in WAYS:
        if (child := os.fork()) == 0:
            status = 1
            try:
                try_way(name)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        print(name, os.waitpid(child, 0)[1], flush=True)


if __name__ == "__main__":
    main()
