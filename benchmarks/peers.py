"""The ways to save that are compared, stillframe among them: the peers.

All have the same method `save(tree, path, stamp)`, which returns when that way's call returns to
the training. The thread that finishes the save calls `stamp`. session.py runs each peer in a
process of its own.
"""

from __future__ import annotations

import importlib
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import Stamp

# The names of the ways in tables and JSON; RAW is the disk's or the memory's own speed.
OURS, LIGHTNING, TORCH, RAW = "stillframe", "Lightning", "torch.save", "raw"
TORCH_NO_CRC, DCP, DCP_STAGER = "torch.save, no CRC", "DCP", "DCP + DefaultStager"


class Peer:
    """One way to save. Each subclass defines `save`, and the other methods where it differs."""

    def save(self, tree: Any, path: str, stamp: Stamp) -> None:
        """Begin to save `tree`; call `stamp` from any thread when the save has finished."""
        raise NotImplementedError

    def collect(self) -> dict[str, float]:
        """Return the peer's own figures of the last save, or raise that save's error.

        Call it once after each save, when its stamp has been called.
        """
        return {}

    def progress(self, directory: Path) -> int:
        """Return how many bytes of the save in flight are written.

        By default these are the lengths of all files in `directory`.
        """
        return sum(p.stat().st_size for p in directory.rglob("*") if p.is_file())

    def load(self, path: Path, tree: Any) -> Any:
        """Return the checkpoint at `path`; `tree` is the state that was saved there."""
        import torch

        return torch.load(path, mmap=True, weights_only=False)

    def close(self) -> None:
        """End threads and process groups that the peer keeps from save to save."""


class TorchSave(Peer):
    """torch.save: everything happens in the call, nothing is synced."""

    def __init__(self) -> None:
        import torch

        self._save = torch.save

    def save(self, tree: Any, path: str, stamp: Stamp) -> None:
        self._save(tree, path)
        stamp()


class TorchSaveNoCrc(TorchSave):
    """torch.save without CRCs in the file, so that damage to it goes unnoticed."""

    def __init__(self) -> None:
        super().__init__()
        import torch

        torch.serialization.set_crc32_options(False)


class _WatchedExecutor(ThreadPoolExecutor):
    """A one-thread executor that calls `stamp` at the end of each job.

    Lightning keeps no future of its saves, so this is how the benchmark learns of their end. The
    saving thread calls the stamp, so nothing has to poll.
    """

    def __init__(self) -> None:
        super().__init__(max_workers=1)
        self.stamp: Stamp | None = None

    def submit(self, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = super().submit(*args, **kwargs)
        if self.stamp is not None:
            future.add_done_callback(self.stamp)
        return future


class LightningAsync(Peer):
    """Lightning's AsyncCheckpointIO over its TorchCheckpointIO, as a Trainer sets it up.

    Only its executor is replaced: a _WatchedExecutor has as many threads and also calls the stamp.
    """

    def __init__(self) -> None:
        from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
        from lightning.pytorch.plugins.io.async_plugin import AsyncCheckpointIO

        self._io = AsyncCheckpointIO(TorchCheckpointIO())
        self._executor = _WatchedExecutor()
        self._io._executor = self._executor

    def save(self, tree: Any, path: str, stamp: Stamp) -> None:
        self._executor.stamp = stamp
        self._io.save_checkpoint(tree, path)

    def collect(self) -> dict[str, float]:
        if self._io._error is not None:
            raise self._io._error
        return {}

    def close(self) -> None:
        self._io.teardown()


class Dcp(Peer):
    """torch.distributed.checkpoint.async_save with its defaults: the call copies everything."""

    def __init__(self) -> None:
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self._dcp = dcp
        self._upload: Future[Any] | None = None

    def save(self, tree: Any, path: str, stamp: Stamp) -> None:
        self._upload = self._dcp.async_save(tree, checkpoint_id=path)
        self._upload.add_done_callback(stamp)

    def collect(self) -> dict[str, float]:
        assert self._upload is not None
        self._upload.result()
        return {}

    def load(self, path: Path, tree: Any) -> Any:
        import torch
        from torch.utils import _pytree

        def blank(leaf: Any) -> Any:
            return torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else leaf

        loaded = _pytree.tree_map(blank, tree)  # DCP loads into tensors that exist
        self._dcp.load(loaded, checkpoint_id=path)
        return loaded

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


class DcpStager(Dcp):
    """DCP with a DefaultStager that copies on a thread, into memory that is not pinned.

    The next optimizer step has to wait for that copy, and it is up to the user to make it wait.
    Here a step hook waits, and its wait is counted as the gate.
    """

    def __init__(self) -> None:
        super().__init__()
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=True,
                use_non_blocking_copy=False,
            )
        )
        self._staging: Future[Any] | None = None
        self._waited_s = 0.0
        register_optimizer_step_pre_hook(lambda *_: self._wait_at_gate())

    def _wait_at_gate(self) -> None:
        if self._staging is not None:
            start = time.perf_counter()
            self._staging.result()
            self._waited_s += time.perf_counter() - start
            self._staging = None

    def save(self, tree: Any, path: str, stamp: Stamp) -> None:
        self._waited_s = 0.0
        response = self._dcp.async_save(tree, checkpoint_id=path, async_stager=self._stager)
        self._staging, self._upload = response.staging_completion, response.upload_completion
        self._upload.add_done_callback(stamp)

    def collect(self) -> dict[str, float]:
        super().collect()
        self._staging = None
        return {"gate_wait_s": self._waited_s}

    def close(self) -> None:
        self._stager.close()
        super().close()


class Stillframe(Peer):
    """stillframe.async_save with its defaults; finished means durable, both syncs included."""

    def __init__(self) -> None:
        self._module = importlib.import_module("stillframe")
        self._handle: Any = None

    def save(self, tree: Any, path: str, stamp: Stamp) -> None:
        self._handle = self._module.async_save(tree, path)
        self._handle.add_done_callback(stamp)

    def collect(self) -> dict[str, float]:
        report = self._handle.result()
        self._handle = None
        facts = {
            name: float(getattr(report, name))
            for name in (
                "nbytes",
                "captured_nbytes",
                "deferred_nbytes",
                "blocked_s",
                "gate_wait_s",
                "backpressure_s",
                "staged_after_s",
                "durable_after_s",
                "peak_pool_bytes",
            )
        }
        facts["direct"] = float(report.io_mode == "direct")
        return facts

    def progress(self, directory: Path) -> int:
        """Return the bytes written as the handle reports them.

        The file's length does not show them: it is the full length from the start.
        """
        return int(self._handle.progress()[0])

    def close(self) -> None:
        self._module.wait_all()


# name -> (class, package it needs), in the order of the columns
PEERS: dict[str, tuple[type[Peer], str]] = {
    TORCH: (TorchSave, "torch"),
    TORCH_NO_CRC: (TorchSaveNoCrc, "torch"),
    LIGHTNING: (LightningAsync, "lightning"),
    DCP: (Dcp, "torch"),
    DCP_STAGER: (DcpStager, "torch"),
    OURS: (Stillframe, "stillframe"),
}
