"""Goals of the benchmarks: no competitor is dropped, and noise is not a success."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    before = set(sys.modules)
    import figures
    import goals
    import measured

    yield goals, measured, figures
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(SCRIPTS)):
            del sys.modules[name]


def found(scripts: Any, **values: list[float]) -> Any:
    """Return the figures of one scenario and metric; `ours` and others by name."""
    goals, measured, _ = scripts
    figures = measured.Figures()
    for who, series in values.items():
        for value in series:
            figures.add("s", goals.OURS if who == "ours" else who, {"t": value})
    return figures


def goal(scripts: Any, bound: float, *others: str, at_most: bool = True) -> Any:
    keys = tuple(("s", who, "t") for who in others)
    return scripts[0].Goal("s", "t", bound, "text", keys, at_most=at_most)


def judged(
    scripts: Any, bound: float, others: str = "", at_most: bool = True, **values: Any
) -> str:
    return str(
        goal(scripts, bound, *others.split(), at_most=at_most).judge(found(scripts, **values))
    )


def test_a_bound_is_met_or_missed(scripts):
    assert judged(scripts, 1.0, ours=[0.5]) == "met" == judged(scripts, 1.0, ours=[1.0])
    assert judged(scripts, 1.0, ours=[1.5]) == "missed"
    assert judged(scripts, 0.9, at_most=False, ours=[0.95]) == "met"
    assert judged(scripts, 0.9, at_most=False, ours=[0.85]) == "missed"
    assert judged(scripts, 1.0) == "not measured" == judged(scripts, 1.0, "a", ours=[0.5])


def test_difference_within_the_noise_is_neither_met_nor_missed(scripts):
    wide = [0.2, 0.6, 0.9, 1.2, 1.6]
    assert judged(scripts, 1.0, ours=wide) == judged(scripts, 0.8, ours=wide) == "within the error"
    assert judged(scripts, 2.0, ours=wide) == "met" and judged(scripts, 0.3, ours=wide) == "missed"
    assert judged(scripts, 1.0, "a", ours=[0.95], a=wide) == "within the error"
    assert judged(scripts, 1.0, "a", ours=[0.95], a=[1.0]) == "met"
    assert judged(scripts, 0.1, "a", ours=[0.1], a=wide) == "within the error"
    assert judged(scripts, 0.1, "a", ours=[0.2], a=wide) == "missed"  # its error is a tenth too


def test_a_peer_at_or_below_zero_is_not_dropped(scripts):
    for least in (0.0, -0.1):
        assert judged(scripts, 1.0, "a b", ours=[0.5], a=[2.0], b=[least]) == "missed"
        assert judged(scripts, 1 / 7, "b", ours=[0.5], b=[least]) == "missed"
        assert judged(scripts, 1 / 7, "b", ours=[-0.5], b=[least]) == "met"
    assert judged(scripts, 1 / 7, "b", ours=[-0.05], b=[-0.1]) == "missed"
    assert judged(scripts, 1.0, "a b", ours=[0.5], a=[2.0], b=[0.6]) == "met"


def test_verdicts_say_what_was_judged(scripts):
    def judged(bound: float, **values: list[float]) -> str:
        others = [name for name in values if name != "ours"]
        return str(goal(scripts, bound, *others).verdict(found(scripts, **values)))

    assert judged(1.0, ours=[0.5]) == "text: met"
    assert judged(1.0, ours=[1.5]) == "text: MISSED (1.50 x the bound)"
    assert judged(1.0, ours=[0.25], a=[1.0]) == "text (1/4.0): met"
    assert judged(1.0, ours=[0.5], a=[0.0]) == "text (the other is not above zero): MISSED"
    assert judged(1.0, ours=[0.9, 1.1], a=[1.0]) == "text (1.00 x): within the error"
    assert judged(1.0, ours=[]) == "text: -"


def test_the_line_below_the_table_counts_every_goal_once(scripts, monkeypatch):
    goals, *_ = scripts
    ours = goals.Goal("s", "t", 1.0, "text")
    monkeypatch.setattr(goals, "GOALS", (ours, goals.Goal("s", "u", 1.0, "text")))
    line = goals.count(found(scripts, ours=[0.5]))
    assert line == "1 goals met, 0 missed, 0 within the error, 1 not measured"
    assert all(math.isfinite(each.bound) and each.text for each in goals.GOALS)


def test_every_goal_has_a_row_in_the_table(scripts):
    goals, measured, figures = scripts
    settings = measured.Settings(*[1] * 10)
    rows = {(name, metric) for name, _, rows in figures._sections(settings) for metric, *_ in rows}
    assert {(each.scenario, each.row or each.metric) for each in goals.GOALS} <= rows


def test_each_round_begins_with_the_next_way(scripts):
    import common

    rounds = [common.rotated("abc", number) for number in range(4)]
    assert ["".join(each) for each in rounds] == ["abc", "bca", "cab", "abc"]
    assert common.rotated([], 3) == []
