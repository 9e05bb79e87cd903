"""The figures of one run of vs_peers.py, the goals they are held against, and the table."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from common import TENSOR_BYTES, Series, format_seconds, format_size, format_times, print_table
from machine import facts_lines

OURS, LIGHTNING, TORCH, RAW = "stillframe", "Lightning", "torch.save", "raw"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes in bytes, counts a way to save."""

    state: int
    loop_state: int
    rounds: int
    pairs: int
    pairs_large: int
    threads: int
    loop_steps: int = 4
    loop_batch: int = 128
    loop_steps_large: int = 4
    loop_batch_large: int = 64


# ---- the figures of one run ----------------------------------------------------------------


class Figures:
    """scenario -> way to save -> metric -> one value a round."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str, str], list[float]] = defaultdict(list)

    def add(self, scenario: str, who: str, figures: dict[str, float]) -> None:
        for metric, value in figures.items():
            self._values[scenario, who, metric].append(value)

    def series(self, scenario: str, who: str, metric: str) -> Series | None:
        values = self._values.get((scenario, who, metric))
        return Series.of(values) if values else None

    def median(self, scenario: str, who: str, metric: str) -> float | None:
        series = self.series(scenario, who, metric)
        return None if series is None else series.median

    def everywhere(self, metric: str) -> list[float]:
        """Every value of one metric, of all scenarios and ways to save."""
        return [v for key, values in self._values.items() if key[2] == metric for v in values]

    def to_json(self) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for (scenario, who, metric), values in self._values.items():
            place = tree.setdefault(scenario, {}).setdefault(who, {})
            place[metric] = Series.of(values).to_json()
        return tree


# ---- the goals -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Goal:
    """A bound on our median, or on its ratio to another median of the same run.

    other: (scenario, who, metric) that ours is divided by; None bounds ours itself. at_most:
    False turns the bound round.
    """

    scenario: str
    metric: str
    bound: float
    text: str
    other: tuple[str, str, str] | None = None
    at_most: bool = True
    who: str = OURS

    def value(self, figures: Figures) -> float | None:
        """What is compared with the bound; None where the run has no such figures."""
        ours = figures.median(self.scenario, self.who, self.metric)
        if ours is None or self.other is None:
            return ours
        other = figures.median(*self.other)
        return None if other is None or other <= 0 else ours / other

    def met(self, figures: Figures) -> bool | None:
        value = self.value(figures)
        if value is None:
            return None
        return value <= self.bound if self.at_most else value >= self.bound

    def verdict(self, figures: Figures) -> str:
        met, value = self.met(figures), self.value(figures)
        if met is None or value is None:
            return f"{self.text}: -"
        ratio = f" ({_format_ratio(value)})" if self.other else ""
        return f"{self.text}{ratio}: {'met' if met else 'MISSED'}"


def _format_ratio(value: float) -> str:
    if value <= 0:
        return "below the noise"
    return f"1/{1 / value:.1f}" if value < 0.5 else f"{value:.2f} x"


GOALS = (
    Goal("busy", "call_s", 0.006, "≤ 6 ms"),
    Goal("busy", "call_s", 1 / 25, "≤ 1/25 of Lightning's", ("busy", LIGHTNING, "call_s")),
    Goal("busy", "finished_s", 1 / 15, "≤ 1/15 of Lightning's", ("busy", LIGHTNING, "finished_s")),
    Goal("busy", "finished_s", 1.5, "≤ 1.5 x raw disk", ("busy", RAW, "finished_s")),
    Goal("busy", "speed", 0.9, "≥ 90 %", at_most=False),
    Goal("busy", "stall_s", 0.005, "≤ 5 ms"),
    Goal("busy", "extra_rss", 1.1, "≤ 1.1 x the state"),
    Goal("loop", "lost_s", 0.2, "≤ 1/5 of Lightning's", ("loop", LIGHTNING, "lost_s")),
    Goal("loop", "lost_s", 0.2, "≤ 1/5 of torch.save's", ("loop", TORCH, "lost_s")),
    Goal("loop_large", "lost_s", 0.2, "≤ 1/5 of Lightning's", ("loop_large", LIGHTNING, "lost_s")),
    Goal("loop_large", "lost_s", 0.2, "≤ 1/5 of torch.save's", ("loop_large", TORCH, "lost_s")),
)


# ---- the table -----------------------------------------------------------------------------

Format = Callable[[Sequence[float]], str]


def _percent(values: Sequence[float]) -> str:
    first, *others = (f"{100 * value:.0f}" for value in values)
    return f"{first} %" + (f" ({'..'.join(others)})" if others else "")


def _times(values: Sequence[float]) -> str:
    first, *others = (f"{value:.2f}" for value in values)
    return f"{first} x" + (f" ({'..'.join(others)})" if others else "")


TIME: Format = format_times
SAVE_ROWS = (
    ("call_s", "call blocks", TIME),
    ("finished_s", "finished after", TIME),
    ("speed", "main thread's speed meanwhile", _percent),
    ("stall_s", "longest stall", TIME),
    ("stall_alone_s", "(longest stall without a save)", TIME),
    ("extra_rss", "extra memory, x the state", _times),
)
IDLE_ROWS = tuple(row for row in SAVE_ROWS if row[0] != "speed")
FEW_ROWS = tuple(row for row in SAVE_ROWS if row[0] in ("call_s", "finished_s", "extra_rss"))
LOOP_ROWS = (
    ("lost_s", "lost time a save", TIME),
    ("call_s", "  of it call", TIME),
    ("gate_s", "  of it gate", TIME),
    ("slowdown_s", "  of it slowdown of the steps", TIME),
    ("finished_s", "finished after", TIME),
    ("step_s", "(a step without saves)", TIME),
)


def _sections(s: Settings) -> list[tuple[str, str, tuple[Any, ...]]]:
    big, small = format_size(s.state), format_size(s.loop_state)
    count = 3 * max(1, round(s.state / (3 * TENSOR_BYTES)))
    return [
        ("busy", f"{big} in {count} tensors, main thread busy in Python, warm", SAVE_ROWS),
        ("idle", "the same, main thread idle, warm", IDLE_ROWS),
        ("busy_cold", "the first save of a process, main thread busy", FEW_ROWS),
        ("idle_cold", "the first save of a process, main thread idle", FEW_ROWS),
        ("unowned", f"{big} that no optimizer owns, main thread idle, warm", FEW_ROWS),
        ("unowned_cold", "the same, first save of a process", FEW_ROWS),
        ("loop", f"training loop on {s.threads} threads, {small} of state", LOOP_ROWS),
        ("loop_large", f"training loop on {s.threads} threads, {big} of state", LOOP_ROWS),
    ]


def _cell(series: Series | None, form: Format) -> str:
    if series is None:
        return "-"
    if len(series.values) == 1:
        return form([series.median])
    return form([series.median, min(series.values), max(series.values)])


def table_rows(figures: Figures, settings: Settings, peers: list[str]) -> list[list[str] | None]:
    """One row a figure and scenario: what, each way to save, the raw disk, the goal's verdict."""
    rows: list[list[str] | None] = []
    for scenario, title, metrics in _sections(settings):
        if not any(figures.series(scenario, p, "call_s") for p in peers):
            continue
        if rows:
            rows.append(None)
        rows.append([title, *[""] * (len(peers) + 2)])
        for metric, label, form in metrics:
            cells = [_cell(figures.series(scenario, p, metric), form) for p in peers]
            raw = figures.series(scenario, RAW, metric)
            verdicts = [
                goal.verdict(figures)
                for goal in GOALS
                if (goal.scenario, goal.metric) == (scenario, metric)
            ]
            first = verdicts[0] if verdicts else ""
            rows.append([f"  {label}", *cells, _cell(raw, form) if raw else "", first])
            rows.extend([["", *[""] * (len(peers) + 1), verdict] for verdict in verdicts[1:]])
            if metric == "lost_s":
                noise = [figures.series(scenario, p, metric) for p in peers]
                errors = [
                    f"± {format_seconds(n.error)}" if n and len(n.values) > 2 else "-"
                    for n in noise
                ]
                rows.append(["  (standard error of that median)", *errors, "", ""])
    return rows


