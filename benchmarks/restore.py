"""How long does a checkpoint take to come back, and to be verified?

    python benchmarks/restore.py --dir DIR

It compares `stillframe.load` with `torch.load` (with mmap too), DCP's load and, if it is installed,
safetensors' load, for the same tensors. Three loads of each are measured until every byte has been
used: the first one of a process, another one in the same process, and one from the disk. For
comparison it measures O_DIRECT reads of as many bytes on four threads, and a memcpy of as many.
`verify` is compared with O_DIRECT reads on two threads. README.md says how each figure is counted.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pictures
from common import (
    Series,
    Spec,
    end_with,
    format_times,
    print_table,
    progress_line,
    raw,
    rotated,
)
from machine import add_directory_options, facts_lines, measured_in
from process import Worker
from restore_process import (
    MMAP,
    OURS,
    SAVED_BY_STILLFRAME,
    SAVED_BY_TORCH,
    TORCH,
    WAYS,
    Load,
)

RAW = "O_DIRECT reads, four threads"
FIRST, AGAIN, COLD = "first", "again", "cold"
SITUATIONS = {
    FIRST: "the first load of a process, file in memory",
    AGAIN: "the next one",
    COLD: "the first load of a process, file on the disk",
}
VERIFY, RAW_ONE, RAW_TWO = "verify", "O_DIRECT reads, one thread", "O_DIRECT reads, two threads"
MEMCPY = "memcpy"
READS = (VERIFY, RAW_ONE, RAW_TWO)
# bytes; the time of a smaller state depends on its number of tensors, not on its bytes
LARGE = 1_000_000_000
# A load of a smaller state has to be this many times as fast as torch.load, in every situation.
SMALL_GOAL = 1.3
# A load of a large state has to be this many times as fast as the other way in that situation.
GOALS = {
    (COLD, RAW): 0.9,
    (COLD, TORCH): 2.0,
    (COLD, MMAP): 1.0,
    (FIRST, TORCH): 1.5,
    (AGAIN, TORCH): 1.5,
}
MEMORY_GOAL = 1.02  # the most memory that a load may take, relative to the bytes of the file
VERIFY_GOAL = 0.8  # the least rate of verify, relative to the rate of RAW_TWO


@dataclass(frozen=True)
class File:
    """A file to load: its state, and the program that saved it. All ways read the same file."""

    spec: Spec
    saved_by: str = SAVED_BY_TORCH


STATES = {
    "1.07 GB in 1,200": File(Spec(1_070_000_000, "mlp", 400, 2)),
    "64 MB in 20,000": File(Spec(64_000_000, "mlp", 6_667, 2)),
    "4 GB in 24": File(Spec(4_000_000_000, "few", 24, 2)),
    # A tensor larger than the memory for reading ahead, and a file longer than 4 GiB.
    "1.2 GiB in one": File(Spec(1_200 << 20, "plain", 1, 2), SAVED_BY_STILLFRAME),
    "4.4 GB in 200": File(Spec(4_400_000_000, "plain", 200, 2), SAVED_BY_STILLFRAME),
}
QUICK_STATES = {
    "160 MB in 300": File(Spec(160_000_000, "mlp", 100, 2)),
    "10 MB in 3,000": File(Spec(10_000_000, "mlp", 1_000, 2)),
    "44 MB in 200": File(Spec(44_000_000, "plain", 200, 2), SAVED_BY_STILLFRAME),
}


# ---- files and raw reads ----------------------------------------------------------------------


def _bring_into_page_cache(path: Path) -> None:
    with open(path, "rb", buffering=0) as file:
        while file.read(raw.CALL_BYTES):
            pass


def raw_seconds(path: Path, nr_threads: int) -> float:
    """Return the seconds to read the file with O_DIRECT on `nr_threads`; nan if that is refused.

    Thread i of n reads the chunks i, i + n, i + 2 n, ..., each of raw.CALL_BYTES, into a buffer
    that is in memory already.
    """
    buffers = [mmap.mmap(-1, raw.CALL_BYTES) for _ in range(nr_threads)]
    for buffer in buffers:
        buffer[:] = bytes(raw.CALL_BYTES)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return math.nan
    nbytes, failed = os.fstat(fd).st_size, []

    def read(number: int) -> None:
        try:
            for off in range(number * raw.CALL_BYTES, nbytes, nr_threads * raw.CALL_BYTES):
                os.preadv(fd, [buffers[number]], off)
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(nr_threads)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    os.close(fd)
    return math.nan if failed else seconds


# ---- rounds -------------------------------------------------------------------------------------


@contextlib.contextmanager
def new_process() -> Iterator[Callable[..., Any]]:
    """Start a new process that has imported everything, and end it after the block.

    Yield a function `ask(name, *arguments)`. It calls the function `name` of restore_process.py in
    that process and returns its result.
    """
    with Worker("a measured process", import_module, "restore_process") as process:
        process.ready().call("prepare")
        yield process.call


def files_of(path: Path) -> list[Path]:
    """Return all files that hold the state at `path`: torch's, DCP's and safetensors'."""
    return [path, *path.parent.glob(f"{path.name}.dcp/*"), *path.parent.glob("*.safetensors")]


