"""The code that the benchmark scripts share: sizes, statistics, ticks, output.

Nothing here imports torch: the parent process of a benchmark stays small, and only the processes
that save pay for torch.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from _stillframe_command import import_module_without_init

# The measurements of `stillframe bench`. Importing them through the package would import torch.
raw: Any = import_module_without_init("_shell.bench_raw")


class BenchError(Exception):
    """The error of a benchmark that cannot run here, or whose process failed; the text says why."""


# ---- sizes and formats ---------------------------------------------------------------------


T = TypeVar("T")


def parse_size(text: str) -> int:
    """Return the bytes that a text such as `160MB`, `1.07e9` or `4GiB` means.

    Raises:
        argparse.ArgumentTypeError: It is not a size above zero.
    """
    units = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmg]i?b)?\s*", text.lower())
    nbytes = 0  # of an invalid text
    if match:
        with contextlib.suppress(ValueError):  # a number such as 1.2.3
            nbytes = int(float(match.group(1)) * units[match.group(2) or ""])
    if nbytes <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size (try 160MB, 1.07GB or 4GiB)")
    return nbytes


def format_size(nbytes: float) -> str:
    """Format with decimal units and three digits: `160 MB`, `1.07 GB`."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Format with three digits and a suitable unit: `1.62 ms`, `123 ms`, `15.2 s`."""
    return format_times([seconds])


def format_times(seconds: Sequence[float]) -> str:
    """Format the first value like `format_seconds`, and the others in brackets and the same unit.

    `126 ms (107..146)`: a median with the smallest and the largest value.
    """
    middle = abs(seconds[0])
    scale, unit = (1e3, "ms") if middle < 1.0 else (1.0, "s")
    digits = 2
    if middle * scale >= 100:
        digits = 0
    elif middle * scale >= 10:
        digits = 1
    first, *others = (f"{value * scale:.{digits}f}" for value in seconds)
    return f"{first} {unit}" + (f" ({'..'.join(others)})" if others else "")


# ---- statistics ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Series:
    """The statistics of one figure's values over the rounds of one run.

    error: Standard error of the median. It is computed from the median absolute deviation (MAD),
        which one disturbed round hardly changes: 1.4826 x MAD estimates the standard deviation of a
        normal distribution, and the median of n values has 1.2533 / sqrt(n) times that deviation.
    """

    median: float
    error: float
    min: float
    max: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Series:
        found = [float(value) for value in values]
        middle = statistics.median(found)
        deviation = statistics.median(abs(value - middle) for value in found)
        error = 1.2533 * 1.4826 * deviation / math.sqrt(len(found))  # see the class for the factors
        return cls(middle, error, min(found), max(found), len(found))

    @property
    def spread(self) -> tuple[float, float, float]:
        """Return the median, the smallest and the largest value, as `format_times` shows them."""
        return self.median, self.min, self.max

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def rotated(ways: Sequence[T], round_number: int) -> list[T]:
    """Return the ways in the order of one round: round n begins with the n-th way.

    The first way changes from round to round, so the same way does not always run first or last.
    """
    first = round_number % len(ways) if ways else 0
    return [*ways[first:], *ways[:first]]


# ---- the main thread's ticks ---------------------------------------------------------------


class Stamp:
    """The time at which a save finished, in `at_ns` (perf_counter_ns); 0 until then.

    The thread that finishes the save calls the stamp, which accepts any arguments and so can be a
    done callback. The main thread polls `at_ns`, which takes no lock.
    """

    __slots__ = ("at_ns",)

    def __init__(self) -> None:
        self.at_ns = 0

    def __call__(self, *_: object) -> None:
        """Note the present time as the end of the save."""
        self.at_ns = time.perf_counter_ns()


@dataclasses.dataclass(frozen=True)
class Ticks:
    """The result of `tick`: `count` ticks in `elapsed_ns`.

    `worst_ns` is the longest gap between two ticks, the longest time that the thread was stopped.
    """

    count: int
    elapsed_ns: int
    worst_ns: int

    @property
    def rate(self) -> float:
        return self.count / max(self.elapsed_ns, 1)


IDLE_TICK_S = 0.001  # an idle main thread sleeps this long between two ticks


