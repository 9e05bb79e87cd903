"""The table of `gpu.py`: a row for each way or part, with goals next to the figures reached."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

from common import Series, format_seconds, format_size
from gpu_ways import OURS

Rows = list[list[str] | None]  # None is an empty line


# `print_table` shows a row as a heading if only its first cell has text. In the functions below, a
# last cell of " " prevents that.


def verdict(good: bool, what: str) -> str:
    return f"{what}: {'met' if good else 'MISSED'}"


def saves_rows(size: str, ways: dict[str, Any]) -> Rows:
    """Return the rows of part "saves"; the result of a way that failed is a sentence."""
    rows: Rows = [[f"saves, {size} state"] + [""] * 8]
    for name, result in ways.items():
        if isinstance(result, str):
            rows.append([f"  {name}", "failed", result[:60], "", "", "", "", "", ""])
            continue
        rounds = result["rounds"]
        blocked_s = Series.of([each["call_s"] + each["gate_s"] for each in rounds]).median
        plain_step_s = Series.of(result["base_step_s"]).median
        # The mean, because a wait falls into one step only.
        step_s = Series.of([statistics.fmean(each["step_s"]) for each in rounds]).median
        item, idle = Series.of(result["item_s"]), Series.of(result["item_idle_s"])
        # Only stillframe reports when its copy ended. The speed is that of the fastest copy.
        copy_times = [each["report"].get("staged_after_s") for each in rounds]
        copy_times = [seconds for seconds in copy_times if seconds]
        copy_gb_s = result["nbytes"] / min(copy_times) / 1e9 if copy_times else 0.0
        plain_gb_s = result["nbytes"] / result["plain_copy_s"] / 1e9
        end_s = Series.of([each["end_s"] for each in rounds]).median
        rows.append(
            [
                f"  {name}",
                format_seconds(blocked_s),
                format_size(max(each["allocated"] for each in rounds)),
                format_size(max(each["reserved"] for each in rounds)),
                f"{step_s / plain_step_s:.3f} x",
                f"{copy_gb_s:.1f} of {plain_gb_s:.1f}" if copy_gb_s else f"- of {plain_gb_s:.1f}",
                f"+{(item.max - idle.median) * 1e3:.2f} ms",
                format_seconds(end_s) + ("" if result["durable"] else ", not synced"),
                format_size(max(each["rss"] for each in rounds)),
            ]
        )
        if name == OURS:
            step, copy = step_s / plain_step_s, copy_gb_s / plain_gb_s
            rows.append(goal_row(result, blocked_s, step, copy, end_s))
    return rows


def goal_row(
    result: dict[str, Any], blocked_s: float, step: float, copy: float, end_s: float
) -> list[str]:
    """Return a row that says for each figure of the row above whether its goal is met.

    step: Mean step with a save, relative to one without. copy: Speed relative to a plain copy.
    """
    rounds = result["rounds"]
    allowed_s = 2e-6 * rounds[0]["report"]["num_tensors"] + 2e-3  # 2 us a tensor, and 2 ms
    memory_bytes = max(max(each["allocated"], each["reserved"]) for each in rounds)
    item_delay_s = max(result["item_s"]) - Series.of(result["item_idle_s"]).median
    raw_s = result["raw_disk_s"]  # nan if there is no O_DIRECT
    end_goal = "no O_DIRECT here"
    if not math.isnan(raw_s):
        end_goal = verdict(end_s <= 1.2 * raw_s, f"<= 1.2 x {raw_s:.2f} s")
    return [
        "    goals",
        verdict(blocked_s <= allowed_s, f"<= {allowed_s * 1e3:.1f} ms"),
        verdict(memory_bytes == 0, "0 B"),
        "",
        verdict(step <= 1.02, "<= 1.02 x"),
        verdict(copy >= 0.95, ">= 95 %"),
        verdict(item_delay_s <= 1e-3, "<= +1 ms"),
        end_goal,
        "",
    ]


def other_rows(name: str, size: str, result: Any) -> Rows:
    """Return the rows of a part other than "saves"; `result` is a sentence if the part failed."""
    blank = [""] * 8
    head: Rows = [[f"{name}, {size} state", *blank]]
    if isinstance(result, str):
        return [*head, [f"  failed: {result}", *blank[:-1], " "]]
    return head + ROWS[name](result, blank)


def sweep_rows(result: dict[str, Any], blank: list[str]) -> Rows:
    """Return a row for each size and number of copies: their speed, and the delay of `.item()`."""
    plain = result["nbytes"] / result["plain_copy_s"] / 1e9
    idle = result["idle_item_s"]["median"]
    return [
        [
            f"  {point['portion_mib']} MiB x {point['in_flight']}",
            *blank[:4],
            f"{point['bytes_per_s'] / 1e9:.1f} of {plain:.1f}",
            f"+{(max(point['item_s']) - idle) * 1e3:.2f} ms",
            *blank[:2],
        ]
        for point in result["points"]
    ]


def pinning_rows(result: dict[str, Any], blank: list[str]) -> Rows:
    """Return rows for the speed of pinning (torch's in brackets), a first save, its fallbacks."""
    speed, torchs = (result["nbytes"] / result[key] / 1e9 for key in ("warm_up_s", "torch_pin_s"))
    blocked = format_seconds(result["cold_call_s"] + result["cold_gate_s"])
    durable = format_seconds(result["cold_durable_s"])
    return [
        ["  warm_up (torch's pin_memory)", *blank[:4], f"{speed:.1f} ({torchs:.1f})", *blank[:3]],
        ["  cold first save", blocked, *blank[:5], durable, ""],
        *([f"  {sentence}", *blank[:-1], " "] for sentence in result["fallbacks"]),
    ]


def ahead_rows(result: dict[str, Any], blank: list[str]) -> Rows:
    """Return a row: the longest time blocked, and the steps relative to steps without saves."""
    alone, saving = result["alone"], result["saving"]
    ratio = saving["device_s"] / alone["device_s"]
    blocked = max(a + b for a, b in zip(saving["call_s"], saving["gate_s"], strict=True))
    deferred = f"  {min(saving['deferred']):.0%} deferred at least"
    return [[deferred, format_seconds(blocked), *blank[:2], f"{ratio:.3f} x", *blank[:4]]]


def profile_rows(result: dict[str, Any], blank: list[str]) -> Rows:
    share = result["under_kernels"]
    seen = "none seen" if share is None else f"{share:.0%} of their time under kernels"
    verdict_text = verdict(not result["synchronises"], "no synchronise")
    return [[f"  {result['nr_copies']} copies, {seen}", *blank[:-1], verdict_text]]


# Each function gets the result of its part and eight empty cells, and returns the part's rows.
ROWS: dict[str, Callable[[dict[str, Any], list[str]], Rows]] = {
    "sweep": sweep_rows,
    "pinning": pinning_rows,
    "ahead": ahead_rows,
    "profile": profile_rows,
}
