"""Ways to save from a GPU, each as its users call it, behind one small interface.

The training calls `start(tree, path)`, then `gate()` before the next optimizer step, and at last
`finish()`. `finish()` returns when the save is as complete as that way ever reports. stillframe
needs no `gate()`, because its hook on the step waits. Peers are used as their documentation shows,
with the options that are best here.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

OURS = "stillframe"
DETACH = "detach().cpu(), torch.save"
LIGHTNING = "Lightning AsyncCheckpointIO"
STAGER = "DCP + DefaultStager, pinned"
CACHED = "DCP + cached pinned writer"


class Way:
    """One way to save."""

    durable = False  # whether the bytes are on the disk when `finish` returns

    def start(self, tree: Any, path: Path) -> None:
        """Begin to save `tree` at `path`, as this way's own call does."""
        raise NotImplementedError

    def gate(self) -> None:
        """Wait until the next step may change the state. By default `start` has copied it all."""

    def finish(self) -> dict[str, Any]:
        """Wait for the end; return the figures that only this way has."""
        return {}

    def close(self) -> None:
        """End threads and process groups that the way keeps from save to save."""


class DetachCpu(Way):
    """A way that copies each tensor to the host in the call, and calls torch.save in it."""

    def start(self, tree: Any, path: Path) -> None:
        import torch
        from torch.utils import _pytree

        def to_cpu(leaf: Any) -> Any:
            return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf

        torch.save(_pytree.tree_map(to_cpu, tree), path)


class LightningAsync(Way):
    """A way that clones every tensor on the GPU, and then calls torch.save on a thread."""

    def __init__(self) -> None:
        import lightning.pytorch.plugins.io as plugins

        self._plugins = plugins
        self._io: Any = None

    def start(self, tree: Any, path: Path) -> None:
        # A new plugin for each save, because `finish` tears it down.
        self._io = self._plugins.AsyncCheckpointIO(self._plugins.TorchCheckpointIO())
        if hasattr(self._io, "setup"):  # not in every version of Lightning
            self._io.setup()
        self._io.save_checkpoint(tree, path)

    def finish(self) -> dict[str, Any]:
        self._io.teardown()
        return {}


class DcpStager(Way):
    """DCP with a stager whose thread copies into pinned memory; `gate` waits for that copy."""

    def __init__(self) -> None:
        import torch.distributed as dist
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=True,
                use_shared_memory=False,
                use_async_staging=True,
                use_non_blocking_copy=True,
            )
        )
        self._response: Any = None

    def start(self, tree: Any, path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        shutil.rmtree(path, ignore_errors=True)  # the checkpoint of the save before
        self._response = dcp.async_save(tree, checkpoint_id=path, async_stager=self._stager)

    def gate(self) -> None:
        self._response.staging_completion.result()

    def finish(self) -> dict[str, Any]:
        self._response.upload_completion.result()
        return {}

    def close(self) -> None:
        import torch.distributed as dist

        self._stager.close()
        dist.destroy_process_group()


class DcpCached(Way):
    """DCP with a writer that keeps pinned copies from save to save; the call waits for the copy."""

    def __init__(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self._writer: Any = None
        self._future: Any = None

    def start(self, tree: Any, path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        if self._writer is None:
            self._writer = dcp.FileSystemWriter(path, cache_staged_state_dict=True)
        self._future = dcp.async_save(tree, storage_writer=self._writer)

    def finish(self) -> dict[str, Any]:
        self._future.result()
        return {}

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


class Ours(Way):
    """stillframe.async_save with its defaults."""

    durable = True

    def __init__(self) -> None:
        import stillframe

        self._module = stillframe
        self._handle: Any = None

    def start(self, tree: Any, path: Path) -> None:
        self._handle = self._module.async_save(tree, path)

    def finish(self) -> dict[str, Any]:
        report = self._handle.result()
        return {
            "call_s": report.blocked_s,
            "gate_wait_s": report.gate_wait_s,
            "staged_after_s": report.staged_after_s,
            "durable_after_s": report.durable_after_s,
            "deferred_nbytes": report.deferred_nbytes,
            "captured_nbytes": report.captured_nbytes,
            "num_tensors": report.num_tensors,
            "io_mode": report.io_mode,
            "fallbacks": list(report.fallbacks),
        }


WAYS: dict[str, type[Way]] = {
    OURS: Ours,
    DETACH: DetachCpu,
    LIGHTNING: LightningAsync,
    STAGER: DcpStager,
    CACHED: DcpCached,
}


NR_QUANTILES = 1000  # how many are kept of one series of times, besides the shortest time


class ItemTimer:
    """A timer of `.item()` calls on a stream of its own, to see how a save delays other streams."""

    def __init__(self, torch: Any, device: str) -> None:
        self._torch = torch
        self._value = torch.ones(16, device=device)
        self._stream = torch.cuda.Stream() if device == "cuda" else None

    def once(self) -> float:
        start = time.perf_counter()
        if self._stream is None:
            self._value.sum().item()
        else:
            with self._torch.cuda.stream(self._stream):
                self._value[3].item()  # a copy of four bytes, without a kernel
        return time.perf_counter() - start

    def times(self, seconds: float, until: Any = None) -> list[float]:
        """Call `.item()` until `seconds` are over or `until()` returns true.

        Returns:
            NR_QUANTILES + 1 quantiles of the seconds of the calls, from the shortest to the
            longest. If there were fewer calls, values repeat. After one call or none, the list has
            one time or none.
        """
        found, end = [], time.perf_counter() + seconds
        while time.perf_counter() < end:
            if until is not None and until():
                break
            found.append(self.once())
        if len(found) <= 1:
            return found
        found.sort()
        last = len(found) - 1
        return [found[k * last // NR_QUANTILES] for k in range(NR_QUANTILES + 1)]
