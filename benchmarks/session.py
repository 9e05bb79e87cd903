"""The measurements of one peer over one state, in the process that is measured."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import BenchError, Spec, Stamp, tick
from machine import Others, keep_memory, reset_peak_rss, status_bytes
from peers import PEERS, Peer

CALIBRATE_NS = 400_000_000  # for this long the main thread's own speed is measured before each save
TAIL_NS = 50_000_000  # stalls are counted for this long after a save, while its memory is freed
WARM_STEPS = 5  # real steps before the first save
SAVE_BATCH = 8  # rows a step between the saves of the idle and busy scenarios
GIVE_UP_NS = 600 * 10**9  # a save that takes longer has hung
# The pause before the late step of scenario gate. It should suffice for the copy.
LATE_STEP_S = 1.0
SAMPLE_S = 0.002  # pause between two readings of the bytes written

Answer = dict[str, float]  # the result of a measurement: metric -> value


class Session:
    """A state, the peer that saves it, and a directory for the files; the parent calls its
    methods."""

    def __init__(self, peer: str, spec: Spec, directory: Path) -> None:
        import states

        self._directory = Path(tempfile.mkdtemp(dir=directory))
        # Lightning writes its temporary where tempfile says: on the measured disk.
        os.environ["TMPDIR"] = str(self._directory)

        self._state = states.make(spec)
        self._tensors_of = states.tensors_of
        # The state comes first: it sets STILLFRAME_POOL_BYTES and may make Lightning's Trainer.
        self._peer: Peer = PEERS[peer][0]()
        self._number = 0
        for _ in range(WARM_STEPS):
            self._state.step(SAVE_BATCH)
        gc.collect()
        self._rss = 0  # resident bytes just before the first save; 0 until then

    def info(self) -> Answer:
        """Return the size of the state."""
        return {
            "state_nbytes": float(self._state.nbytes),
            "num_tensors": float(self._state.num_tensors),
        }

    def _next_path(self) -> Path:
        self._number += 1
        return self._directory / f"save{self._number}.pt"

    def save(self, busy: bool, check: bool, computing: int = 0) -> Answer:
        """Save once with the main thread busy or idle meanwhile; return the figures.

        check: load the file afterwards and compare its first, middle and last tensor. computing:
        the number of threads that need the interpreter lock all the time until the save has ended.
        """
        # Before the threads start, because next to them a step takes half a minute.
        self._state.step(SAVE_BATCH)
        tree = self._state.tree()
        with _run_computing_threads(computing):
            figures, path = self._timed_save(tree, busy)
        if check:
            self._check(tree, path)
        _remove(path)
        return figures

    def _timed_save(self, tree: Any, busy: bool) -> tuple[Answer, Path]:
        """Save once; return the figures and the file's path.

        The main thread ticks for CALIBRATE_NS before the call, then until the save has finished,
        and for TAIL_NS after that.
        """
        state, path, stamp = self._state, self._next_path(), Stamp()
        time.sleep(0.2)
        begin = time.perf_counter_ns()
        others = Others()
        # Nobody calls this Stamp, so the ticks end after CALIBRATE_NS.
        alone = tick(Stamp(), begin, begin + CALIBRATE_NS, busy=busy)
        if not self._rss:
            self._rss = status_bytes("VmRSS")
        reset_peak_rss()
        start = time.perf_counter_ns()
        self._peer.save(tree, str(path), stamp)
        returned = time.perf_counter_ns()
        during = tick(stamp, returned, returned + GIVE_UP_NS, busy=busy)
        after = returned + during.elapsed_ns
        # Freeing the save's memory may stall the thread too.
        tail = tick(Stamp(), after, after + TAIL_NS, busy=busy)
        if not stamp.at_ns:
            raise BenchError(f"a save has not finished after {GIVE_UP_NS / 1e9:.0f} s")
        peak = status_bytes("VmHWM")
        call_s = (returned - start) / 1e9
        figures = {
            "call_s": call_s,
            "call_of_budget": call_s / (2e-6 * state.num_tensors + 1e-3),  # 2 µs a tensor + 1 ms
            "finished_s": (stamp.at_ns - start) / 1e9,
            "rss_before": float(self._rss),
            "extra_rss": (peak - self._rss) / state.nbytes,
            "extra_rss_less_32mib": (peak - self._rss - (32 << 20)) / state.nbytes,
            "others": others.share(),
            "file_nbytes": float(_nbytes_of(path)),
            **{f"report_{name}": value for name, value in self._peer.collect().items()},
        }
        if stamp.at_ns > returned:  # otherwise the call did all, and nothing ran during the save
            figures |= {
                "speed": during.rate / alone.rate,
                "stall_s": max(during.worst_ns, tail.worst_ns) / 1e9,
                "stall_alone_s": alone.worst_ns / 1e9,
            }
        return figures, path

    def _check(self, tree: Any, path: Path) -> None:
        """Compare the number of tensors in the file with `tree`, and the values of three of them.

        Raises:
            BenchError: They differ.
        """
        import torch

        expected = self._tensors_of(tree)
        found = self._tensors_of(self._peer.load(path, tree))
        if len(expected) != len(found):
            raise BenchError(f"{path.name} holds {len(found)} tensors of {len(expected)}")
        for i in {0, len(expected) // 2, len(expected) - 1}:
            if not torch.equal(expected[i], found[i]):
                raise BenchError(f"{path.name}: tensor {i} differs from what was saved")

    def loop(self, steps: int, batch: int) -> Answer:
        """Measure the time that a save costs a training loop; return the figures.

        `steps` plain steps are timed, half of them before the save and half after, so that a slow
        change of the machine's speed does not count as lost time. In between the training makes at
        least `steps` steps, until the save has finished, so that none of its work is left out.
        """
        state = self._state
        keep_memory()
        os.sync()  # so that earlier writes of other ways do not slow these steps
        others = Others()
        plain_s = self._timed_steps(steps // 2, batch)
        path, stamp, count = self._next_path(), Stamp(), 0
        start = time.perf_counter_ns()
        tree = state.tree()
        call_start = time.perf_counter_ns()
        self._peer.save(tree, str(path), stamp)
        call_s = (time.perf_counter_ns() - call_start) / 1e9
        del tree
        while count < steps or not stamp.at_ns:
            state.step(batch)
            count += 1
            if time.perf_counter_ns() - start > GIVE_UP_NS:
                raise BenchError(f"a save has not finished after {GIVE_UP_NS / 1e9:.0f} s")
        total_s = (time.perf_counter_ns() - start) / 1e9
        peer_figures = self._peer.collect()
        _remove(path)
        plain_s += self._timed_steps(steps - steps // 2, batch)
        lost_s = total_s - count * plain_s / steps
        gate_s = peer_figures.get("gate_wait_s", 0.0)
        return {
            "lost_s": lost_s,
            "call_s": call_s,
            "gate_s": gate_s,
            "slowdown_s": lost_s - call_s - gate_s,
            "finished_s": (stamp.at_ns - call_start) / 1e9,
            "step_s": plain_s / steps,
            "steps": float(count),
            "others": others.share(),
            **{f"report_{name}": value for name, value in peer_figures.items()},
        }

    def _timed_steps(self, steps: int, batch: int) -> float:
        """Return the seconds that all of `steps` steps take together."""
        self._state.step(batch)  # not counted: threads wake up in it after a pause
        start = time.perf_counter_ns()
        for _ in range(steps):
            self._state.step(batch)
        return (time.perf_counter_ns() - start) / 1e9

    def gate(self) -> Answer:
        """Save with the optimizer's step right after the call, then with a step that comes later.

        Return how long each step waited for the copy.
        """
        answer: Answer = {}
        for name, pause_s in (("gate_at_once_s", 0.0), ("gate_late_s", LATE_STEP_S)):
            self._state.step(SAVE_BATCH)
            tree, path = self._state.tree(), self._next_path()
            time.sleep(0.2)
            self._peer.save(tree, str(path), Stamp())
            del tree
            time.sleep(pause_s)
            self._state.update()
            peer_figures = self._peer.collect()
            _remove(path)
            answer[name] = peer_figures.get("gate_wait_s", 0.0)
            answer["deferred_share"] = peer_figures.get("deferred_nbytes", 0.0) / self._state.nbytes
        return answer

    def growth(self, saves: int) -> dict[str, Any]:
        """Make `saves` saves, with a step before each.

        Returns:
            "resident_nbytes": the process's memory after each save. "growth_nbytes": how much that
            memory grew from the end of the first tenth of the saves to the last save.
        """
        resident = []
        for _ in range(saves):
            self._state.step(SAVE_BATCH)
            path, stamp = self._next_path(), Stamp()
            self._peer.save(self._state.tree(), str(path), stamp)
            now = time.perf_counter_ns()
            tick(stamp, now, now + GIVE_UP_NS, busy=False)  # waits until the save has finished
            self._peer.collect()
            _remove(path)
            resident.append(status_bytes("VmRSS"))
        after_a_tenth = resident[min(len(resident) // 10, len(resident) - 1)]
        growth = float(resident[-1] - after_a_tenth)
        return {"growth_nbytes": growth, "resident_nbytes": resident}

    def watch(self) -> dict[str, Any]:
        """Save once, and read every SAMPLE_S how many bytes are written.

        Return the readings as two lists: "times_s" from the call on, and "nbytes".
        """
        self._state.step(SAVE_BATCH)
        tree, path, stamp = self._state.tree(), self._next_path(), Stamp()
        time.sleep(0.2)
        times, nbytes = [0.0], [0]
        start = time.perf_counter_ns()
        self._peer.save(tree, str(path), stamp)
        while not stamp.at_ns and time.perf_counter_ns() - start < GIVE_UP_NS:
            with contextlib.suppress(FileNotFoundError):  # renamed between two readings
                nbytes.append(self._peer.progress(self._directory))
                times.append((time.perf_counter_ns() - start) / 1e9)
            time.sleep(SAMPLE_S)
        times.append((stamp.at_ns - start) / 1e9)
        self._peer.collect()
        nbytes.append(_nbytes_of(path))
        _remove(path)
        return {"times_s": times, "nbytes": nbytes}

    def close(self) -> Answer:
        self._peer.close()
        return {}


@contextlib.contextmanager
def _run_computing_threads(nr_threads: int) -> Iterator[None]:
    """Run threads that compute in pure Python, as a tokenizing data loader does, until the end of
    the block."""
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            sum(i * i for i in range(1000))

    threads = [threading.Thread(target=compute, daemon=True) for _ in range(nr_threads)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _nbytes_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a directory, which DCP saves."""
    if path.is_dir():
        return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    return path.stat().st_size


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
