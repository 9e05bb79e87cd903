"""Checkpoints of many ranks: PyTorch's async_save and ours, on ranks that talk over gloo.

    python benchmarks/dcp.py --dir DIR [--state 256MB] [--layers 64] [--ranks 2] [--rounds 2]

Each rank has its part of an FSDP2 model and its AdamW. The ways take turns; each turn has rank
processes of its own, makes a first save that is not counted, and then saves beside an idle main
thread, beside one that is busy in Python, and in a training loop. Ours is synced when it has
finished, directory included; of PyTorch's the files are, and the directory is not.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
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

DEFAULT, STAGER, PROCESS = "DCP async_save", "DCP, DefaultStager kept", "DCP, PROCESS executor"
OURS = "stillframe.dcp.async_save"
LOOP_STEPS = 6
GIVE_UP_NS = 300 * 10**9
ROWS = (
    ("idle", "call_s", "main thread idle: the call blocks"),
    ("idle", "finished_s", "finished after"),
    ("idle", "cpu_s", "processor time of a rank's process"),
    ("busy", "call_s", "main thread busy: the call blocks"),
    ("busy", "finished_s", "finished after"),
    ("busy", "stall_s", "longest stall"),
    ("loop", "lost_s", "training loop: lost time a save"),
    ("loop", "finished_s", "finished after"),
)


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
        self.model = torch.nn.Sequential(*layers)
        for layer in layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = torch.ones(4, self.width)
        self.is_first = rank == 0
        self.path = directory / "checkpoint"
        self.save = WAYS[way]()
        self.started = 0.0  # when the last save was called
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

        model, optimizer = get_state_dict(self.model, self.optimizer)
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

    def loop(self) -> dict[str, float]:
        """Steps with a save before the first, and as many without on either side."""
        plain = self._steps(LOOP_STEPS)
        start = time.perf_counter()
        response, _, stamp = self.begin()
        staged = getattr(response, "staging_completion", None)
        count = 0
        while count < LOOP_STEPS or not self._all(bool(stamp.at_ns)):
            self.step(staged.result if staged is not None and count == 0 else lambda: None)
            count += 1
        with_save = time.perf_counter() - start
        finished = stamp.at_ns / 1e9 - self.started
        self.end(response)
        plain += self._steps(LOOP_STEPS)
        return {"lost_s": with_save - count * plain / (2 * LOOP_STEPS), "finished_s": finished}

    def _steps(self, count: int) -> float:
        self.barrier()
        start = time.perf_counter()
        for _ in range(count):
            self.step()
        return time.perf_counter() - start

    def _all(self, here: bool) -> bool:
        """Whether it holds on all ranks: they have to make as many steps."""
        import torch
        import torch.distributed as dist

        flag = torch.tensor(int(here))
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag)

    def turn(self) -> dict[str, dict[str, float]]:
        rss = status_bytes("VmRSS")
        self.one(busy=False)  # makes pools and plans
        found = {"idle": self.one(busy=False), "busy": self.one(busy=True), "loop": self.loop()}
        found["idle"]["extra_rss"] = found["idle"]["peak"] - rss
        return found


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


WAYS = {DEFAULT: _default, STAGER: _stager, PROCESS: _process, OURS: _ours}


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
    for number in range(options.rounds):
        for way in turned(options.ways, number):
            print(f"round {number + 1} of {options.rounds}: {way}", file=sys.stderr, flush=True)
            for answer in one_turn(way, options, directory / f"turn{number}"):
                if isinstance(answer, str):
                    found[way] = answer
                elif not isinstance(found[way], str):
                    for scenario, figures in answer.items():
                        for metric, value in figures.items():
                            kept = found[way].setdefault(scenario, {}).setdefault(metric, [])
                            kept.append(value)
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
    parser.add_argument("--limit-s", type=float, default=300.0, help="of one way's turn")
    add_directory_options(parser)
    options = parser.parse_args(argv)
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
