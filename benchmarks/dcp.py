"""Checkpoints of many ranks: PyTorch's async_save and ours, on ranks that talk over gloo.

    python benchmarks/dcp.py --dir DIR [--state 256MB] [--layers 64] [--ranks 2] [--rounds 2]

Each rank has its part of an FSDP2 model and its AdamW. Each way to save has rank processes of its
own, which live until the end of the run. Each way first makes one save that is not counted, and
then the ways take turns. A turn has three scenarios: saves while the main thread is idle, saves
while it is busy in Python, and saves in a training loop.

When our save has finished, files and directory are synced. PyTorch syncs the files but not the
directory; torch_checkpointing, Meta's package, syncs nothing. The column "bound" is the least time
that any way needs: each rank saves the same bytes into one file, and then the ranks make two
collectives.

The time that a save costs a loop is the time of its call and of the steps until it has ended, less
the time of as many plain steps. A plain step is taken to last as long as the median of the plain
steps around the save. The same figure is computed for steps without a save: the row "the same of
steps without one" shows this noise. The time of get_state_dict, which every way needs, is not
counted. A turn that has taken --turn-s seconds makes no second save of a scenario. After --most-s
seconds no turn begins, except each way's first.

After an error or an interrupt, the table still shows what was measured until then. A line names
what was not measured.

--lightning adds two ways. The first is that of Lightning's sharded strategies: DCP's save, which
ends before the call returns. The second is DistributedAsyncCheckpointIO(no_dist=False) from
Lightning's open pull request 21515: a separate process saves and keeps the save plans, and each
save first waits until the previous one has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import signal
import sys
import time
from pathlib import Path
from typing import Any

from common import BenchError, format_size, parse_size, print_table, rotated, write_json
from dcp_rank import Turn, serve
from dcp_table import rows, verdicts, ways_of
from dcp_ways import ALL, LIGHTNING, PACKAGES, WAYS, is_installed
from machine import (
    add_directory_options,
    check_memory,
    facts_lines,
    machine_facts,
    scratch_directory,
)
from measured import Figures
from peers import OURS

# The fork server imports these once, instead of each rank.
IMPORTED = (
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
)


class WayError(BenchError):
    """The error of a way that cannot be measured any further."""


class RankProcesses:
    """The processes of the ranks that save in one way.

    The constructor waits until all have made their first save.

    Raises:
        WayError: A process failed, ended or took longer than --limit-s before that.
    """

    def __init__(self, name: str, options: argparse.Namespace, directory: Path) -> None:
        directory.mkdir()
        self._directory = directory
        self._limit_s = options.limit_s
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        self.turn_s = 0.0  # seconds of the last turn
        context = multiprocessing.get_context("forkserver")
        for rank in range(options.ranks):
            parent_end, rank_end = context.Pipe()
            arguments = (rank_end, name, rank, options, directory)
            process = context.Process(target=serve, args=arguments)
            process.start()
            rank_end.close()  # now only the rank has it, so the end of the rank closes the pipe
            self._pipes.append(parent_end)
            self._processes.append(process)
        try:
            self._answers()
        except BaseException:
            self.end()
            raise

    def turn(self) -> list[Turn]:
        """Let every rank measure one turn; return the figures of each rank.

        Raises:
            WayError: A rank failed, ended or took longer than --limit-s.
        """
        began = time.monotonic()
        for pipe in self._pipes:
            pipe.send(True)  # asks for a turn
        answers = self._answers()
        self.turn_s = time.monotonic() - began
        return answers

    def _answers(self) -> list[Any]:
        """Return the next answer of each rank: None if it is ready, or the figures of a turn.

        Raises:
            WayError: See `turn`. A rank that failed sends its error as a text.
        """
        deadline, answers = time.monotonic() + self._limit_s, []  # of all ranks together
        for rank, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise WayError(f"rank {rank} took more than {self._limit_s:.0f} s")
                answers.append(pipe.recv())
            except (EOFError, OSError):
                raise WayError(
                    f"the process of rank {rank} ended{self._last_log_line(rank)}"
                ) from None
        failures = [each for each in answers if isinstance(each, str)]  # the texts of errors
        if failures:
            raise WayError(failures[0])
        return answers

    def _last_log_line(self, rank: int) -> str:
        """Return ": " and the last line of a rank's stderr, or "" if there is none."""
        with contextlib.suppress(OSError):
            text = (self._directory / f"rank{rank}.log").read_text(errors="replace")
            lines = [line for line in text.split("\n") if line]
            if lines:
                return f": {lines[-1]}"
        return ""

    def end(self) -> None:
        for pipe in self._pipes:  # a rank's process ends when its pipe is closed
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


