"""The class of a goal, and the goals for the figures of vs_peers.py. dcp_table.py has dcp.py's."""

from __future__ import annotations

import dataclasses
import math

from common import Series
from measured import Figures
from peers import DCP, DCP_STAGER, LIGHTNING, OURS, RAW, TORCH, TORCH_NO_CRC

FigureKey = tuple[str, str, str]  # scenario, way to save, metric: what `Figures.series` takes

MET, MISSED, UNCLEAR, ABSENT = "met", "missed", "within the error", "not measured"


@dataclasses.dataclass(frozen=True)
class Goal:
    """A limit for stillframe's median of one metric in one scenario.

    The limit is `bound`. If `others` names other figures of the same run, it is `bound` times the
    least of their medians. The goal is met or missed if stillframe's median differs from the limit
    by more than the standard error of the difference; otherwise the goal is unclear. Lost times are
    differences, so the least median may be zero or negative. Then a multiple of it is no sensible
    limit, and the limit is the least median itself.

    at_most: False makes the bound a lower one. row: the metric whose row of the table shows the
    verdict, if that is not `metric`.
    """

    scenario: str
    metric: str
    bound: float
    text: str
    others: tuple[FigureKey, ...] = ()
    at_most: bool = True
    row: str = ""

    def _compared(self, figures: Figures) -> tuple[Series, Series | None] | None:
        """Return our series, and that of `others` with the least median (None without others).

        Return None if this run lacks our figure, or all figures of `others`.
        """
        ours = figures.series(self.scenario, OURS, self.metric)
        if ours is None:
            return None
        if not self.others:
            return ours, None
        found = [figures.series(*key) for key in self.others]
        measured = [each for each in found if each is not None]
        if not measured:
            return None
        return ours, min(measured, key=lambda each: each.median)

    def value(self, figures: Figures) -> float | None:
        """Return what is compared with `bound`: our median, or its ratio to the least of the
        others.

        Return None if the run has no such figure, or if the least median is not above zero.
        """
        compared = self._compared(figures)
        if compared is None:
            return None
        ours, least_other = compared
        if least_other is None:  # the goal has no `others`
            return ours.median
        return ours.median / least_other.median if least_other.median > 0 else None

    def judge(self, figures: Figures) -> str:
        """Return whether the goal is MET, MISSED, UNCLEAR or ABSENT."""
        compared = self._compared(figures)
        if compared is None:
            return ABSENT
        ours, least_other = compared
        if least_other is None:  # the goal has no `others`
            limit, error = self.bound, ours.error
        else:
            # A multiple of a time that is not above zero would be no sensible limit.
            factor = self.bound if least_other.median > 0 else 1.0
            limit = factor * least_other.median
            error = math.hypot(ours.error, factor * least_other.error)  # of the difference
        # How far our median is on the wrong side of the limit; negative on the right side.
        excess = ours.median - limit if self.at_most else limit - ours.median
        if error > 0 and abs(excess) <= error:
            return UNCLEAR
        return MET if excess <= 0 else MISSED

    def is_met(self, figures: Figures) -> bool | None:
        """Return whether the goal is met; None if it is not measured, or unclear."""
        return {MET: True, MISSED: False}.get(self.judge(figures))

    def times_the_bound(self, figures: Figures) -> float | None:
        """Return by what factor our value exceeds the bound (1 or less: the goal is met).

        Return None if the value is not measured.
        """
        value = self.value(figures)
        if value is None:
            return None
        if not self.at_most:
            return self.bound / value if value > 0 else float("inf")
        return value / self.bound if self.bound > 0 else float("inf")

    def verdict(self, figures: Figures) -> str:
        """Return one line: the goal's text, the ratio if there is one, and whether it is met."""
        judged, value = self.judge(figures), self.value(figures)
        times_the_bound = self.times_the_bound(figures)
        if judged == ABSENT:
            return f"{self.text}: -"
        # Without other figures to compare with, `value` is no ratio.
        ratio = f" ({_format_ratio(value)})" if self.others else ""
        if judged == MISSED:
            times = "" if times_the_bound is None else f" ({times_the_bound:.2f} x the bound)"
            return f"{self.text}{ratio}: MISSED{times}"
        return f"{self.text}{ratio}: {judged}"


