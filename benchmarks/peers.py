"""The three ways to save that are compared, and the process that each is measured in.

A peer hides one way behind `save(tree, path, stamp)`: it returns when the call returns to the
training thread, and `stamp` is called by whatever thread finishes the save. `Worker` runs one
peer in a process of its own, so that memory, allocator and thread pools of one never show up in
the figures of another; it answers one command at a time and sleeps in between.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import math
import multiprocessing
import os
import signal
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from common import BenchError, Stamp, Training, plain_tensors, tick
from machine import Others, reset_peak_rss, status_bytes

CALIBRATE_NS = 400_000_000  # the main thread's own speed is taken over this long before each save
TAIL_NS = 50_000_000  # stalls are watched for this long after the end: memory is given back there
WARM_STEPS = 5  # real steps before the first save
SAVE_BATCH = 8  # rows a step between the saves of the idle and busy scenarios
GIVE_UP_NS = 600 * 10**9  # a save that takes longer has hung


class Peer(Protocol):
    """One way to save."""

    def save(self, tree: Any, path: str, stamp: Stamp) -> None:
        """Begins to save `tree`; `stamp` is called when the save has finished."""

    def collect(self) -> dict[str, float]:
        """After the stamp: raises what went wrong; gives the peer's own figures of that save."""

    def close(self) -> None:
        """Ends what the peer keeps between saves."""


