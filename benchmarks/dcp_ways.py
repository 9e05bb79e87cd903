"""The ways of saving on many ranks that dcp.py compares: each is made once on a rank, and called
with a state dict and a path."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from peers import OURS

DEFAULT, STAGER, PROCESS = "DCP async_save", "DCP, DefaultStager kept", "DCP, PROCESS executor"
BOUND = "bound: a file a rank, two collectives"
SHARDED = "Lightning, sharded: DCP save"
PEER = "Lightning's DistributedAsyncCheckpointIO"


def _default() -> Callable[..., Any]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as stock

    group = dist.new_group(backend="gloo")
    return lambda state, path: stock.async_save(state, checkpoint_id=path, process_group=group)


def _stager() -> Callable[..., Any]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as stock
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    group = dist.new_group(backend="gloo")
    # On a thread, into memory that is used again; what is pinned or shared wants a device.
    stager = DefaultStager(StagingOptions(False, False, True, False))
    return lambda state, path: stock.async_save(
        state, checkpoint_id=path, process_group=group, async_stager=stager
    )


def _process() -> Callable[..., Any]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as stock
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    group = dist.new_group(backend="gloo")
    return lambda state, path: stock.async_save(
        state,
        checkpoint_id=path,
        process_group=group,
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )


def _ours() -> Callable[..., Any]:
    from stillframe import dcp

    return dcp.async_save


def _bound() -> Callable[..., Any]:
    """What no save of many ranks can be sooner than: one file a rank, and then two collectives, as
    long as neither knows of more than that."""
    import stillframe
    import torch
    import torch.distributed as dist

    group = dist.new_group(backend="gloo")
    begun: queue.SimpleQueue[tuple[Any, Future[None]]] = queue.SimpleQueue()

    def local(node: Any) -> Any:
        if isinstance(node, dict):
            return {name: local(each) for name, each in node.items()}
        return getattr(node, "_local_tensor", node) if isinstance(node, torch.Tensor) else node

    def end() -> None:
        while True:
            handle, done = begun.get()
            handle.result()
            for _ in range(2):
                dist.all_reduce(torch.zeros(1), group=group)
            done.set_result(None)

    def save(state: Any, path: Path) -> Any:
        path.mkdir(exist_ok=True)
        done: Future[None] = Future()
        begun.put((stillframe.async_save(local(state), path / f"{dist.get_rank()}.pt"), done))
        return done

    threading.Thread(target=end, daemon=True).start()
    return save


def _sharded() -> Callable[..., Any]:
    import torch.distributed.checkpoint as stock

    def save(state: Any, path: Path) -> Any:
        done: Future[Any] = Future()
        done.set_result(stock.save(state, checkpoint_id=path))
        return done

    return save


def _peer() -> Callable[..., Any]:
    import torch.distributed.checkpoint as stock
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    planner = stock.DefaultSavePlanner(enable_plan_caching=True)
    before: list[Any] = []

    def save(state: Any, path: Path) -> Any:
        for each in before:
            each.result()
        before[:] = [
            stock.async_save(
                state,
                checkpoint_id=path,
                no_dist=False,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                planner=planner,
            )
        ]
        return before[0]

    return save


WAYS = {DEFAULT: _default, STAGER: _stager, PROCESS: _process, OURS: _ours, BOUND: _bound}
LIGHTNING = {SHARDED: _sharded, PEER: _peer}
ALL = {**WAYS, **LIGHTNING}
