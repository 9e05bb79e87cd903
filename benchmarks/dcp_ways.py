"""The ways of saving on many ranks that dcp.py compares.

A way is a factory, which each rank calls once. The factory returns a function `save(state, path)`.
The result of a call of that function is a future that is done when the save has ended, or an object
with two futures: `staging_completion` (the state is copied) and `upload_completion` (the save has
ended).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from peers import OURS

# The names of the ways, as the table on the terminal shows them.
DEFAULT, STAGER, PROCESS = "DCP async_save", "DCP, DefaultStager kept", "DCP, PROCESS executor"
META = "torch_checkpointing"  # Meta's package
BOUND = "bound: a file a rank, two collectives"
SHARDED = "Lightning, sharded: DCP save"
DISTRIBUTED_IO = "Lightning's DistributedAsyncCheckpointIO"


def _dcp_default() -> Callable[..., Any]:
    """Return DCP's async_save with its defaults, in a group of its own."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as torch_dcp

    group = dist.new_group(backend="gloo")
    return lambda state, path: torch_dcp.async_save(state, checkpoint_id=path, process_group=group)


def _dcp_stager() -> Callable[..., Any]:
    """Return DCP's async_save with one stager that is kept from save to save."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as torch_dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    group = dist.new_group(backend="gloo")
    # It copies on a thread, into memory that it uses again. Pinned memory would need a device.
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=True,
            use_non_blocking_copy=False,
        )
    )
    return lambda state, path: torch_dcp.async_save(
        state, checkpoint_id=path, process_group=group, async_stager=stager
    )


def _dcp_process() -> Callable[..., Any]:
    """Return DCP's async_save that writes in a process of its own."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as torch_dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    group = dist.new_group(backend="gloo")
    return lambda state, path: torch_dcp.async_save(
        state,
        checkpoint_id=path,
        process_group=group,
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )


class _TorchCheckpointingSave:
    """A save of torch_checkpointing with the two futures of a way's result."""

    def __init__(self, manager: Any, write: Future[Any]) -> None:
        self.upload_completion = write
        self.staging_completion = self  # `result` below is that of a future
        self._manager = manager

    def result(self) -> None:
        """Wait until the state is copied, by taking the lock that a training takes for a step."""
        with self._manager.lock():
            pass


def _make_meta_save() -> Callable[..., Any]:
    """Return the save of Meta's package, configured for a machine without an accelerator.

    Version 0.1.1 uses CUDA to gather the data that a load on another number of ranks needs.
    Therefore a checkpoint made here loads only on the same number of ranks. Its O_DIRECT writes of
    this state fail with EINVAL on ext4, so direct I/O is off.
    """
    import torch_checkpointing as meta
    from torch_checkpointing.staging import CheckpointStagerConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
    config = meta.CheckpointManager.Config(
        save=meta.AsyncCheckpointSaverConfig(staging_config=staging),
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    )
    manager = config.build()
    return lambda state, path: _TorchCheckpointingSave(manager, manager.save(str(path), state))


def _ours() -> Callable[..., Any]:
    """Return stillframe.dcp's async_save with its defaults."""
    from stillframe import dcp

    return dcp.async_save


def _lower_bound_save() -> Callable[..., Any]:
    """Return a lower bound: one file for each rank, and then two collectives of one number."""
    import stillframe
    import torch
    import torch.distributed as dist

    group = dist.new_group(backend="gloo")
    begun: queue.SimpleQueue[tuple[Any, Future[None]]] = queue.SimpleQueue()

    def local(node: Any) -> Any:
        """Return `node` with each DTensor replaced by this rank's part of it."""
        if isinstance(node, dict):
            return {name: local(each) for name, each in node.items()}
        if isinstance(node, torch.Tensor):
            return getattr(node, "_local_tensor", node)  # only a DTensor has it
        return node

    def end_saves() -> None:  # on a thread: ends each save that `save` has begun
        while True:
            handle, done = begun.get()
            handle.result()
            for _ in range(2):  # two collectives
                dist.all_reduce(torch.zeros(1), group=group)
            done.set_result(None)

    def save(state: Any, path: Path) -> Any:
        path.mkdir(exist_ok=True)
        done: Future[None] = Future()
        handle = stillframe.async_save(local(state), path / f"{dist.get_rank()}.pt")
        begun.put((handle, done))
        return done

    threading.Thread(target=end_saves, daemon=True).start()
    return save


def _sharded_save() -> Callable[..., Any]:
    """Return the save of Lightning's sharded strategies: DCP's save, which ends in the call."""
    import torch.distributed.checkpoint as torch_dcp

    def save(state: Any, path: Path) -> Any:
        done: Future[Any] = Future()
        done.set_result(torch_dcp.save(state, checkpoint_id=path))
        return done

    return save


def _distributed_io_save() -> Callable[..., Any]:
    """Return the save of Lightning's DistributedAsyncCheckpointIO: see --lightning in dcp.py."""
    import torch.distributed.checkpoint as torch_dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    planner = torch_dcp.DefaultSavePlanner(enable_plan_caching=True)
    previous: Any = None  # the future of the previous save

    def save(state: Any, path: Path) -> Any:
        nonlocal previous
        if previous is not None:
            previous.result()
        previous = torch_dcp.async_save(
            state,
            checkpoint_id=path,
            no_dist=False,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            planner=planner,
        )
        return previous

    return save


WAYS = {
    DEFAULT: _dcp_default,
    STAGER: _dcp_stager,
    PROCESS: _dcp_process,
    META: _make_meta_save,
    OURS: _ours,
    BOUND: _lower_bound_save,
}
LIGHTNING = {SHARDED: _sharded_save, DISTRIBUTED_IO: _distributed_io_save}
ALL = {**WAYS, **LIGHTNING}
PACKAGES = {META: "torch_checkpointing"}  # the package that a way needs besides torch


def is_installed(way: str) -> bool:
    return way not in PACKAGES or find_spec(PACKAGES[way]) is not None