class TorchSave:
    """torch.save: everything happens in the call, nothing is synced."""

    def __init__(self) -> None:
        import torch

        self._save = torch.save

    def save(self, tree: Any, path: str, stamp: Stamp) -> None:
        self._save(tree, path)
        stamp()

    def collect(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


class _WatchedExecutor(ThreadPoolExecutor):
    """Stamps the end of each job: Lightning keeps no future of its saves.

    The stamp is a done callback, called by the saving thread itself: nobody polls.
    """

    def __init__(self) -> None:
        super().__init__(max_workers=1)
        self.stamp: Stamp | None = None

    def submit(self, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = super().submit(*args, **kwargs)
        if self.stamp is not None:
            future.add_done_callback(self.stamp)
        return future


class LightningAsync:
    """Lightning's AsyncCheckpointIO over its TorchCheckpointIO, as a Trainer sets it up.

    The one thing replaced is its executor, by one of the same kind and size that stamps the end.
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


class Stillframe:
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

    def close(self) -> None:
        self._module.wait_all()


PEERS: dict[str, type[TorchSave] | type[LightningAsync] | type[Stillframe]] = {
    "torch.save": TorchSave,
    "Lightning": LightningAsync,
    "stillframe": Stillframe,
}


# ---- inside the measured process -----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a measured process holds.

    nbytes: parameters and optimizer state together, or the plain tensors. nr_params: weights
    (a third of the tensors). owned: a model under AdamW, or a dict of tensors nobody owns.
    threads: torch.set_num_threads.
    """

    nbytes: int
    nr_params: int
    owned: bool
    threads: int


class _Session:
    """The measured process: one peer, one state."""

    def __init__(self, peer: str, spec: Spec, directory: str) -> None:
        import torch

        torch.set_num_threads(spec.threads)
        self._peer: Peer = PEERS[peer]()
        self._directory = Path(directory)
        self._training: Training | None = None
        self._number = 0
        if spec.owned:
            self._training = Training(spec.nbytes, spec.nr_params)
            self._nbytes = self._training.nbytes
            for _ in range(WARM_STEPS):
                self._training.step(SAVE_BATCH)
        else:
            self._tensors = plain_tensors(spec.nbytes, 3 * spec.nr_params)
            self._nbytes = sum(t.nbytes for t in self._tensors.values())
        gc.collect()
        self._rss = 0  # before the first save

    def info(self) -> dict[str, float]:
        return {"state_nbytes": self._nbytes}

    def _tree(self) -> Any:
        return self._tensors if self._training is None else self._training.tree()

    def _next_path(self) -> Path:
        self._number += 1
        return self._directory / f"save{self._number}.pt"

    def save(self, busy: bool, check: bool) -> dict[str, float]:
        """One save with the main thread busy or idle beside it.

        check: load the file afterwards and compare the first, middle and last tensors.
        """
        if self._training is not None:
            self._training.step(SAVE_BATCH)
        tree, path, stamp = self._tree(), self._next_path(), Stamp()
        time.sleep(0.2)
        begin = time.perf_counter_ns()
        others = Others()
        alone = tick(Stamp(), begin, begin + CALIBRATE_NS, busy=busy)
        self._rss = self._rss or status_bytes("VmRSS")
        reset_peak_rss()
        start = time.perf_counter_ns()
        self._peer.save(tree, str(path), stamp)
        returned = time.perf_counter_ns()
        beside = tick(stamp, returned, returned + GIVE_UP_NS, busy=busy)
        after = returned + beside.elapsed_ns
        tail = tick(Stamp(), after, after + TAIL_NS, busy=busy)
        if not stamp.at_ns:
            raise BenchError(f"a save has not finished after {GIVE_UP_NS / 1e9:.0f} s")
        peak = status_bytes("VmHWM")
        figures = {
            "call_s": (returned - start) / 1e9,
            "finished_s": (stamp.at_ns - start) / 1e9,
            "rss_before": float(self._rss),
            "extra_rss": (peak - self._rss) / self._nbytes,
            "others": others.share(),
            "file_nbytes": float(path.stat().st_size),
            **{f"report_{k}": v for k, v in self._peer.collect().items()},
        }
        if stamp.at_ns > returned:
            figures |= {
                "speed": beside.rate / alone.rate,
                "stall_s": max(beside.worst_ns, tail.worst_ns) / 1e9,
                "stall_alone_s": alone.worst_ns / 1e9,
            }
        if check:
            self._check(tree, path)
        path.unlink()
        return figures

    def _check(self, tree: Any, path: Path) -> None:
        import torch

        loaded = torch.load(path, mmap=True, weights_only=True)
        expected, found = (_tensors(t) for t in (tree, loaded))
        if len(expected) != len(found):
            raise BenchError(f"{path.name} holds {len(found)} tensors of {len(expected)}")
        for i in {0, len(expected) // 2, len(expected) - 1}:
            if not torch.equal(expected[i], found[i]):
                raise BenchError(f"{path.name}: tensor {i} differs from what was saved")

    def pair(self, steps: int, batch: int) -> dict[str, float]:
        """Training steps with one save before the first, between as many without a save.

        Half of the plain steps come before and half after, so a machine that grows slower or
        faster does not count as lost time. The steps with a save go on until it has finished,
        so that none of its work is left out.
        """
        training = self._training
        if training is None:
            raise BenchError("a training loop needs a state with an optimizer")
        others = Others()
        plain_s = _timed_steps(training, steps // 2, batch)
        path, stamp, count = self._next_path(), Stamp(), 0
        start = time.perf_counter_ns()
        tree = training.tree()
        call_start = time.perf_counter_ns()
        self._peer.save(tree, str(path), stamp)
        call_s = (time.perf_counter_ns() - call_start) / 1e9
        del tree
        while count < steps or not stamp.at_ns:
            training.step(batch)
            count += 1
        total_s = (time.perf_counter_ns() - start) / 1e9
        own = self._peer.collect()
        path.unlink()
        plain_s += _timed_steps(training, steps - steps // 2, batch)
        lost_s = total_s - count * plain_s / steps
        gate_s = own.get("gate_wait_s", 0.0)
        return {
            "lost_s": lost_s,
            "call_s": call_s,
            "gate_s": gate_s,
            "slowdown_s": lost_s - call_s - gate_s,
            "finished_s": (stamp.at_ns - call_start) / 1e9,
            "step_s": plain_s / steps,
            "steps": float(count),
            "others": others.share(),
            **{f"report_{k}": v for k, v in own.items()},
        }

    def close(self) -> dict[str, float]:
        self._peer.close()
        return {}


def _timed_steps(training: Training, steps: int, batch: int) -> float:
    training.step(batch)  # not counted: it wakes what a pause has let fall asleep
    start = time.perf_counter_ns()
    for _ in range(steps):
        training.step(batch)
    return (time.perf_counter_ns() - start) / 1e9


def _tensors(tree: Any) -> list[Any]:
    import torch

    if isinstance(tree, torch.Tensor):
        return [tree]
    children = tree.values() if isinstance(tree, dict) else tree
    if not isinstance(tree, dict | list | tuple):
        return []
    return [tensor for child in children for tensor in _tensors(child)]


def _serve(conn: Connection, peer: str, spec: Spec, directory: str) -> None:
    """A worker's main function: one command at a time until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us, and removes the files
    # Lightning writes its temporary where tempfile says; keep it on the disk that is measured.
    os.environ["TMPDIR"] = directory
    try:
        session = _Session(peer, spec, directory)
        conn.send(("ok", session.info()))
        while True:
            name, arguments = conn.recv()
            conn.send(("ok", getattr(session, name)(**arguments)))
            if name == "close":
                return
    except (EOFError, BrokenPipeError):
        return
    except BaseException as error:
        with contextlib.suppress(OSError):
            conn.send(("failed", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


# ---- in the parent -------------------------------------------------------------------------


class Worker:
    """One peer over one state in a fresh process (spawned, never forked); a context manager."""

    def __init__(self, peer: str, spec: Spec, directory: Path) -> None:
        self.peer = peer
        own = directory / f"{peer}-{time.monotonic_ns()}"
        own.mkdir()
        context = multiprocessing.get_context("spawn")
        self._conn, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, peer, spec, str(own)), daemon=True
        )
        self._process.start()
        theirs.close()
        self.info: dict[str, float] = {}

    def ready(self) -> None:
        """Waits until the state stands and its first steps are done."""
        self.info = self._answer()

    def call(self, name: str, **arguments: Any) -> dict[str, float]:
        """Runs one command there; BenchError with the worker's own traceback if it fails."""
        self._conn.send((name, arguments))
        return self._answer()

    def _answer(self) -> dict[str, float]:
        try:
            if not self._conn.poll(GIVE_UP_NS / 1e9 + 60):
                raise BenchError(f"{self.peer}: no answer from its process")
            kind, value = self._conn.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            raise BenchError(
                f"{self.peer}: its process died (exit code {self._process.exitcode})"
            ) from None
        if kind != "ok":
            raise BenchError(f"{self.peer}: {value}")
        return {str(k): float(v) for k, v in value.items() if not math.isnan(v)}

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.call("close")
            self._process.join(30)
        self._conn.close()
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
