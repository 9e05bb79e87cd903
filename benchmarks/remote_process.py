"""One way to save to a store, for `remote.py`, in the process that is measured."""

from __future__ import annotations

import os
import time
from typing import Any

from common import BenchError, Spec, Stamp
from machine import Others, keep_memory, reset_peak_rss, status_bytes
from peers import LIGHTNING, OURS, TORCH, LightningAsync, Peer

BUCKET = "bkt"
EIGHTH = f"{OURS}, pool of an eighth"  # a pool of an eighth of the state's bytes
LIGHTNING_ASYNC = f"{LIGHTNING}, asynchronous"
BLOCK_BYTES = 16 << 20  # a pool has at least one block
WARM_STEPS = 5  # before the first save
GIVE_UP_S = 600.0  # a save that takes longer has hung


class TorchSave(Peer):
    """torch.save into a file that fsspec has opened."""

    def save(self, tree: Any, path: str, stamp: Stamp) -> None:
        import fsspec
        import torch

        with fsspec.open(path, "wb") as file:
            torch.save(tree, file)
        stamp()


class Lightning(Peer):
    """Lightning's TorchCheckpointIO: torch.save into memory, then one `pipe` of fsspec."""

    def __init__(self) -> None:
        from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

        self._io = TorchCheckpointIO()

    def save(self, tree: Any, path: str, stamp: Stamp) -> None:
        self._io.save_checkpoint(tree, path)
        stamp()


class Stillframe(Peer):
    """stillframe.async_save to a URL."""

    def __init__(self) -> None:
        self._handle: Any = None

    def save(self, tree: Any, path: str, stamp: Stamp) -> None:
        import stillframe

        self._handle = stillframe.async_save(tree, path)
        self._handle.add_done_callback(stamp)

    def collect(self) -> dict[str, float]:
        report = self._handle.result()
        return {
            "gate_wait_s": report.gate_wait_s,
            "backpressure_s": report.backpressure_s,
            "peak_pool_bytes": float(report.peak_pool_bytes),
        }


WAYS: dict[str, type[Peer]] = {
    TORCH: TorchSave,
    LIGHTNING: Lightning,
    LIGHTNING_ASYNC: LightningAsync,
    OURS: Stillframe,
    EIGHTH: Stillframe,
}


class Saves:
    """A training and one way to save it; the parent calls its methods."""

    def __init__(self, way: str, spec: Spec, endpoint: str) -> None:
        os.environ |= {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            os.environ.pop(name, None)
        if way == EIGHTH:
            os.environ["STILLFRAME_POOL_BYTES"] = str(max(BLOCK_BYTES, spec.nbytes // 8))
        import torch

        torch.set_num_threads(spec.threads)
        import states

        self._state = states.make(spec)
        self._peer = WAYS[way]()
        self._number = 0
        self._rss = 0  # resident bytes just before the first save; 0 until then
        for _ in range(WARM_STEPS):
            self._state.step(8)
        keep_memory()

    def step_s(self, batch: int, steps: int = 4) -> float:
        """Return the mean seconds of a step, after one that is not counted."""
        self._state.step(batch)
        start = time.perf_counter()
        for _ in range(steps):
            self._state.step(batch)
        return (time.perf_counter() - start) / steps

    def nbytes(self) -> int:
        return self._state.nbytes

    def save(self) -> tuple[str, dict[str, float]]:
        """Save once while nothing else is done; return the object's key and the figures."""
        self._state.step(8)
        tree, stamp, key = self._state.tree(), Stamp(), self._next_key()
        if not self._rss:
            self._rss = status_bytes("VmRSS")
        reset_peak_rss()
        others = Others()
        start = time.perf_counter_ns()
        self._peer.save(tree, f"s3://{BUCKET}/{key}", stamp)
        call_s = (time.perf_counter_ns() - start) / 1e9
        while not stamp.at_ns:
            time.sleep(0.002)
            if time.perf_counter_ns() - start > GIVE_UP_S * 1e9:
                raise BenchError(f"a save has not finished after {GIVE_UP_S:.0f} s")
        peer_figures = self._peer.collect()
        peak = status_bytes("VmHWM")
        return key, {
            "call_s": call_s,
            "finished_s": (stamp.at_ns - start) / 1e9,
            "extra_rss": (peak - self._rss) / self._state.nbytes,
            "others": others.share(),
            **peer_figures,
        }

    def loop(self, steps: int, batch: int) -> tuple[str, dict[str, float]]:
        """Measure the time that a save costs a training loop.

        `steps` plain steps are timed, half of them before the save and half after. In between the
        training makes at least `steps` steps, until the store has acknowledged the save.

        Returns:
            The object's key and the figures.
        """
        stamp, key, count = Stamp(), self._next_key(), 0
        plain_s = self._timed_steps(steps // 2, batch)
        start = time.perf_counter()
        tree = self._state.tree()
        self._peer.save(tree, f"s3://{BUCKET}/{key}", stamp)
        call_s = time.perf_counter() - start
        del tree
        while count < steps or not stamp.at_ns:
            self._state.step(batch)
            count += 1
            if time.perf_counter() - start > GIVE_UP_S:
                raise BenchError(f"a save has not finished after {GIVE_UP_S:.0f} s")
        total_s = time.perf_counter() - start
        peer_figures = self._peer.collect()
        plain_s += self._timed_steps(steps - steps // 2, batch)
        step_s = plain_s / steps
        return key, {
            "lost_s": total_s - count * step_s,
            "call_s": call_s,
            "gate_s": peer_figures.get("gate_wait_s", 0.0),
            "step_s": step_s,
            "steps": float(count),
            "speed": count * step_s / total_s,
        }

    def close(self) -> None:
        self._peer.close()

    def _timed_steps(self, steps: int, batch: int) -> float:
        """Return the seconds that all of `steps` steps take together."""
        self._state.step(batch)  # not counted: threads wake up in it after a pause
        start = time.perf_counter()
        for _ in range(steps):
            self._state.step(batch)
        return time.perf_counter() - start

    def _next_key(self) -> str:
        self._number += 1
        return f"{os.getpid()}/save{self._number}.ckpt"
