"""What does a save cost the training, against torch.save and Lightning's AsyncCheckpointIO?

    python benchmarks/vs_peers.py --dir DIR --json vs_peers.json

All ways to save, and the raw disk beside them, take turns in one run (A B C raw, A B C raw, ...),
each in a process of its own. README.md in this directory says how each figure is counted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from common import TENSOR_BYTES, BenchError, format_size, parse_size, write_json
from figures import GOALS, LIGHTNING, OURS, RAW, TORCH, Figures, Settings, print_results
from limits import PAGE_BYTES, RawDisk, measure_copy
from machine import add_directory_options, check_memory, machine_facts, scratch_directory
from peers import PEERS, Spec, Worker

# ---- the run -------------------------------------------------------------------------------


class Run:
    """Runs the scenarios with the given ways to save and fills `figures`."""

    def __init__(
        self, settings: Settings, peers: list[str], directory: Path, progress: Callable[[str], None]
    ) -> None:
        self.settings = settings
        self.figures = Figures()
        self._peers = peers
        self._directory = directory
        self._progress = progress

    def all(self, scenarios: list[str]) -> None:
        s = self.settings
        self._limits()
        owned = [name for name in ("busy", "idle", "loop_large") if name in scenarios]
        if owned:
            with self._fleet(s.state, owned=True) as fleet:
                if "busy" in owned:
                    self._saves(fleet, "busy", "busy_cold", busy=True)
                if "idle" in owned:
                    cold = None if "busy" in owned else "idle_cold"
                    self._saves(fleet, "idle", cold, busy=False)
                if "loop_large" in owned:
                    self._loop(
                        fleet, "loop_large", s.pairs_large, s.loop_steps_large, s.loop_batch_large
                    )
        if "unowned" in scenarios:
            with self._fleet(s.state, owned=False) as fleet:
                self._saves(fleet, "unowned", "unowned_cold", busy=False)
        if "loop" in scenarios:
            with self._fleet(s.loop_state, owned=True) as fleet:
                self._loop(fleet, "loop", s.pairs, s.loop_steps, s.loop_batch)

    def _limits(self) -> None:
        self._progress("raw memcpy")
        nbytes = -(-self.settings.state // PAGE_BYTES) * PAGE_BYTES
        for value in measure_copy(nbytes, self.settings.rounds).values:
            self.figures.add("limits", RAW, {"memcpy_s": value})
        self._disk = RawDisk(self._directory, nbytes)

    @contextlib.contextmanager
    def _fleet(self, nbytes: int, *, owned: bool) -> Iterator[list[Worker]]:
        """One process a way to save, all over a state of the same size; gone afterwards."""
        self._progress(f"building {format_size(nbytes)} in {len(self._peers)} processes")
        nr_params = max(1, round(nbytes / (3 * TENSOR_BYTES)))
        spec = Spec(nbytes, nr_params, owned, self.settings.threads)
        with contextlib.ExitStack() as stack:
            fleet = [stack.enter_context(Worker(p, spec, self._directory)) for p in self._peers]
            for worker in fleet:
                worker.ready()
                scenario = f"state of {nbytes}" if owned else f"unowned state of {nbytes}"
                self.figures.add(scenario, worker.peer, worker.info)
            yield fleet

    def _saves(self, fleet: list[Worker], warm: str, cold: str | None, *, busy: bool) -> None:
        """Rounds of one save each; the first round is cold unless the processes saved before."""
        names = ([cold] if cold else []) + [warm] * self.settings.rounds
        for number, name in enumerate(names):
            for worker in fleet:
                self._progress(f"{name}, round {number + 1} of {len(names)}: {worker.peer}")
                answer = worker.call("save", busy=busy, check=number == 0)
                self.figures.add(name, worker.peer, answer)
            self._progress(f"{name}, round {number + 1} of {len(names)}: raw disk")
            direct, buffered = self._disk.direct(), self._disk.buffered()
            self.figures.add(name, RAW, {"buffered_s": buffered})
            if not math.isnan(direct):
                self.figures.add(name, RAW, {"finished_s": direct})

    def _loop(self, fleet: list[Worker], name: str, pairs: int, steps: int, batch: int) -> None:
        """Rounds of a pair each; the first is a warm-up kept apart."""
        for number in range(pairs + 1):
            for worker in fleet:
                self._progress(f"{name}, round {number + 1} of {pairs + 1}: {worker.peer}")
                answer = worker.call("pair", steps=steps, batch=batch)
                self.figures.add(name if number else f"{name}_first", worker.peer, answer)


# ---- the command line ----------------------------------------------------------------------

FULL_STATE = 1_070_000_000  # bytes; the goals are set for it
SCENARIOS = ("busy", "idle", "loop_large", "unowned", "loop")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="214 MB, few rounds: about a minute")
    parser.add_argument(
        "--state", type=parse_size, default=FULL_STATE, help="state of the save scenarios"
    )
    parser.add_argument(
        "--loop-state", type=parse_size, default=160_000_000, help="state of scenario loop"
    )
    parser.add_argument("--rounds", type=int, default=5, help="warm saves a scenario")
    parser.add_argument("--pairs", type=int, default=24, help="block pairs of scenario loop")
    parser.add_argument("--pairs-large", type=int, default=3, help="those of scenario loop_large")
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="torch.set_num_threads; taskset -c 0,1 gives the two cores of the goals",
    )
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--peers", nargs="+", choices=tuple(PEERS), default=list(PEERS))
    add_directory_options(parser)
    args = parser.parse_args(argv)
    if min(args.rounds, args.pairs, args.pairs_large, args.threads) < 1:
        parser.error("--rounds, --pairs, --pairs-large and --threads start at 1")
    if args.quick:
        args.state = min(args.state, 214_000_000)
        args.rounds, args.pairs, args.pairs_large = min(args.rounds, 2), min(args.pairs, 4), 1
    return args


def _need_memory(settings: Settings, nr_peers: int) -> int:
    """Each process: weights, state, gradients and torch; on top the largest clone, pool, file."""
    return int(nr_peers * (1.4 * settings.state + 5e8) + 5.5 * settings.state)


@contextlib.contextmanager
def _progress_line() -> Iterator[Callable[[str], None]]:
    """One line on stderr that is drawn between measurements only, never while one runs."""
    start = time.monotonic()
    terminal = sys.stderr.isatty()

    def show(text: str) -> None:
        line = f"[{time.monotonic() - start:5.0f} s] {text}"
        sys.stderr.write(f"\r\x1b[K{line}" if terminal else line + "\n")
        sys.stderr.flush()

    try:
        yield show
    finally:
        if terminal:
            sys.stderr.write("\r\x1b[K")


def main(argv: list[str] | None = None) -> int:
    """The command line; 0, 2 where it cannot run, 130 after Ctrl-C."""
    args = _parse(argv)
    packages = {TORCH: "torch", LIGHTNING: "lightning", OURS: "stillframe"}
    peers = [p for p in PEERS if p in args.peers and importlib.util.find_spec(packages[p])]
    for missing in [p for p in args.peers if p not in peers]:
        print(f"vs_peers.py: {missing} is not installed and left out", file=sys.stderr)
    settings = Settings(
        state=args.state,
        loop_state=args.loop_state,
        rounds=args.rounds,
        pairs=args.pairs,
        pairs_large=args.pairs_large,
        threads=args.threads,
    )
    largest = max(settings.state, settings.loop_state)
    try:
        check_memory(_need_memory(dataclasses.replace(settings, state=largest), len(peers)))
        with (
            scratch_directory(
                args.dir, allow_tmpfs=args.allow_tmpfs, need_bytes=int(2.5 * largest)
            ) as directory,
            _progress_line() as progress,
        ):
            facts = machine_facts(directory)
            run = Run(settings, peers, directory, progress)
            run.all(args.only)
    except BenchError as error:
        print(f"vs_peers.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("vs_peers.py: interrupted; its files are removed", file=sys.stderr)
        return 130
    print_results(run.figures, settings, peers, facts, args.quick or args.state < FULL_STATE)
    goals = [
        {
            "scenario": goal.scenario,
            "metric": goal.metric,
            "goal": goal.text,
            "bound": goal.bound,
            "value": goal.value(run.figures),
            "met": goal.met(run.figures),
        }
        for goal in GOALS
    ]
    write_json(
        args.json or Path("build") / "vs_peers.json",
        {
            "facts": facts,
            "settings": dataclasses.asdict(settings),
            "figures": run.figures.to_json(),
            "goals": goals,
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
