"""Checkpoints of many ranks: PyTorch's async_save and ours, on ranks that talk over gloo.

    python benchmarks/dcp.py --dir DIR [--state 256MB] [--layers 64] [--ranks 2] [--rounds 2]

Each rank has its part of an FSDP2 model and its AdamW. The ways take turns; each turn has rank
processes of its own, makes a first save that is not counted, and then saves beside an idle main
thread, beside one that is busy in Python, and in a training loop. Ours is synced when it has
finished, directory included; of PyTorch's the files are, and the directory is not. The bound is
one file a rank of the same bytes, which knows of no other rank.

What a save costs a loop is the time of its call and of the steps until it has ended, less that of
as many steps at the median of those around it. Steps without a save are taken for such a save too:
what they come to is noise, and stands in a row of its own. get_state_dict, which every way needs,
is not in it. After --most-s no later round begins a turn.

--lightning adds what Lightning's sharded strategies do (DCP's save, in the call) and what pull
request 21515 of Lightning has open, its DistributedAsyncCheckpointIO(no_dist=False): in a process,
with plans kept, each save after the one before.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common import (
    BenchError,
    Series,
    Stamp,
    format_size,
    format_times,
    parse_size,
    print_table,
    tick,
    turned,
    write_json,
)
from dcp_ways import LIGHTNING, OURS, WAYS
from machine import (
    add_directory_options,
    check_memory,
    facts_lines,
    keep_memory,
    machine_facts,
    reset_peak_rss,
    scratch_directory,
    status_bytes,
)

LOOP_SAVES = 3  # of a turn
LOOP_STEPS = 4  # plain ones on either side, and at least so many beside a save
UNITS = 4  # of FSDP: a step's time is that of their collectives, not of the layers
GIVE_UP_NS = 300 * 10**9
ROWS = (
    ("idle", "call_s", "main thread idle: the call blocks"),
    ("idle", "finished_s", "finished after"),
    ("idle", "cpu_s", "processor time of a rank's process"),
    ("busy", "call_s", "main thread busy: the call blocks"),
    ("busy", "finished_s", "finished after"),
    ("busy", "stall_s", "longest stall"),
    ("loop", "lost_s", "training loop: lost time a save"),
    ("loop", "noise_s", "the same of steps without one"),
    ("loop", "step_s", "a step without one"),
    ("loop", "state_s", "get_state_dict before a call"),
    ("loop", "finished_s", "finished after"),
)
WITH_ERROR = ("lost_s", "noise_s")


# ---- in a rank's process -----------------------------------------------------------------------


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
        # AdamW: three times four bytes.
        self.width = round((options.state / 12 / options.layers) ** 0.5)
        layers = [torch.nn.Linear(self.width, self.width) for _ in range(options.layers)]
        size = -(-len(layers) // UNITS)
        units = [torch.nn.Sequential(*layers[at : at + size]) for at in range(0, len(layers), size)]
        self.model = torch.nn.Sequential(*units)
        for unit in units:
            fully_shard(unit)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = torch.ones(4, self.width)
        self.is_first = rank == 0
        self.path = directory / "checkpoint"
        self.save = {**WAYS, **LIGHTNING}[way]()
        self.started = 0.0  # when the last save was called
        self.state_s = 0.0  # what get_state_dict took before that
        for _ in range(4):
            self.step()

    def step(self, before_update: Callable[[], object] = lambda: None) -> None:
        self.model(self.batch).sum().backward()
        before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def begin(self) -> tuple[Any, float, Stamp]:
        """A save under way: what the call returned, its seconds, and a stamp of the end."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        start = time.perf_counter()
        model, optimizer = get_state_dict(self.model, self.optimizer)
        self.state_s = time.perf_counter() - start
        stamp = Stamp()
        self.barrier()
        start = self.started = time.perf_counter()
        response = self.save({"model": model, "optimizer": optimizer}, self.path)
        called = time.perf_counter() - start
        getattr(response, "upload_completion", response).add_done_callback(stamp)
        return response, called, stamp

    def end(self, response: Any) -> None:
        getattr(response, "upload_completion", response).result()
        self.barrier()
        if self.is_first:
            shutil.rmtree(self.path)
        self.step()

    def one(self, busy: bool) -> dict[str, float]:
        reset_peak_rss()
        cpu = time.process_time()
        response, called, stamp = self.begin()
        begun = time.perf_counter_ns()
        ticks = tick(stamp, begun, begun + GIVE_UP_NS, busy=busy)
        figures = {
            "call_s": called,
            "finished_s": stamp.at_ns / 1e9 - self.started,
            "cpu_s": time.process_time() - cpu,
            "stall_s": ticks.worst_ns / 1e9,
            "peak": float(status_bytes("VmHWM")),
        }
        self.end(response)
        return figures

    def loop(self) -> dict[str, list[float]]:
        """Of several saves: what each has cost, and what as many steps without one would have."""
        found: dict[str, list[float]] = {name: [] for s, name, _ in ROWS if s == "loop"}
        before = self._steps(LOOP_STEPS)
        for _ in range(LOOP_SAVES):
            call_s, steps = self._steps_beside_a_save(found)
            after = self._steps(LOOP_STEPS)
            found["lost_s"].append(call_s + _over(steps, before + after))
            plain = self._steps(min(len(steps), 2 * LOOP_STEPS))
            before = self._steps(LOOP_STEPS)
            found["noise_s"].append(_over(plain, after + before))
            found["step_s"].append(statistics.median(after + before))
        return found

    def _steps_beside_a_save(self, found: dict[str, list[float]]) -> tuple[float, list[float]]:
        """The call's seconds, and each step's until all ranks have saved."""
        response, call_s, stamp = self.begin()
        staged = getattr(response, "staging_completion", None)
        steps: list[float] = []
        while len(steps) < LOOP_STEPS or not self._all(bool(stamp.at_ns)):
            waits = staged is not None and not steps
            steps += self._steps(1, staged.result if waits else lambda: None)
        found["state_s"].append(self.state_s)
        found["finished_s"].append(stamp.at_ns / 1e9 - self.started)
        self.end(response)
        return call_s, steps

    def _steps(self, count: int, before_update: Callable[[], object] = lambda: None) -> list[float]:
        """The seconds of each. Gradients go through all ranks, so none is ahead of another."""
        times = []
        for _ in range(count):
            start = time.perf_counter()
            self.step(before_update)
            times.append(time.perf_counter() - start)
        return times

    def _all(self, here: bool) -> bool:
        """Whether it holds on all ranks: they have to make as many steps."""
        import torch
        import torch.distributed as dist

        flag = torch.tensor(int(here))
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag)

    def turn(self) -> dict[str, dict[str, list[float]]]:
        rss = status_bytes("VmRSS")
        self.one(busy=False)  # makes pools and plans
        idle, busy = self.one(busy=False), self.one(busy=True)
        idle["extra_rss"] = idle["peak"] - rss
        found = {"idle": idle, "busy": busy}
        lists = {name: {key: [one] for key, one in each.items()} for name, each in found.items()}
        return {**lists, "loop": self.loop()}