def _format_ratio(value: float | None) -> str:
    """Return the text for a ratio of `Goal.value`, with a fraction such as 1/2.5 below 0.5."""
    if value is None:
        return "the other is not above zero"
    if value <= 0:
        return "below the noise"
    return f"1/{1 / value:.1f}" if value < 0.5 else f"{value:.2f} x"


def count(figures: Figures) -> str:
    """Return one line with the number of goals met, missed, unclear and absent."""
    judged = [goal.judge(figures) for goal in GOALS]
    texts = [f"{judged.count(each)} {each}" for each in (MISSED, UNCLEAR, ABSENT)]
    return ", ".join([f"{judged.count(MET)} goals {MET}", *texts])


def _goals() -> tuple[Goal, ...]:
    """Return the goals.

    "call_of_budget" is the time of a call as a multiple of its budget, which is 1 ms plus 2 µs for
    each tensor (session.py).
    """
    goals = []
    for state, busy, idle in (
        ("main", "busy", "idle"),
        ("many", "many_busy", "many_idle"),
        ("large", "large_busy", "large_idle"),
        ("lightning", "lightning_busy", "lightning_idle"),
    ):
        for name in (busy, idle):
            goals.append(Goal(name, "call_of_budget", 1.0, "≤ 2 µs a tensor + 1 ms", row="call_s"))
            peer_call = ((name, LIGHTNING, "call_s"),)
            if state == "main":
                goals.append(Goal(name, "call_s", 1 / 50, "≤ 1/50 of Lightning's", peer_call))
            if state == "large":
                goals.append(Goal(name, "call_s", 1 / 300, "≤ 1/300 of Lightning's", peer_call))
            if state in ("main", "large"):
                raw = ((name, RAW, "finished_s"),)
                goals.append(Goal(name, "finished_s", 1.25, "≤ 1.25 x raw disk", raw))
                goals.append(Goal(name, "extra_rss", 1.05, "≤ 1.05 x the state"))
            if state == "many":
                text = "≤ 1.2 x the state + 32 MiB"
                goals.append(Goal(name, "extra_rss_less_32mib", 1.2, text, row="extra_rss"))
        if state in ("main", "many"):
            peer_end = ((busy, LIGHTNING, "finished_s"),)
            goals.append(Goal(busy, "finished_s", 1 / 20, "≤ 1/20 of Lightning's", peer_end))
        goals.append(Goal(busy, "speed", 0.9, "≥ 90 %", at_most=False))
        goals.append(Goal(busy, "stall_s", 0.005, "≤ 5 ms"))
    for name in ("small_pool", "large_small_pool"):
        goals.append(Goal(name, "extra_rss", 0.2, "≤ 0.2 x the state"))
    for name in ("loop", "loop_large", "lightning_loop"):
        peers = (TORCH, TORCH_NO_CRC, LIGHTNING, DCP, DCP_STAGER)
        others = tuple((name, peer, "lost_s") for peer in peers)
        goals.append(Goal(name, "lost_s", 1.0, "the least of all", others))
        torch = ((name, TORCH, "lost_s"),)
        goals.append(Goal(name, "lost_s", 1 / 7, "≤ 1/7 of torch.save's", torch))
    memcpy = (("gate", RAW, "memcpy_s"),)
    goals.append(Goal("gate", "gate_at_once_s", 1.3, "≤ 1.3 x raw memcpy", memcpy))
    goals.append(Goal("gate", "gate_late_s", 0.001, "≤ 1 ms"))
    # The scenario makes 200 saves. The kernel's bookkeeping takes less than a page for each save.
    goals.append(Goal("growth", "growth_nbytes", 1 << 20, "no growth (≤ 1 MiB)"))
    return tuple(goals)


GOALS = _goals()
