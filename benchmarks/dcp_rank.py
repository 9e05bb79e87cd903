"""The code of each rank's process in dcp.py: a training, and one way to save it.

The process lives for the whole run and keeps its training and its way to save from turn to turn.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common import BenchError, Stamp, tick
from dcp_ways import ALL
from machine import keep_memory, reset_peak_rss, status_bytes
from peers import OURS

# The most saves of a turn with an idle main thread, and as many with a busy one. A turn that has
# taken --turn-s seconds makes only one of each.
SAVES = 2
LOOP_SAVES = 3  # the most saves in a turn's training loop
# The DTensors of `measure_dtensors` have 256 bytes. The call copies all of them, because it always
# copies storages of up to 4 KiB.
NR_DTENSORS = 1200
LOOP_STEPS = 4  # plain steps before a save and after it, and the least number of steps during it
UNITS = 4  # FSDP units; a step spends its time in their collectives, not in the layers
GIVE_UP_NS = 100 * 10**9  # a save that takes longer has hung

Turn = dict[str, dict[str, list[float]]]  # scenario -> metric -> values


class Rank:
    """One rank: its part of the training, and one way to save it."""

    def __init__(self, way: str, rank: int, options: argparse.Namespace, directory: Path) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        warnings.simplefilter("ignore")
        keep_memory()
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=options.ranks
        )
        self.barrier = dist.barrier
        # Three float32 for each weight: itself and AdamW's two moments.
        self.width = round((options.state / 12 / options.layers) ** 0.5)
        layers = [torch.nn.Linear(self.width, self.width) for _ in range(options.layers)]
        size = -(-len(layers) // UNITS)  # layers in a unit, rounded up
        units = [torch.nn.Sequential(*layers[at : at + size]) for at in range(0, len(layers), size)]
        self.model = torch.nn.Sequential(*units)
        for unit in units:
            fully_shard(unit)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = torch.ones(4, self.width)
        self.is_first, self.is_ours = rank == 0, way == OURS
        self.dtensors_path = directory / f"dtensors{rank}"
        # After `late_at` (time.monotonic) the turn makes no second save of a scenario.
        self.turn_s, self.late_at = options.turn_s, 0.0
        self.path = directory / "checkpoint"
        self.save = ALL[way]()  # save(state, path): see dcp_ways.py, also for its result
        self.started = 0.0  # the time of the last save's call (perf_counter)
        self.rss = 0  # resident bytes of the process just before that call
        self.state_s = 0.0  # seconds of get_state_dict before that call
        for _ in range(4):  # afterwards stillframe knows which storages only steps change
            self.step()
        self.nbytes = options.state / options.ranks
        # The first save makes pools, save plans and processes, so its times are not counted. Extra
        # memory is taken from this save alone, because later the training's own heap grows as well.
        self.memory = self.measure_save(busy=False)["memory"]

    def step(self, before_update: Callable[[], object] = lambda: None) -> None:
        self.model(self.batch).sum().backward()
        before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def begin_save(self) -> tuple[Any, dict[str, float], Stamp]:
        """Begin a save.

        Returns:
            The result of the call (see dcp_ways.py); its wall time and processor time in seconds;
            a stamp that is called when the save has ended.
        """
        from torch.distributed.checkpoint.state_dict import get_state_dict

        start = time.perf_counter()
        model, optimizer = get_state_dict(self.model, self.optimizer)
        self.state_s = time.perf_counter() - start
        stamp = Stamp()
        self.barrier()
        self.rss = status_bytes("VmRSS")
        reset_peak_rss()  # just before the call, because what comes before allocates memory too
        cpu, start = time.thread_time(), time.perf_counter()
        self.started = start
        response = self.save({"model": model, "optimizer": optimizer}, self.path)
        took = {"call_s": time.perf_counter() - start, "call_cpu_s": time.thread_time() - cpu}
        _end_of(response).add_done_callback(stamp)
        return response, took, stamp

    def end_save(self, response: Any) -> None:
        """Wait until all ranks have saved, remove the checkpoint, and make a step."""
        _end_of(response).result()
        self.barrier()
        if self.is_first:
            shutil.rmtree(self.path)
        self.step()

    def measure_save(self, busy: bool) -> dict[str, float]:
        """Save once with the main thread busy or idle meanwhile; return the figures."""
        cpu = time.process_time()
        response, took, stamp = self.begin_save()
        begun = time.perf_counter_ns()
        ticks = tick(stamp, begun, begun + GIVE_UP_NS, busy=busy)
        if not stamp.at_ns:
            raise BenchError(f"a save has not ended after {GIVE_UP_NS // 10**9} s")
        figures = {
            **took,
            "finished_s": stamp.at_ns / 1e9 - self.started,
            "cpu_s": time.process_time() - cpu,
            "stall_s": ticks.worst_ns / 1e9,
            "memory": (status_bytes("VmHWM") - self.rss) / self.nbytes,
        }
        self.end_save(response)
        return figures

    def measure_loop(self) -> dict[str, list[float]]:
        """Save several times in a training loop.

        Returns:
            For each metric a value of each save. "lost_s" is the time that the save cost the loop.
            "noise_s" is the same figure of steps without a save.
        """
        names = ("lost_s", "noise_s", "step_s", "state_s", "finished_s")
        found: dict[str, list[float]] = {name: [] for name in names}
        before = self._steps(LOOP_STEPS)
        for number in range(LOOP_SAVES):
            if number and self._is_late():
                break
            call_s, steps = self._steps_during_a_save(found)
            after = self._steps(LOOP_STEPS)
            found["lost_s"].append(call_s + _extra_time(steps, before + after))
            # The noise is that of about as many steps as the save took.
            plain = self._steps(min(len(steps), 2 * LOOP_STEPS))
            before = self._steps(LOOP_STEPS)
            found["noise_s"].append(_extra_time(plain, after + before))
            found["step_s"].append(statistics.median(after + before))
        return found

    def _steps_during_a_save(self, found: dict[str, list[float]]) -> tuple[float, list[float]]:
        """Save, and train until all ranks have saved.

        Append this save's values to the lists "state_s" and "finished_s" of `found`.

        Returns:
            Seconds of the call, and of each step.
        """
        response, took, stamp = self.begin_save()
        staged = getattr(response, "staging_completion", None)  # None: the call has copied all
        steps: list[float] = []
        while len(steps) < LOOP_STEPS or not self._is_true_on_all_ranks(bool(stamp.at_ns)):
            if staged is not None and not steps:
                # The first update must not change the state before it is copied.
                steps += self._steps(1, before_update=staged.result)
            else:
                steps += self._steps(1)
        found["state_s"].append(self.state_s)
        found["finished_s"].append(stamp.at_ns / 1e9 - self.started)
        self.end_save(response)
        return took["call_s"], steps

    def _steps(self, count: int, before_update: Callable[[], object] = lambda: None) -> list[float]:
        """Return the seconds of each step.

        The ranks stay together, because each step waits for the gradients of all ranks.
        """
        times = []
        for _ in range(count):
            start = time.perf_counter()
            self.step(before_update)
            times.append(time.perf_counter() - start)
        return times

    def _is_true_on_all_ranks(self, here: bool) -> bool:
        """Return whether `here` is true on all ranks.

        All ranks get the same answer, so that they make equally many steps.
        """
        import torch
        import torch.distributed as dist

        flag = torch.tensor(int(here))
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag)

    def _is_late(self) -> bool:
        """Return whether the turn has taken `turn_s` on some rank; the same on all ranks."""
        return not self._is_true_on_all_ranks(time.monotonic() < self.late_at)

    def measure_dtensors(self) -> dict[str, list[float]]:
        """Return the processor time of calls with many small DTensors; each rank saves alone."""
        import torch
        from stillframe import dcp
        from torch.distributed.tensor import DTensor, Shard, init_device_mesh

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        shard = [Shard(0)]
        state = {
            f"w{number}": DTensor.from_local(torch.ones(8, 8), mesh, shard, run_check=False)
            for number in range(NR_DTENSORS)
        }
        found = []
        for _ in range(6):
            cpu = time.thread_time()
            response = dcp.async_save({"state": state}, self.dtensors_path, no_dist=True)
            found.append(time.thread_time() - cpu)
            response.upload_completion.result()
        shutil.rmtree(self.dtensors_path)
        return {"call_cpu_s": found[1:]}  # only the first call makes a plan

    def turn(self) -> Turn:
        """Measure every scenario once; return its figures."""
        # The other ways' turns took minutes, and after a pause the first access to memory is slow.
        # In a training a step comes before each save, so here too.
        self.step()
        self.late_at = time.monotonic() + self.turn_s
        found: Turn = {"idle": {}, "busy": {}}
        for scenario, figures in found.items():
            for number in range(SAVES):
                if number and self._is_late():
                    break
                for metric, value in self.measure_save(busy=scenario == "busy").items():
                    figures.setdefault(metric, []).append(value)
            del figures["memory"]  # the memory of the first save alone counts: see __init__
        found["idle"]["memory"] = [self.memory]
        found["loop"] = self.measure_loop()
        if self.is_ours:
            found["dtensors"] = self.measure_dtensors()
        return found


def _end_of(response: Any) -> Any:
    """Return the future of a save's end, from the result of a save's call (see dcp_ways.py)."""
    return getattr(response, "upload_completion", response)


def _extra_time(steps: list[float], plain: list[float]) -> float:
    """Return by how many seconds `steps` took longer than as many plain steps."""
    return sum(steps) - len(steps) * statistics.median(plain)


def serve(
    connection: Connection, way: str, rank: int, options: argparse.Namespace, directory: Path
) -> None:
    """Serve the parent over `connection`: the main function of a rank's process.

    It sends None when the rank is ready, then the figures of a turn for each request. After an
    error it sends the error's text and ends. The stderr of this process and its children is a file.
    """
    with open(directory / f"rank{rank}.log", "wb") as log:
        os.dup2(log.fileno(), 2)
    try:
        measured = Rank(way, rank, options, directory)
        connection.send(None)
        while connection.recv():
            connection.send(measured.turn())
    except EOFError:  # the parent has ended
        pass
    except BaseException as error:  # CheckpointException is not an Exception
        connection.send(f"{type(error).__name__}: {error}"[:300])