def _over(steps: list[float], plain: list[float]) -> float:
    """What steps took beyond as many plain ones."""
    return sum(steps) - len(steps) * statistics.median(plain)


def _serve(
    connection: Connection, way: str, rank: int, options: argparse.Namespace, directory: Path
) -> None:
    try:
        connection.send(Rank(way, rank, options, directory).turn())
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}"[:300])


# ---- in the parent -----------------------------------------------------------------------------


def one_turn(way: str, options: argparse.Namespace, directory: Path) -> list[Any]:
    """What each rank has found, or a sentence on why it has not."""
    directory.mkdir()
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(options.ranks):
        ours, theirs = context.Pipe()
        arguments = (theirs, way, rank, options, directory)
        processes.append(context.Process(target=_serve, args=arguments))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    answers = []
    for pipe in pipes:
        try:
            answers.append(pipe.recv() if pipe.poll(options.limit_s) else "took too long")
        except EOFError:
            answers.append("its process ended")
    for process in processes:
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()
    shutil.rmtree(directory)
    return answers


def measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """way -> scenario -> metric -> the values of all rounds and ranks; or why there are none."""
    found: dict[str, Any] = {way: {} for way in options.ways}
    began = time.monotonic()
    for number in range(options.rounds):
        for way in turned(options.ways, number):
            past_s = time.monotonic() - began
            skipped = number > 0 and past_s > options.most_s
            state = "skipped" if skipped else "begins"
            print(
                f"{past_s:4.0f} s, round {number + 1} of {options.rounds}: {way} {state}",
                file=sys.stderr,
                flush=True,
            )
            if skipped:
                continue
            for answer in one_turn(way, options, directory / f"turn{number}"):
                if isinstance(answer, str):
                    found[way] = answer
                elif not isinstance(found[way], str):
                    for scenario, figures in answer.items():
                        for metric, values in figures.items():
                            kept = found[way].setdefault(scenario, {}).setdefault(metric, [])
                            kept.extend(values)
    return found


