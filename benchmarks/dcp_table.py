"""The table of dcp.py, on the terminal and in the docs, and the goals for its figures."""

from __future__ import annotations

import math
from typing import Any

from common import Series, format_size, format_times
from dcp_ways import BOUND, DEFAULT, DISTRIBUTED_IO, META, PROCESS, SHARDED, STAGER
from goals import ABSENT, Goal
from measured import Figures
from peers import OURS

# Scenario, metric and title of each row. In the titles, "a save" means for each save. The row of
# "noise_s" is the noise of the lost time: it is computed in the same way, but from plain steps.
ROWS = (
    ("idle", "call_s", "main thread idle: the call blocks"),
    ("idle", "call_cpu_s", "processor time of the call's thread"),
    ("idle", "finished_s", "finished after"),
    ("idle", "cpu_s", "processor time of a rank's process until then"),
    ("busy", "call_s", "main thread busy: the call blocks"),
    ("busy", "finished_s", "finished after"),
    ("busy", "stall_s", "longest stall"),
    ("loop", "lost_s", "training loop: lost time a save"),
    ("loop", "noise_s", "the same of steps without one"),
    ("loop", "step_s", "a step without one"),
    ("loop", "state_s", "get_state_dict before a call"),
    ("loop", "finished_s", "finished after"),
    ("idle", "memory", "extra memory of a rank's process at its first save, x its state"),
)
DIFFERENCES = ("lost_s", "noise_s")  # metrics that are shown with their standard error
# The ways to save, in the order of the columns, and the titles of their columns in the docs.
TITLES = {
    DEFAULT: "DCP `async_save`",
    STAGER: "with a DefaultStager kept",
    PROCESS: "in its process",
    META: "`torch_checkpointing`, not synced",
    OURS: "`stillframe.dcp.async_save`",
    BOUND: "bound: a file a rank, two collectives",
    SHARDED: "Lightning, sharded: DCP `save`",
    DISTRIBUTED_IO: "Lightning's `DistributedAsyncCheckpointIO`",
}


def goals() -> tuple[Goal, ...]:
    """Return the goals, which were set before anything was measured."""
    found = []
    for scenario in ("idle", "busy"):
        dcp_call = ((scenario, DEFAULT, "call_s"),)
        text = f"{scenario}: call ≤ 1/20 of DCP's"
        found.append(Goal(scenario, "call_s", 1 / 20, text, dcp_call))
    for scenario in ("idle", "busy"):
        bound_end = ((scenario, BOUND, "finished_s"),)
        text = f"{scenario}: finished ≤ 1.5 x the bound"
        found.append(Goal(scenario, "finished_s", 1.5, text, bound_end))
        dcp_end = ((scenario, DEFAULT, "finished_s"),)
        text = f"{scenario}: finished ≤ 1/10 of DCP's"
        found.append(Goal(scenario, "finished_s", 1 / 10, text, dcp_end))
    found.append(Goal("idle", "memory", 1.05, "extra memory of the first save ≤ 1.05 x the state"))
    text = "a call with 1,200 small DTensors ≤ 8 ms of processor time"
    found.append(Goal("dtensors", "call_cpu_s", 0.008, text))
    return tuple(found)


def figures_of(document: dict[str, Any]) -> Figures:
    """Return the figures of a run from the JSON document that it saved."""
    figures = Figures()
    for scenario, ways in document["figures"].items():
        for way, metrics in ways.items():
            for metric, series in metrics.items():
                figures.add_statistics(scenario, way, metric, Series(**series))
    return figures


def ways_of(figures: Figures) -> list[str]:
    """Return the ways that have figures, in the order of the columns."""
    return [way for way in TITLES if figures.series("idle", way, "call_s")]


def _cell(metric: str, series: Series | None) -> str:
    if series is None:
        return "-"
    if metric == "memory":
        return f"{series.median:.2f} x"
    if metric in DIFFERENCES:
        return f"{series.median * 1e3:.0f} ± {series.error * 1e3:.0f} ms"
    return format_times(series.spread)


def rows(figures: Figures, ways: list[str]) -> list[list[str]]:
    """Return the rows of the table: a title, and a cell for each way."""
    return [
        [title, *(_cell(metric, figures.series(scenario, way, metric)) for way in ways)]
        for scenario, metric, title in ROWS
    ]


def verdicts(figures: Figures) -> list[str]:
    """Return a line for each goal: whether it is met, and the compared medians with their
    errors."""
    return [f"{goal.verdict(figures)}{_compared(goal, figures)}" for goal in goals()]


def _compared(goal: Goal, figures: Figures) -> str:
    """Return "; " and the medians that the goal compares, or "" if they were not measured."""
    if goal.judge(figures) == ABSENT:
        return ""
    found = [figures.series(goal.scenario, OURS, goal.metric)]
    found += [figures.series(*key) for key in goal.others]
    texts = [_with_error(goal.metric, series) for series in found if series]
    return f"; {' against '.join(texts)}"


def _with_error(metric: str, series: Series) -> str:
    if metric == "memory":
        return f"{series.median:.2f} ± {series.error:.2f} x"
    median_ms, error_ms = series.median * 1e3, series.error * 1e3
    magnitude = math.floor(math.log10(max(median_ms, 1e-3)))  # of the first digit
    decimals = max(0, 2 - magnitude)  # for three significant digits
    return f"{median_ms:.{decimals}f} ± {error_ms:.{decimals}f} ms"


def page(document: dict[str, Any]) -> list[str]:
    """Return the lines of the table in docs/figures.md, from the JSON document of a run."""
    facts, settings, figures = document["facts"], document["settings"], figures_of(document)
    ways = ways_of(figures)
    lines = [
        f"{format_size(settings['state'])} of model and AdamW in {6 * settings['layers']:,}"
        f" DTensors on {settings['ranks']} ranks; {facts['cores']} cores ({facts['cpu']}),"
        f" {facts['filesystem']}, no GPU; torch {facts['torch'].split('+')[0]}; medians"
        f" (smallest..largest) over rounds and ranks, {facts['date'][:10]}:",
        "",
        "| | " + " | ".join(TITLES[way] for way in ways) + " |",
        "|---|" + "---|" * len(ways),
        *("| " + " | ".join(row) + " |" for row in rows(figures, ways)),
        "",
        "What was to be reached, and the medians compared, with their standard errors:",
        "",
        *(f"- {line}" for line in verdicts(figures)),
    ]
    return lines + [f"- {way} failed: {why}" for way, why in document["failed"].items()]
