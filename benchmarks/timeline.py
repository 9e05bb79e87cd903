"""What does a save do to the training steps around it? Draws the first picture of README.

    python benchmarks/timeline.py --dir DIR --json benchmarks/results/timeline.json

The same training is saved in four ways that take turns, each turn in a process of its own. In a
turn the process makes a warm-up save, plain steps, one save with steps until it has ended, and
plain steps again. The process notes when each call, each forward and backward, and each optimizer
step begins and ends. `stillframe.trace` records what our threads do meanwhile.

For each way the turn with the fastest plain steps is drawn, since it was disturbed least. Next to
it is the lost time: the median of all turns, with the smallest and largest. If the lost time cannot
be distinguished from noise, the picture says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pictures
from common import BenchError, Series, Spec, Stamp, end_with, format_size, parse_size, print_table
from machine import add_directory_options, facts_lines, keep_memory, measured_in
from peers import DCP, LIGHTNING, OURS, PEERS, TORCH
from process import Worker

WAYS = (TORCH, LIGHTNING, DCP, OURS)
STEPS_BEFORE = 3  # steps that are drawn before the save
LEAST_STEPS_AFTER = 8  # least steps that are drawn after it
PLAIN_STEPS = 8  # steps on each side that measure a plain step
BACKGROUND = {  # names of spans in stillframe's timeline, and their kinds in the picture
    "copy storage": "copy",
    "copy": "copy",
    "checksum": "write",
    "write": "write",
    "tail": "sync",
    "sync": "sync",
    "commit": "sync",
    "gate": "wait",
}
MOST_S = 120.0  # a save that takes longer has hung

Spans = list[tuple[str, float, float]]


class _Training:
    """The model, and the spans of its steps: name, start and end in seconds."""

    def __init__(self, spec: Spec, batch: int) -> None:
        import states
        import torch

        torch.set_num_threads(spec.threads)
        self.state = states.Mlp(spec)
        width = self.state.model[0].linear.in_features
        self._data = torch.randn(batch, width), torch.randn(batch, width)
        self._loss = torch.nn.functional.mse_loss
        self.spans: Spans = []

    def step(self) -> None:
        start = time.perf_counter()
        self.state.optimizer.zero_grad()
        self._loss(self.state.model(self._data[0]), self._data[1]).backward()
        middle = time.perf_counter()
        self.state.optimizer.step()
        self.spans += [("forward, backward", start, middle)]
        self.spans += [("optimizer.step()", middle, time.perf_counter())]

    def steps(self, count: int) -> float:
        """Make `count` steps; return the seconds that all of them took."""
        start = time.perf_counter()
        for _ in range(count):
            self.step()
        return time.perf_counter() - start


def turn(way: str, nbytes: int, batch: int, threads: int, directory: str) -> dict[str, Any]:
    """Run one turn of one way in this process.

    Returns:
        The figures, and for the picture "spans" of the training and "background" work of our
        threads, in seconds from the call.
    """
    keep_memory()
    training = _Training(Spec(nbytes, "mlp", 120, threads), batch)
    peer = PEERS[way][0]()
    training.steps(6)  # not measured: until the optimizer's state is known, and all is warm
    _save(training, peer, f"{directory}/warm-up")
    training.steps(2)
    plain_s = training.steps(PLAIN_STEPS)
    training.spans.clear()  # the picture begins with the next steps
    training.steps(STEPS_BEFORE)
    trace = Path(directory, "trace.json")
    with _traced(way, trace):
        measured = _save_in_training(training, peer, f"{directory}/save")
    nr_steps, total_s, start, returned, ended, waited_s = measured  # see _save_in_training
    plain_s += training.steps(PLAIN_STEPS)
    peer.close()
    step_s = plain_s / (2 * PLAIN_STEPS)
    # Each step has two spans. The spans of the plain steps after the save are left out.
    spans = [("call", start, returned), *training.spans[: 2 * (STEPS_BEFORE + nr_steps)]]
    return {
        "step_s": step_s,
        "lost_s": total_s - nr_steps * step_s,
        "call_s": returned - start,
        "wait_s": waited_s,
        "ended_s": ended - start,
        "spans": [
            (name, round(begin - start, 5), round(end - start, 5)) for name, begin, end in spans
        ],
        "background": _read_background_spans(trace) if way == OURS else {},
    }


def _save(training: _Training, peer: Any, path: str) -> None:
    """Save once, and wait until the save has ended."""
    stamp = Stamp()
    peer.save(training.state.tree(), path, stamp)
    _wait(stamp)
    peer.collect()


def _wait(stamp: Stamp) -> None:
    end = time.monotonic() + MOST_S
    while not stamp.at_ns:
        if time.monotonic() > end:
            raise BenchError(f"a save has not ended after {MOST_S:.0f} s")
        time.sleep(0.002)


def _save_in_training(
    training: _Training, peer: Any, path: str
) -> tuple[int, float, float, float, float, float]:
    """Make a save, with steps until it has ended.

    Returns:
        The number of steps; the seconds of the call and these steps together; the times at which
        the call began, the call returned and the save ended (perf_counter); the seconds that a step
        waited for the copy.
    """
    stamp = Stamp()
    begun = time.perf_counter()
    tree = training.state.tree()
    call_begun = time.perf_counter()
    peer.save(tree, path, stamp)
    returned = time.perf_counter()
    nr_steps = 0
    while nr_steps < LEAST_STEPS_AFTER or not stamp.at_ns:
        training.step()
        nr_steps += 1
        if returned + MOST_S < time.perf_counter():
            raise BenchError(f"a save has not ended after {MOST_S:.0f} s")
    total_s = time.perf_counter() - begun
    waited_s = peer.collect().get("gate_wait_s", 0.0)
    save_ended = stamp.at_ns / 1e9
    return nr_steps, total_s, call_begun, returned, save_ended, waited_s


def _traced(way: str, path: Path) -> Any:
    """Return a context that writes stillframe's timeline to `path`; for peers it does nothing."""
    import contextlib

    if way != OURS:
        return contextlib.nullcontext()
    import stillframe

    return stillframe.trace(path)