def _load_round(path: Path, number: int, values: dict[str, dict[str, list[Load]]]) -> None:
    """Load once in each way and situation, and add the figures to `values[situation][way]`.

    Every other round takes the ways in reverse order.
    """
    ways = WAYS if number % 2 == 0 else WAYS[::-1]
    raw.forget(path)
    # nan: processor time and memory of the raw reads are not measured.
    values[COLD][RAW].append(Load(raw_seconds(path, 4), math.nan, math.nan))
    for situation in (FIRST, COLD):
        for way in ways:
            with new_process() as ask:  # `ask` calls a function there
                for each in files_of(path):
                    if situation == COLD:
                        raw.forget(each)
                    else:
                        _bring_into_page_cache(each)
                values[situation][way].append(ask("load", str(path), way))
                if situation == FIRST:  # a second load in the same process
                    values[AGAIN][way].append(ask("load", str(path), way))
                if situation == FIRST and way == OURS:
                    seconds = ask("memcpy", str(path))
                    values[AGAIN][MEMCPY].append(Load(seconds, math.nan, math.nan))


def _verify_round(
    path: Path, number: int, ask: Callable[..., float], values: dict[str, list[float]]
) -> None:
    """Verify the file once, read it once in both raw ways, and add the seconds to `values`."""
    calls = {
        VERIFY: lambda: ask("verify", str(path)),
        RAW_ONE: lambda: raw_seconds(path, 1),
        RAW_TWO: lambda: raw_seconds(path, 2),
    }
    # The order changes from round to round, because the disk may answer the first read faster.
    for name in rotated(READS, number):
        raw.forget(path)
        values[name].append(calls[name]())


def _ratio(dividends: list[float], divisors: list[float]) -> Series:
    """Return the statistics of the ratios, of which each round has one."""
    return Series.of([a / b for a, b in zip(dividends, divisors, strict=True)])


def _figures(found: dict[str, list[Load]]) -> dict[str, dict[str, Any]]:
    """Return the statistics of each way's loads: seconds, processor seconds, peak of memory."""
    return {
        way: {
            **Series.of([each.seconds for each in loads]).to_json(),
            "cpu_s": Series.of([each.cpu_seconds for each in loads]).to_json(),
            "peak_nbytes": Series.of([each.peak_nbytes for each in loads]).to_json(),
        }
        for way, loads in found.items()
    }


def _speedups(loads: dict[str, dict[str, list[Load]]]) -> dict[str, dict[str, Any]]:
    """Return how many times as fast as each other way ours was, in each situation.

    A ratio compares two loads of the same round. The statistics are taken over these ratios.
    """
    speedups: dict[str, dict[str, Any]] = {}
    for situation, found in loads.items():
        ours = [each.seconds for each in found[OURS]]
        speedups[situation] = {}
        for way, its_loads in found.items():
            if way != OURS:
                theirs = [each.seconds for each in its_loads]
                speedups[situation][way] = _ratio(theirs, ours).to_json()
    return speedups


