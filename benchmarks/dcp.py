"""Checkpoints of many ranks: PyTorch's async_save and ours, in turns, on ranks that talk over gloo.

    python benchmarks/dcp.py DIRECTORY [--mb 128] [--layers 64] [--rounds 5]

Each rank has an FSDP2 model and its AdamW. Printed are medians over rounds and ranks: how long the
call took, the CPU time of the process up to the checkpoint's end, and when it was finished. Ours
is synced then, directory included; PyTorch's directory is not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from stillframe import dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

RANKS = 2
FIGURES = ("call ms", "CPU s", "finished s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--mb", type=float, default=128, help="of state, on all ranks together")
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    options.directory.mkdir(parents=True, exist_ok=True)
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            try:
                _rank(rank, options)
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    _print(options.directory)


def _rank(rank: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = options.directory / f"store{os.getppid()}"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    width = round((options.mb * 1e6 / 12 / options.layers) ** 0.5)  # AdamW: three times 4 bytes
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(options.layers)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(1, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        step()
    found: dict[str, list[list[float]]] = {name: [] for name in WAYS}
    group = dist.new_group(backend="gloo")
    kept = DefaultStager(StagingOptions(False, False, False, False))
    for number in range(options.rounds + 1):
        for name, way in WAYS.items():
            path = options.directory / "checkpoint"
            model_state, optimizer_state = get_state_dict(model, optimizer)
            state = {"model": model_state, "optimizer": optimizer_state}
            dist.barrier()
            cpu, began = time.process_time(), time.perf_counter()
            response = way(state, path, group, kept)
            called = time.perf_counter() - began
            getattr(response, "upload_completion", response).result()
            figures = [called * 1e3, time.process_time() - cpu, time.perf_counter() - began]
            if number:  # the first makes pools and plans
                found[name].append(figures)
            dist.barrier()
            if rank == 0:
                shutil.rmtree(path)
            step()
    (options.directory / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _default(state: Any, path: Path, group: Any, _: Any) -> Any:
    return stock.async_save(state, checkpoint_id=path, process_group=group)


def _stager(state: Any, path: Path, group: Any, kept: Any) -> Any:
    return stock.async_save(state, checkpoint_id=path, process_group=group, async_stager=kept)


def _ours(state: Any, path: Path, _group: Any, _kept: Any) -> Any:
    return dcp.async_save(state, path)


WAYS: dict[str, Callable[[Any, Path, Any, Any], Any]] = {
    "DCP's async_save": _default,
    "DCP with a DefaultStager that is kept": _stager,
    "stillframe.dcp.async_save": _ours,
}


def _print(directory: Path) -> None:
    ranks = [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    print(f"{'':40}" + "".join(f"{figure:>12}" for figure in FIGURES))
    for name in WAYS:
        rows = [row for rank in ranks for row in rank[name]]
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        print(f"{name:40}" + "".join(f"{median:12.3f}" for median in medians))


if __name__ == "__main__":
    main()
