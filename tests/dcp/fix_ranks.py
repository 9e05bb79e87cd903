"""Ranks in forked processes that communicate over gloo, FSDP2 models, and notes of each rank."""

from __future__ import annotations

import datetime
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from fix_dcp import equal
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

Notes = dict[str, Any]


class Model:
    """FSDP2 over all ranks, and its AdamW, after some steps."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        for _ in range(4):
            self.step()

    def step(self) -> None:
        self.model(torch.ones(2, 64)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


def locals_of(state: Any) -> Any:
    """Return the local tensors of this rank."""
    if isinstance(state, ShardedTensor):
        return [each.tensor.detach().clone() for each in state.local_shards()]
    if isinstance(state, torch.Tensor):
        return getattr(state, "_local_tensor", state).detach().clone()
    if isinstance(state, dict):
        return {name: locals_of(value) for name, value in state.items()}
    return state


def loads_as(wanted: Any, path: Path | None, **arguments: Any) -> bool:
    """Return whether PyTorch's own calls load this state from a checkpoint into a new model."""
    new = Model(seed=1)
    state = new.state()
    stock.load(state, checkpoint_id=path, **arguments)
    set_state_dict(
        new.model,
        new.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return equal(locals_of(new.state()), wanted)


def fails(function: Any, *arguments: Any) -> str:
    """Return the text of the error that a call raises; fail if it raises none."""
    try:
        function(*arguments)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it raised nothing")


# ---- running them ----

LOSES_A_RANK: list[Any] = []


def loses_a_rank(scenario: Callable[[Path, int], Notes]) -> Callable[[Path, int], Notes]:
    """Mark a scenario in which a rank dies: its ranks then do not meet at the end."""
    LOSES_A_RANK.append(scenario)
    return scenario


def join(store: Path, rank: int, size: int) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=60),
    )


def run(directory: Path, name: str, size: int, scenarios: list[Any], rank: int) -> None:
    torch.set_num_threads(1)
    join(directory / f"store{name}", rank, size)
    for scenario in scenarios:
        path = directory / name / scenario.__name__
        path.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        try:
            notes = scenario(path, rank)
        except BaseException:
            notes = {"raised": traceback.format_exc()}
        (path / f"rank{rank}.json").write_text(json.dumps(notes))
    if not any(each in LOSES_A_RANK for each in scenarios):
        dist.destroy_process_group()


def forked(directory: Path, name: str, size: int, scenarios: list[Any]) -> list[int]:
    """Fork and return the processes of a world's ranks."""
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run(directory, name, size, scenarios, rank)
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    return children


def wait_for(children: list[int]) -> None:
    for child in children:
        os.waitpid(child, 0)


def notes_of(directory: Path, scenario: str, world: object = 2, ranks: int = 2) -> list[Notes]:
    """Return each rank's notes of a scenario."""
    found = [
        json.loads((directory / str(world) / scenario / f"rank{rank}.json").read_text())
        for rank in range(ranks)
    ]
    for each in found:
        assert "raised" not in each, each["raised"]
    return found
