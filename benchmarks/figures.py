"""The table that shows the figures of one run of vs_peers.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from common import Series, format_seconds, format_size, format_times, print_table
from goals import GOALS, count
from machine import DISTURBING_SHARE, facts_lines
from measured import Figures, Settings
from peers import DCP, DCP_STAGER, OURS, RAW
from scenarios import SCENARIOS, Scenario, title_of

# A function that formats (median,) or (median, smallest, largest).
Format = Callable[[Sequence[float]], str]


def _percent(values: Sequence[float]) -> str:
    """Format shares: `98 % (97..99)`."""
    first, *others = (f"{100 * value:.0f}" for value in values)
    return f"{first} %" + (f" ({'..'.join(others)})" if others else "")


def _format_multiples(values: Sequence[float]) -> str:
    """Format multiples: `1.05 x (1.01..1.10)`."""
    first, *others = (f"{value:.2f}" for value in values)
    return f"{first} x" + (f" ({'..'.join(others)})" if others else "")


def _size_or_none(values: Sequence[float]) -> str:
    return format_size(values[0]) if values[0] > 0 else "none"


TIME: Format = format_times
# How complete a save is when its way says "finished". All other ways sync nothing.
ENDS = {OURS: "durable", DCP: "file synced", DCP_STAGER: "file synced"}

# The rows of each kind of scenario: metric, title, format.
SAVE_ROWS = (
    ("call_s", "call blocks", TIME),
    ("finished_s", "finished after", TIME),
    ("speed", "main thread's speed meanwhile", _percent),
    ("stall_s", "longest stall", TIME),
    ("stall_alone_s", "(longest stall without a save)", TIME),
    ("extra_rss", "extra memory, x the state", _format_multiples),
)
IDLE_ROWS = tuple(row for row in SAVE_ROWS if row[0] != "speed")
FEW_ROWS = tuple(row for row in SAVE_ROWS if row[0] in ("call_s", "finished_s", "extra_rss"))
LOOP_ROWS = (
    ("lost_s", "lost time a save", TIME),
    ("call_s", "  of it call", TIME),
    ("gate_s", "  of it wait before the step", TIME),
    ("slowdown_s", "  of it slowdown of the steps", TIME),
    ("finished_s", "finished after", TIME),
    ("step_s", "(a step without saves)", TIME),
)
GATE_ROWS = (
    ("gate_at_once_s", "wait of a step at once", TIME),
    ("gate_late_s", "wait of a step a second later", TIME),
    ("deferred_share", "of the state is deferred", _percent),
    ("memcpy_s", "(raw memcpy of as many bytes, one thread)", TIME),
)
GROWTH_ROWS = (("growth_nbytes", "growth of the process's memory", _size_or_none),)
WATCH_ROWS = (("finished_s", "finished after", TIME),)


def _rows_of(scenario: Scenario) -> tuple[tuple[str, str, Format], ...]:
    if scenario.kind == "save":
        return SAVE_ROWS if scenario.busy else IDLE_ROWS
    rows = {"loop": LOOP_ROWS, "gate": GATE_ROWS, "growth": GROWTH_ROWS, "watch": WATCH_ROWS}
    return rows[scenario.kind]


def _sections(s: Settings) -> list[tuple[str, str, tuple[Any, ...]]]:
    """Return (scenario, title, rows) for each section of the table.

    The first save of each process, which no median includes, has a section of its own.
    """
    sections = []
    for scenario in SCENARIOS:
        title = title_of(scenario, s)
        sections.append((scenario.name, title, _rows_of(scenario)))
        if scenario.kind == "save":
            sections.append((scenario.cold_name, f"{scenario.cold_name}: the first save", FEW_ROWS))
    return sections


def _cell(series: Series | None, format_values: Format) -> str:
    if series is None:
        return "-"
    if series.n == 1:
        return format_values([series.median])
    return format_values(series.spread)


def table_rows(figures: Figures, settings: Settings, peers: list[str]) -> list[list[str] | None]:
    """Return the rows of the table: for each scenario a row with its title, and its rows below.

    The cells of a row are the metric's title, a value for each way to save, the value of the raw
    disk or memory, and the verdict on our value.
    """
    rows: list[list[str] | None] = []
    for scenario, title, metrics in _sections(settings):
        first_metric = metrics[0][0]
        if not any(figures.series(scenario, peer, first_metric) for peer in peers):
            continue  # the scenario was not measured
        if rows:
            rows.append(None)  # an empty line between scenarios
        rows.append([title, *[""] * (len(peers) + 2)])  # empty cells: the peers, raw and verdict
        for metric, label, format_values in metrics:
            cells = [_cell(figures.series(scenario, peer, metric), format_values) for peer in peers]
            raw = figures.series(scenario, RAW, metric)
            verdicts = [
                goal.verdict(figures)
                for goal in GOALS
                if (goal.scenario, goal.row or goal.metric) == (scenario, metric)
            ]
            first = verdicts[0] if verdicts else ""
            rows.append([f"  {label}", *cells, _cell(raw, format_values) if raw else "", first])
            for verdict in verdicts[1:]:  # each in a row without figures
                rows.append(["", *[""] * (len(peers) + 1), verdict])
            if metric == "lost_s":
                lost = [figures.series(scenario, peer, metric) for peer in peers]
                errors = [f"± {format_seconds(s.error)}" if s and s.n > 2 else "-" for s in lost]
                rows.append(["  (standard error of that median)", *errors, "", ""])
    return rows


def print_results(
    figures: Figures, settings: Settings, peers: list[str], facts: dict[str, Any], small: bool
) -> None:
    """Print the machine, the table and a line that counts the goals.

    small: The states are smaller than those that the goals were set for; a line says so.
    """
    print("\n".join(facts_lines(facts)))
    if small:
        print(
            "A smaller run than the full one: the goals are set for a full run on two quiet cores."
        )
    print()
    print_table(
        "Medians (min..max)",
        ["", *[f"{peer} ({ENDS.get(peer, 'unsynced')})" for peer in peers], "raw", "goal"],
        table_rows(figures, settings, peers),
    )
    shares = figures.everywhere("others")
    if shares:
        is_quiet = statistics.median(shares) < DISTURBING_SHARE
        print(
            f"Other processes took {100 * statistics.median(shares):.0f} % of the machine during "
            f"the median measurement, {100 * max(shares):.0f} % during the worst"
            + ("." if is_quiet else ": these figures are disturbed.")
        )
    print(count(figures))