def measure(
    directory: Path, chosen: dict[str, File], rounds: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Make the file of each chosen state, measure, and remove it; return the figures by state."""
    document: dict[str, Any] = {}
    for state, file in chosen.items():
        path = directory / "state.pt"
        progress(f"{state}: making the file")
        with new_process() as ask:
            ask("make", str(path), file.spec, file.saved_by)
        loads: dict[str, dict[str, list[Load]]] = {
            situation: {way: [] for way in WAYS} for situation in SITUATIONS
        }
        loads[COLD][RAW], loads[AGAIN][MEMCPY] = [], []
        reads: dict[str, list[float]] = {name: [] for name in READS}
        for number in range(rounds):
            progress(f"{state}: loads, round {number + 1} of {rounds}")
            _load_round(path, number, loads)
        with new_process() as ask:
            ask("verify", str(path))
            for number in range(3 * rounds):
                progress(f"{state}: verify, round {number + 1} of {3 * rounds}")
                _verify_round(path, number, ask, reads)
        document[state] = {
            "saved_by": file.saved_by,
            "nbytes": path.stat().st_size,
            "loads": {situation: _figures(found) for situation, found in loads.items()},
            "speedups": _speedups(loads),
            "reads": {name: Series.of(values).to_json() for name, values in reads.items()},
            # A ratio of rates is the inverse of the ratio of seconds.
            "verify_ratio": _ratio(reads[RAW_TWO], reads[VERIFY]).to_json(),
        }
        for each in files_of(path):
            each.unlink()
    return document


# ---- showing ------------------------------------------------------------------------------------


def _time_and_rate(series: dict[str, Any], nbytes: int) -> list[str]:
    rate = f"{nbytes / series['median'] / 1e9:.2f} GB/s"
    return [format_times([series["median"], series["min"], series["max"]]), rate]


def _goal_text(ratio: dict[str, Any], bound: float, *, at_most: bool) -> str:
    """Return the text for a ratio with a goal: median, spread, bound, and whether it is met."""
    value = ratio["median"]
    if math.isnan(value):  # the file system has no O_DIRECT
        return "-"
    met = value <= bound if at_most else value >= bound
    spread = f"{value:.2f} ({ratio['min']:.2f}..{ratio['max']:.2f})"
    return f"{spread}, {'<=' if at_most else '>='} {bound}: {'met' if met else 'MISSED'}"


def _load_row(figures: dict[str, Any], situation: str, way: str, series: Any) -> list[str]:
    """Return the row of one way in one situation.

    Its last cell says how many times as fast ours is, with a verdict if there is a goal for that.
    """
    large = figures["nbytes"] >= LARGE
    bound = None
    if large:
        bound = GOALS.get((situation, way))
    elif way == TORCH:
        bound = SMALL_GOAL
    goal = ""
    if bound is not None:
        goal = _goal_text(figures["speedups"][situation][way], bound, at_most=False)
    elif way != OURS:
        goal = f"{figures['speedups'][situation][way]['median']:.2f}"
    cpu, peak = series["cpu_s"]["median"], series["peak_nbytes"]["median"] / figures["nbytes"]
    memory = "-" if math.isnan(peak) else f"{peak:.3f}"
    if way == OURS and situation == FIRST and large:
        memory += f", <= {MEMORY_GOAL}: {'met' if peak <= MEMORY_GOAL else 'MISSED'}"
    time_used = "-" if math.isnan(cpu) else f"{cpu:.2f} s"
    return [
        f"    {way}",
        " ".join(_time_and_rate(series, figures["nbytes"])),
        time_used,
        memory,
        goal,
    ]


def show(found: dict[str, Any], rounds: int) -> None:
    """Print two tables on stdout."""
    rows: list[list[str] | None] = []
    for state, figures in found.items():
        rows.append([f"{state}, saved by {figures['saved_by']}", *[""] * 3])
        for situation, text in SITUATIONS.items():
            rows.append([f"  {text}", *[""] * 4])
            for way, series in figures["loads"][situation].items():
                rows.append(_load_row(figures, situation, way, series))
    columns = ["", "until used (min..max)", "processor", "memory / file", "ours is faster, times"]
    print_table(f"Loads, {rounds} rounds", columns, rows)
    rows = []
    for state, figures in found.items():
        rows.append([state, *[""] * 3])
        for name in READS:
            goal = ""
            if name == VERIFY:
                goal = _goal_text(figures["verify_ratio"], VERIFY_GOAL, at_most=False)
            rows.append(
                [f"  {name}", *_time_and_rate(figures["reads"][name], figures["nbytes"]), goal]
            )
    columns = ["", "median (min..max)", "rate", "rate / two threads', median of the rounds"]
    print_table(f"Reading every byte from the disk, {3 * rounds} rounds", columns, rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="of loads; three times as many reads")
    parser.add_argument("--quick", action="store_true", help="160, 44 and 10 MB, three rounds")
    parser.add_argument("--only", nargs="+", metavar="STATE", help="of: " + ", ".join(STATES))
    add_directory_options(parser)
    args = parser.parse_args(argv)
    chosen = QUICK_STATES if args.quick else STATES
    rounds = min(args.rounds, 3) if args.quick else args.rounds
    if args.only:
        unknown = set(args.only) - set(chosen)
        if unknown:
            parser.error(f"no such state: {', '.join(sorted(unknown))}; there are {list(chosen)}")
        chosen = {state: chosen[state] for state in args.only}
    largest = max(file.spec.nbytes for file in chosen.values())
    # An estimate: the disk has a state in three formats.
    with (
        measured_in(args, memory=3 * largest, disk=5 * largest) as (directory, facts),
        progress_line() as progress,
    ):
        found = measure(directory, chosen, rounds, progress)
    print("\n".join(facts_lines(facts)))
    show(found, rounds)
    pictures.save_and_draw(args.json, {"facts": facts, "rounds": rounds, "states": found})
    return 0


if __name__ == "__main__":
    end_with(main)
