"""What does a save cost the training, against torch.save, Lightning's AsyncCheckpointIO and DCP?

    python benchmarks/vs_peers.py --dir DIR --json vs_peers.json

In each round every way saves once, in a process of its own. Then a plain loop writes as many bytes
to the disk ("raw"). README.md in this directory says how each figure is counted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pictures
from common import end_with, format_size, parse_size, progress_line, rotated, write_json
from figures import print_results
from goals import GOALS
from limits import RawDisk, measure_copy
from machine import add_directory_options, measured_in
from measured import Figures, Settings
from peers import PEERS, RAW
from process import Worker
from scenarios import ONE_AFTER_ANOTHER, SCENARIOS, Scenario, peers_of, spec_of
from session import Session

SLOW_S = 10.0  # a way is slow if one of its saves takes longer
FEW_ROUNDS = 2  # warm rounds of a slow way

# ---- the run -------------------------------------------------------------------------------


class Run:
    """One run of the scenarios with the given ways to save; it fills `figures`.

    Attributes:
        curves: The bytes written over time in scenario watch, for each way to save: "times_s" and
            "nbytes", two lists of equal length.
        resident: The process's memory after each save of scenario growth, in bytes.
    """

    def __init__(
        self, settings: Settings, peers: list[str], directory: Path, progress: Callable[[str], None]
    ) -> None:
        self.settings = settings
        self.figures = Figures()
        self.curves: dict[str, Any] = {}
        self.resident: list[int] = []
        self._peers = peers
        self._directory = directory
        self._progress = progress
        self._disk: RawDisk | None = None

    def run_all(self, names: list[str]) -> None:
        """Run the scenarios of these names. Scenarios of one state run in the same processes."""
        named = [scenario for scenario in SCENARIOS if scenario.name in names]
        chosen = [scenario for scenario in named if peers_of(scenario, self._peers)]
        states = dict.fromkeys(scenario.state for scenario in chosen)  # an ordered set
        for state in states:
            scenarios = [s for s in chosen if s.state == state]
            nbytes = spec_of(state, self.settings).nbytes
            needs_disk = any(s.kind == "save" for s in scenarios)
            self._disk = RawDisk(self._directory, nbytes) if needs_disk else None
            if state in ONE_AFTER_ANOTHER:
                for peer in self._peers:
                    of_peer = [s for s in scenarios if peer in peers_of(s, self._peers)]
                    if of_peer:
                        self._run_scenarios(state, of_peer, [peer])
            else:
                self._run_scenarios(state, scenarios, self._peers)
            self._disk = None

    def _run_scenarios(self, state: str, scenarios: list[Scenario], peers: list[str]) -> None:
        """Run scenarios of one state, in a process for each peer that some of them need."""
        peers = [p for p in peers if any(p in peers_of(s, peers) for s in scenarios)]
        with self._start_workers(state, peers) as workers:
            have_saved = False
            for scenario in scenarios:
                chosen = [w for w in workers if w.name in peers_of(scenario, peers)]
                if scenario.kind == "save":
                    self._run_saves(chosen, scenario, cold=not have_saved)
                    have_saved = True
                elif scenario.kind == "loop":
                    self._run_loop(chosen, scenario)
                elif scenario.kind == "gate":
                    self._run_gate(chosen, scenario)
                else:
                    self._run_once(chosen, scenario)

    @contextlib.contextmanager
    def _start_workers(self, state: str, peers: list[str]) -> Iterator[list[Worker]]:
        """Start a process for each way to save, all with the same state; end them after the
        block."""
        spec = spec_of(state, self.settings)
        self._progress(f"{state}: building {format_size(spec.nbytes)} in {len(peers)} processes")
        with contextlib.ExitStack() as stack:
            workers = [
                stack.enter_context(Worker(peer, Session, peer, spec, self._directory))
                for peer in peers
            ]
            for worker in workers:
                self.figures.add(f"state {state}", worker.name, worker.ready().call("info"))
            yield workers
            for worker in workers:
                worker.call("close")

    def _run_saves(self, workers: list[Worker], scenario: Scenario, *, cold: bool) -> None:
        """Run the rounds of a scenario of kind "save".

        A way that needs more than SLOW_S for a save is slow. Slow ways take part only in the cold
        round, if there is one, and in the first FEW_ROUNDS rounds after it.

        Args:
            cold: The processes have not saved yet. They first run one more round, whose figures
                are kept under the name `scenario.cold_name`.
        """
        names = ([scenario.cold_name] if cold else []) + [scenario.name] * self.settings.rounds
        slow: set[str] = set()
        for number, name in enumerate(names):
            for worker in rotated(workers, number):
                nr_warm_rounds = number - 1 if cold else number  # before this one
                if worker.name in slow and nr_warm_rounds >= FEW_ROUNDS:
                    continue
                self._progress(f"{name}, round {number + 1} of {len(names)}: {worker.name}")
                answer = worker.call(
                    "save",
                    busy=scenario.busy,
                    check=number == 0,
                    computing=scenario.computing,
                )
                self.figures.add(name, worker.name, answer)
                if answer["finished_s"] > SLOW_S:
                    slow.add(worker.name)
            self._progress(f"{name}, round {number + 1} of {len(names)}: raw disk")
            assert self._disk is not None
            raw_figures = {"finished_s": self._disk.direct(), "buffered_s": self._disk.buffered()}
            self.figures.add(name, RAW, raw_figures)

    def _run_loop(self, workers: list[Worker], scenario: Scenario) -> None:
        """Run the rounds of a scenario of kind "loop": steps with a save, and steps without.

        The first round warms up; its figures are kept under the name `scenario.cold_name`.
        """
        s = self.settings
        if scenario.state == "loop":
            pairs, steps, batch = s.pairs, s.loop_steps, s.loop_batch
        elif scenario.state == "lightning":
            pairs, steps, batch = s.pairs, s.loop_steps, s.loop_batch_transformer
        else:  # a state as large as "main"
            pairs, steps, batch = s.pairs_large, s.loop_steps_large, s.loop_batch_large
        for number in range(pairs + 1):
            for worker in rotated(workers, number):
                name = scenario.name
                self._progress(f"{name}, round {number + 1} of {pairs + 1}: {worker.name}")
                answer = worker.call("loop", steps=steps, batch=batch)
                kept_as = scenario.cold_name if number == 0 else name
                self.figures.add(kept_as, worker.name, answer)

    def _run_gate(self, workers: list[Worker], scenario: Scenario) -> None:
        """Run the rounds of a scenario of kind "gate", after plain copies of as many bytes.

        The first round warms up; its figures are kept under the name `scenario.cold_name`.
        """
        s = self.settings
        nbytes = spec_of(scenario.state, s).nbytes
        self._progress(f"{scenario.name}: raw memcpy")
        for value in measure_copy(nbytes, s.rounds):
            self.figures.add(scenario.name, RAW, {"memcpy_s": value})
        for number in range(s.rounds + 1):
            for worker in rotated(workers, number):
                self._progress(f"{scenario.name}, round {number + 1} of {s.rounds + 1}")
                answer = worker.call("gate")
                kept_as = scenario.cold_name if number == 0 else scenario.name
                self.figures.add(kept_as, worker.name, answer)

    def _run_once(self, workers: list[Worker], scenario: Scenario) -> None:
        """Run a scenario of kind "watch" or "growth", which has one round."""
        for worker in workers:
            self._progress(f"{scenario.name}: {worker.name}")
            if scenario.kind == "watch":
                worker.call("save", busy=False, check=False)  # so that no way is cold
                curve = worker.call("watch")
                self.curves[worker.name] = curve
                self.figures.add(scenario.name, worker.name, {"finished_s": curve["times_s"][-1]})
            else:
                answer = worker.call("growth", saves=self.settings.growth_saves)
                self.resident = answer.pop("resident_nbytes")
                self.figures.add(scenario.name, worker.name, answer)


# ---- the command line ----------------------------------------------------------------------

FULL_STATE = 1_070_000_000  # bytes; the goals are set for it


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    sizes = (
        ("--state", FULL_STATE, "the state in 1,200 tensors, and of the training loop_large"),
        ("--many", 64_000_000, "the state in 20,000 tensors"),
        ("--large", 4_000_000_000, "the state in 24 tensors"),
        ("--transformer", 400_000_000, "the Lightning checkpoint"),
        ("--loop-state", 160_000_000, "the state of scenario loop"),
    )
    for option, default, text in sizes:
        parser.add_argument(option, type=parse_size, default=default, help=text, metavar="SIZE")
    parser.add_argument("--quick", action="store_true", help="a fifth of each state, few rounds")
    parser.add_argument("--rounds", type=int, default=5, help="warm saves a scenario")
    parser.add_argument(
        "--pairs", type=int, default=10, help="measured pairs (with a save, without) of small loops"
    )
    parser.add_argument(
        "--pairs-large", type=int, default=3, help="the same for scenario loop_large"
    )
    parser.add_argument("--growth-saves", type=int, default=200, help="saves of scenario growth")
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="torch.set_num_threads; taskset -c 0,1 gives the two cores of the goals",
    )
    names = [scenario.name for scenario in SCENARIOS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="SCENARIO")
    parser.add_argument("--peers", nargs="+", choices=tuple(PEERS), default=list(PEERS))
    parser.add_argument("--no-pictures", action="store_true", help="no PNG next to the JSON")
    add_directory_options(parser)
    args = parser.parse_args(argv)
    counts = (args.rounds, args.pairs, args.pairs_large, args.threads, args.growth_saves)
    if min(counts) < 1:
        parser.error("numbers of rounds, pairs, saves and threads start at 1")
    if args.quick:
        for name in ("state", "many", "large", "transformer", "loop_state"):
            default = parser.get_default(name)
            setattr(args, name, min(getattr(args, name), default // 5))
        args.rounds, args.pairs, args.pairs_large = min(args.rounds, 2), min(args.pairs, 3), 1
        args.growth_saves = min(args.growth_saves, 50)
    return args


def _needed_memory_bytes(settings: Settings, names: list[str], nr_peers: int) -> int:
    """Return the bytes of memory that the processes of the largest scenario need together.

    Each process has weights, optimizer state, gradients and torch. The clone, the pool and the file
    in the page cache of the largest save are added, and the source of the raw writes.
    """
    most = 0
    for scenario in SCENARIOS:
        if scenario.name not in names:
            continue
        spec = spec_of(scenario.state, settings)
        alone = scenario.state in ONE_AFTER_ANOTHER or scenario.only_ours
        processes = 1 if alone else nr_peers
        # Gradients are a third of the state, but those of "few" take no memory (states.py).
        state_and_gradients = (1.0 if spec.kind == "few" else 1.4) * spec.nbytes
        torch_bytes = 5e8
        # Warm pools and staging caches stay allocated in each peer that has one.
        copies = (3 if alone else 5.5) * spec.nbytes
        need = processes * (state_and_gradients + torch_bytes) + copies
        most = max(most, int(need))
    return most


def _settings(args: argparse.Namespace) -> Settings:
    return Settings(
        state=args.state,
        many=args.many,
        large=args.large,
        transformer=args.transformer,
        loop_state=args.loop_state,
        rounds=args.rounds,
        pairs=args.pairs,
        pairs_large=args.pairs_large,
        threads=args.threads,
        growth_saves=args.growth_saves,
    )


def _document(run: Run, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON document of a run, from which tables and pictures are made."""
    return {
        "facts": facts,
        "settings": dataclasses.asdict(run.settings),
        "figures": run.figures.to_json(),
        "goals": [
            {
                "scenario": goal.scenario,
                "metric": goal.metric,
                "goal": goal.text,
                "bound": goal.bound,
                "value": goal.value(run.figures),
                "met": goal.is_met(run.figures),
                "judged": goal.judge(run.figures),
                "times_the_bound": goal.times_the_bound(run.figures),
            }
            for goal in GOALS
        ],
        "bytes_over_time": run.curves,
        "resident_nbytes": run.resident,
    }


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    peers = []
    for peer, (_, package) in PEERS.items():
        if peer in args.peers and importlib.util.find_spec(package):
            peers.append(peer)
    for peer in args.peers:
        if peer not in peers:
            print(f"vs_peers.py: {peer} is not installed and left out", file=sys.stderr)
    settings = _settings(args)
    chosen = [scenario for scenario in SCENARIOS if scenario.name in args.only]
    if importlib.util.find_spec("lightning") is None:
        left_out = [scenario for scenario in chosen if scenario.state == "lightning"]
        chosen = [scenario for scenario in chosen if scenario not in left_out]
        for scenario in left_out:
            print(f"vs_peers.py: {scenario.name} needs lightning and is left out", file=sys.stderr)
    names = [scenario.name for scenario in chosen]
    largest = max((spec_of(each.state, settings).nbytes for each in chosen), default=0)
    json_path = args.json or Path("build") / "vs_peers.json"
    memory = _needed_memory_bytes(settings, names, len(peers))
    disk = int(2.5 * largest)  # each file is removed after its save, so this is more than enough
    with (
        measured_in(args, memory=memory, disk=disk) as (directory, facts),
        progress_line() as progress,
    ):
        run = Run(settings, peers, directory, progress)
        run.run_all(names)
    is_small = args.quick or args.state < FULL_STATE
    print_results(run.figures, settings, peers, facts, is_small)
    document = _document(run, facts)
    write_json(json_path, document)
    if not args.no_pictures:
        pictures.draw_document(json_path, document)
    return 0


if __name__ == "__main__":
    end_with(main)