class Run:
    """The measurements of all ways.

    Attributes:
        failed: The name of each way that failed, and its error. After Ctrl-C "the run" is a name.
    """

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self.figures, self.failed = Figures(), dict[str, str]()
        self._options, self._directory = options, directory
        self._began = time.monotonic()
        self._ways: dict[str, RankProcesses] = {}

    def measure(self) -> None:
        """Start all ways, measure them in turns, and end their processes."""
        try:
            for number, name in enumerate(self._options.ways):
                self._print_progress(f"{name} starts")
                try:
                    directory = self._directory / f"way{number}"
                    self._ways[name] = RankProcesses(name, self._options, directory)
                except WayError as error:
                    self._give_up(name, error)
            for number in range(self._options.rounds):
                for name in rotated(self._options.ways, number):
                    if name in self._ways:
                        self._measure_round(name, number)
        except KeyboardInterrupt:
            self.failed["the run"] = "interrupted"
        finally:
            # A second Ctrl-C must not prevent the table.
            handlers_before = {
                number: signal.signal(number, signal.SIG_IGN)
                for number in (signal.SIGINT, signal.SIGTERM)
            }
            for way in self._ways.values():
                way.end()
            for number, handler in handlers_before.items():
                signal.signal(number, handler)

    def _measure_round(self, name: str, number: int) -> None:
        """Let one way measure round `number`, and add its figures; give it up if it fails."""
        way, text = self._ways[name], f"round {number + 1} of {self._options.rounds}: {name}"
        past_s = time.monotonic() - self._began
        if number > 0 and past_s + way.turn_s > self._options.most_s:
            self._print_progress(
                f"{text} is left out: it would not end within {self._options.most_s:.0f} s"
            )
            return
        self._print_progress(text)
        try:
            turns = way.turn()
        except WayError as error:
            self._give_up(name, error)
            return
        for turn_of_rank in turns:
            for scenario, metrics in turn_of_rank.items():
                for metric, values in metrics.items():
                    for value in values:
                        self.figures.add(scenario, name, {metric: value})

    def _give_up(self, name: str, error: WayError) -> None:
        """End a way that has failed; later rounds leave it out."""
        self._print_progress(f"{name} failed: {error}")
        self.failed[name] = str(error)
        way = self._ways.pop(name, None)
        if way is not None:
            way.end()

    def _print_progress(self, text: str) -> None:
        past_s = time.monotonic() - self._began
        print(f"{past_s:4.0f} s, {text}", file=sys.stderr, flush=True)


def show(run: Run, options: argparse.Namespace, facts: dict[str, Any]) -> None:
    """Print the table and the verdicts on stdout, and save the figures as --json."""
    print("\n".join(facts_lines(facts)))
    print(f"{format_size(options.state)} in {6 * options.layers} DTensors on {options.ranks} ranks")
    ways = ways_of(run.figures)
    title = "Checkpoints of all ranks, medians (min..max) over rounds and ranks"
    print_table(title, ["", *ways], list(rows(run.figures, ways)))
    for line in verdicts(run.figures):
        print(line)
    for way, why in run.failed.items():
        print(f"{way} failed: {why}")
    if options.json:
        names = ("state", "layers", "ranks", "rounds")
        document = {
            "facts": facts,
            "settings": {name: getattr(options, name) for name in names},
            "figures": run.figures.to_json(),
            "failed": run.failed,
        }
        write_json(options.json, document)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status.

    0: stillframe was measured. 1: it failed. 2: nothing could be measured, and stderr says why.
    130: Ctrl-C interrupted the run.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--state", type=parse_size, default=256 * 10**6, help="bytes of all ranks")
    parser.add_argument("--layers", type=int, default=64, help="each has six tensors")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=list(ALL), default=list(WAYS))
    parser.add_argument("--lightning", action="store_true", help="Lightning's ways too")
    parser.add_argument("--most-s", type=float, default=240.0, help="no new round after this")
    parser.add_argument("--turn-s", type=float, default=20.0, help="a turn saves less after this")
    parser.add_argument("--limit-s", type=float, default=90.0, help="a longer turn has failed")
    add_directory_options(parser)
    options = parser.parse_args(argv)
    if options.lightning:
        options.ways = list(dict.fromkeys([*options.ways, *LIGHTNING]))
    for name in [each for each in options.ways if not is_installed(each)]:
        options.ways.remove(name)
        print(
            f"dcp.py: {name} is left out, since the package {PACKAGES[name]} is not installed:"
            " pip install -r benchmarks/requirements.txt",
            file=sys.stderr,
        )
    if not options.ways:
        return 2
    multiprocessing.set_forkserver_preload(list(IMPORTED))
    try:
        # Each way holds the state and copies of it, and torch takes 300 MB of each rank's process.
        need = len(options.ways) * (3 * options.state + options.ranks * 300_000_000)
        check_memory(need)
        disk = 4 * options.state  # each way removes its checkpoint, so this is more than enough
        with scratch_directory(
            options.dir, allow_tmpfs=options.allow_tmpfs, need_bytes=disk
        ) as directory:
            facts = machine_facts(directory)
            run = Run(options, directory)
            run.measure()
    except BenchError as error:
        print(f"dcp.py: {error}", file=sys.stderr)
        return 2
    show(run, options, facts)
    if "the run" in run.failed:  # Ctrl-C
        return 130
    return 1 if OURS in run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