def print_results(
    figures: Figures, settings: Settings, peers: list[str], facts: dict[str, Any], small: bool
) -> None:
    """The machine, the raw limits, the table and a line that counts the goals."""
    print("\n".join(facts_lines(facts)))
    nbytes = settings.state
    limits = []
    memcpy = figures.median("limits", RAW, "memcpy_s")
    if memcpy:
        limits.append(f"memcpy {nbytes / memcpy / 1e9:.1f} GB/s (one thread)")
    labels = (("finished_s", "O_DIRECT + fdatasync"), ("buffered_s", "buffered + fsync"))
    for metric, label in labels:
        medians = [
            value
            for scenario in ("busy_cold", "busy", "idle_cold", "idle", "unowned_cold", "unowned")
            if (series := figures.series(scenario, RAW, metric)) is not None
            for value in series.values
        ]
        if medians:
            middle = statistics.median(medians)
            limits.append(f"{label} {nbytes / middle / 1e9:.2f} GB/s ({format_seconds(middle)})")
    print("Raw limits in this run: " + ", ".join(limits))
    if small:
        print("A smaller run than the full one: the goals are set for that, on two quiet cores.")
    print()
    finished = {TORCH: " (unsynced)", LIGHTNING: " (unsynced)", OURS: " (durable)"}
    print_table(
        "Medians (min..max)",
        ["", *[p + finished[p] for p in peers], "raw disk (durable)", "goal"],
        table_rows(figures, settings, peers),
    )
    shares = figures.everywhere("others")
    if shares:
        print(
            f"Other processes took {100 * statistics.median(shares):.0f} % of the machine during "
            f"the median measurement, {100 * max(shares):.0f} % during the worst"
            + ("." if statistics.median(shares) < 0.03 else ": these figures are disturbed.")
        )
    met = [goal.met(figures) for goal in GOALS]
    print(f"{met.count(True)} goals met, {met.count(False)} missed, {met.count(None)} not measured")