def show(found: dict[str, Any], nbytes_a_rank: float) -> None:
    rows: list[list[str] | None] = []
    for scenario, metric, title in ROWS:
        cells = []
        for figures in found.values():
            if isinstance(figures, str):
                cells.append("failed")
                continue
            series = Series.of(figures[scenario][metric])
            if metric in WITH_ERROR:
                cells.append(f"{series.median * 1e3:.0f} ± {series.error * 1e3:.0f} ms")
            else:
                cells.append(format_times([series.median, min(series.values), max(series.values)]))
        rows.append([title, *cells])
    memory = [
        "failed"
        if isinstance(figures, str)
        else f"{Series.of(figures['idle']['extra_rss']).median / nbytes_a_rank:.2f} x"
        for figures in found.values()
    ]
    rows.append(["extra memory over a rank's state", *memory])
    print_table("Checkpoints of all ranks, medians over rounds and ranks", ["", *found], rows)
    for way, figures in found.items():
        if isinstance(figures, str):
            print(f"{way} failed: {figures}")


def main(argv: list[str] | None = None) -> int:
    """The command line; 0, or 2 with a sentence on stderr where it cannot run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--state", type=parse_size, default=256 * 10**6, help="of all ranks")
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--lightning", action="store_true", help="Lightning's ways too")
    parser.add_argument("--most-s", type=float, default=200.0, help="no later round begins a turn")
    parser.add_argument("--limit-s", type=float, default=300.0, help="of one way's turn")
    add_directory_options(parser)
    options = parser.parse_args(argv)
    if options.lightning:
        options.ways = [*options.ways, *LIGHTNING]
    try:
        check_memory(6 * options.state + options.ranks * 500_000_000)
        with scratch_directory(
            options.dir, allow_tmpfs=options.allow_tmpfs, need_bytes=4 * options.state
        ) as directory:
            facts = machine_facts(directory)
            found = measure(options, directory)
    except BenchError as error:
        print(f"dcp.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("dcp.py: interrupted; its files are removed", file=sys.stderr)
        return 130
    print("\n".join(facts_lines(facts)))
    print(f"{format_size(options.state)} in {6 * options.layers} tensors on {options.ranks} ranks")
    show(found, options.state / options.ranks)
    if options.json:
        settings = {name: getattr(options, name) for name in ("state", "layers", "ranks", "rounds")}
        write_json(options.json, {"facts": facts, "settings": settings, "figures": found})
    return 1 if isinstance(found.get(OURS), str) else 0


if __name__ == "__main__":
    sys.exit(main())