def tick(stop: Stamp, start_ns: int, until_ns: int, *, busy: bool) -> Ticks:
    """Count ticks of the calling thread, to see how a save slows or stops it.

    Ticking begins at `start_ns` and ends when `stop` is called, or when the clock passes
    `until_ns`.

    busy: If true, the thread runs pure Python without a pause, so it needs the interpreter lock all
        the time. Each iteration of its loop is a tick. If false, each tick is a sleep of 1 ms, and
        a gap is how much longer than that the thread slept.
    """
    clock, sleep, pause_ns = time.perf_counter_ns, time.sleep, int(IDLE_TICK_S * 1e9)
    count = worst = 0
    now = last = start_ns
    if busy:
        while not stop.at_ns and now < until_ns:
            now = clock()
            if now - last > worst:
                worst = now - last
            last = now
            count += 1
    else:
        while not stop.at_ns and now < until_ns:
            sleep(IDLE_TICK_S)
            now = clock()
            if now - last - pause_ns > worst:
                worst = now - last - pause_ns
            last = now
            count += 1
    return Ticks(count, now - start_ns, worst)


# ---- states (states.py makes them) ------------------------------------------------------------

TENSOR_BYTES = 4 * 472 * 472  # of a weight or moment; the main state, 1.07 GB, has 3 x 400 of them


@dataclasses.dataclass(frozen=True)
class Spec:
    """A description of the state that a measured process makes and saves.

    nbytes: parameters and optimizer state together. kind: a key of `states.KINDS`. nr_params: for
    "mlp" the number of weights, each with two moments; for "few" and "plain" the number of all
    tensors; for "lightning" the number of layers. threads: for torch.set_num_threads. pool_bytes:
    for STILLFRAME_POOL_BYTES, 0 for the default.
    """

    nbytes: int
    kind: str
    nr_params: int
    threads: int
    pool_bytes: int = 0


# ---- the command line ----------------------------------------------------------------------


def end_with(main: Callable[[], int]) -> NoReturn:
    """Run `main` and end the process with the status that it returns.

    After a BenchError the status is 2, and its text is on stderr. After Ctrl-C it is 130.
    """
    name = Path(sys.argv[0]).name
    try:
        sys.exit(main())
    except BenchError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"{name}: interrupted; its files are removed", file=sys.stderr)
        sys.exit(130)


# ---- output --------------------------------------------------------------------------------


@contextlib.contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """Show one line on stderr that is drawn only between measurements, never during one."""
    start = time.monotonic()
    with raw.open_status_line(plain_lines=True) as show:
        yield lambda text: show(f"[{time.monotonic() - start:5.0f} s] {text}")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str] | None]) -> None:
    """Print one table on stdout.

    A row of None is an empty line. A row in which only the first cell has text is a heading.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = sys.stdout.isatty()
    console = Console(width=400, force_terminal=terminal, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        is_text = number in (0, len(columns) - 1)  # titles and remarks; the others have figures
        table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        if row is None:
            table.add_row()
            continue
        is_heading = not any(row[1:])
        cells = [Text(row[0], style="bold" if is_heading else "")]
        for cell in row[1:]:
            style = ""
            if "MISSED" in cell:
                style = "red"
            elif cell.endswith("met"):
                style = "green"
            cells.append(Text(cell, style=style))
        table.add_row(*cells)
    with console.capture() as capture:
        console.print(table)
    print(title)
    print("\n".join(line.rstrip() for line in capture.get().strip("\n").split("\n")))


MOST_COLUMNS = 100


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Save `document` in a form that a reviewer can read; a missing parent is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_format_json(document) + "\n")
    print(f"saved as {path}", file=sys.stderr)


def _format_json(value: Any, indent: str = "", column: int = 0) -> str:
    """Return `value` as JSON.

    A list or dict of plain values is on one line, which is wrapped at MOST_COLUMNS.

    Args:
        indent: The spaces that begin each line of `value`.
        column: The column at which `value` begins, after its key.
    """
    if not isinstance(value, dict | list | tuple) or not value:
        return json.dumps(value)
    if isinstance(value, dict):
        begin, end = "{}"
        items = list(value.values())
        keys = [f"{json.dumps(str(key))}: " for key in value]
    else:
        begin, end = "[]"
        items = list(value)
        keys = [""] * len(items)
    if any(isinstance(each, dict | list | tuple) for each in items):
        inner = indent + " "
        parts = [
            key + _format_json(each, inner, len(inner) + len(key))
            for key, each in zip(keys, items, strict=True)
        ]
        return f"{begin}\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}{end}"
    text = begin
    for key, each in zip(keys, items, strict=True):
        item = key + json.dumps(each)
        last_line = text[text.rfind("\n") + 1 :]
        # An item that would end beyond MOST_COLUMNS, with its comma, begins a new line.
        if column + len(last_line) + 1 + len(item) > MOST_COLUMNS:
            text, column = f"{text.rstrip()}\n{indent} ", 0
        text += f"{item}, "
    return text.removesuffix(", ") + end