def _read_background_spans(path: Path) -> dict[str, list[float]]:
    """Return the spans of a trace that the picture shows, by the kinds in BACKGROUND.

    Each is a list in which the begins and ends of spans alternate, in seconds from the call.
    """
    events = json.loads(path.read_text())["traceEvents"]
    (call_us,) = [event["ts"] for event in events if event["name"] == "async_save"]
    found: dict[str, list[float]] = {}
    for event in events:
        is_span = event.get("ph") == "X"  # an event with a duration
        if is_span and event["name"] in BACKGROUND:
            begin_s = (event["ts"] - call_us) / 1e6
            end_s = begin_s + event["dur"] / 1e6
            times = found.setdefault(BACKGROUND[event["name"]], [])
            times += [round(begin_s, 5), round(end_s, 5)]
    return found


# ---- the parent --------------------------------------------------------------------------------


def run(options: argparse.Namespace, directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the results of `turn`, one for each round, by way."""
    turns: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for number in range(options.rounds):
        ways = WAYS if number % 2 == 0 else WAYS[::-1]
        for way in ways:
            with tempfile.TemporaryDirectory(dir=directory) as scratch:
                # Earlier writes must not slow this turn.
                subprocess.run(["sync", "-f", scratch], check=True)
                sizes = (options.state, options.batch, options.threads)
                with Worker(way, import_module, "timeline") as worker:
                    turns[way].append(worker.ready().call("turn", way, *sizes, scratch))
            print(f"{way}: lost {turns[way][-1]['lost_s'] * 1e3:.0f} ms", file=sys.stderr)
    return turns


def show(turns: dict[str, list[dict[str, Any]]]) -> None:
    """Print a table of all turns on stdout."""

    def cell(way: str, name: str) -> str:
        values = sorted(each[name] * 1e3 for each in turns[way])
        return f"{statistics.median(values):.0f} ms ({values[0]:.0f}..{values[-1]:.0f})"

    names = ("lost_s", "call_s", "wait_s", "ended_s", "step_s")
    print_table(
        "Medians (smallest..largest)",
        ["", "lost time", "call", "wait before the step", "ended after", "a step without"],
        [[way, *(cell(way, name) for name in names)] for way in WAYS],
    )


def summary(turns: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the lost time of each way over its turns, and the turn that the picture shows."""
    return {
        way: {
            "lost_s": Series.of([turn["lost_s"] for turn in turns_of_way]).to_json(),
            "shown": min(turns_of_way, key=lambda turn: turn["step_s"]),  # disturbed least
        }
        for way, turns_of_way in turns.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_directory_options(parser)
    parser.add_argument("--state", type=parse_size, default=200 * 10**6)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    # An estimate: the disk has the files of a turn, those of the warm-up and of the save.
    need = {"memory": 6 * options.state, "disk": 3 * options.state}
    with measured_in(options, **need) as (directory, facts):
        turns = run(options, directory)
    print("\n".join(facts_lines(facts)))
    print(f"{format_size(options.state)} of state, batches of {options.batch}")
    show(turns)
    document = {"facts": facts, "state": options.state, "turns": summary(turns)}
    pictures.save_and_draw(options.json, document)
    return 0


if __name__ == "__main__":
    end_with(main)
