"""What can this machine do at best? The raw limits that a save is measured against.

    python benchmarks/limits.py --dir DIR

It measures three figures for the same number of bytes: a copy from memory to memory, a direct write
and a buffered write. The direct write uses O_DIRECT (4 MiB a call, one thread, into a fallocated
file) and fdatasync; the buffered one uses fsync. README.md says how each is counted.
"""

from __future__ import annotations

import argparse
import errno
import os
from pathlib import Path

import pictures
from common import Series, end_with, format_size, format_times, parse_size, print_table, raw
from machine import add_directory_options, facts_lines, measured_in

LONGEST_SOURCE = 1 << 30  # bytes; a longer write takes its bytes from the same buffer again


class RawDisk:
    """Plain writes of `nbytes` to the measured disk; other scripts make them between rounds."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        self._directory = directory
        self._nbytes = -(-nbytes // raw.PAGE_BYTES) * raw.PAGE_BYTES  # rounded up to whole pages
        self._source = raw.make_buffer(min(self._nbytes, LONGEST_SOURCE))

    def _write(self, name: str, *, direct: bool) -> float:
        """Write and sync a file once and remove it; return the seconds without the removal."""
        path = self._directory / name
        try:
            seconds, _ = raw.measure_write_seconds(
                path, self._source, direct=direct, nbytes=self._nbytes
            )
            return seconds
        finally:
            path.unlink(missing_ok=True)

    def direct(self) -> float:
        """Return the seconds of an O_DIRECT write; nan if the file system has none."""
        try:
            return self._write("raw.direct", direct=True)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return float("nan")
            raise

    def buffered(self) -> float:
        """Return the seconds of a write through the page cache."""
        return self._write("raw.buffered", direct=False)


def measure_copy(nbytes: int, rounds: int, nr_threads: int = 1) -> list[float]:
    """Return the seconds of each of `rounds` copies of `nbytes`.

    The copy before them is not counted, because the system allocates the target's pages during it.
    """
    nbytes = -(-nbytes // raw.PAGE_BYTES) * raw.PAGE_BYTES  # rounded up to whole pages
    source, target = raw.make_buffer(nbytes), raw.make_buffer(nbytes)
    values = [raw.measure_copy_seconds(source, target, nr_threads) for _ in range(rounds + 1)]
    return values[1:]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--state", type=parse_size, default=1_070_000_000, help="bytes (1.07GB)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="160 MB, three rounds")
    add_directory_options(parser)
    args = parser.parse_args(argv)
    if args.quick:
        args.state, args.rounds = min(args.state, 160_000_000), 3
    nbytes = -(-args.state // raw.PAGE_BYTES) * raw.PAGE_BYTES  # rounded up to whole pages
    with measured_in(args, memory=3 * nbytes, disk=2 * nbytes) as (directory, facts):
        series = {"memcpy, one thread": Series.of(measure_copy(nbytes, args.rounds))}
        if len(os.sched_getaffinity(0)) > 1:
            series["memcpy, two threads"] = Series.of(measure_copy(nbytes, args.rounds, 2))
        disk = RawDisk(directory, nbytes)
        direct_s, buffered_s = [], []
        for _ in range(args.rounds):
            direct_s.append(disk.direct())
            buffered_s.append(disk.buffered())
        series["O_DIRECT write + fdatasync"] = Series.of(direct_s)
        series["buffered write + fsync"] = Series.of(buffered_s)
    print("\n".join(facts_lines(facts)))
    rows = [
        [
            name,
            format_times(values.spread),
            f"{nbytes / values.median / 1e9:.2f} GB/s",
        ]
        for name, values in series.items()
    ]
    print_table(
        f"Raw limits, {format_size(nbytes)}, {args.rounds} rounds",
        ["", "median (min..max)", "rate"],
        rows,
    )
    figures = {name: values.to_json() for name, values in series.items()}
    pictures.save_and_draw(args.json, {"facts": facts, "nbytes": nbytes, "seconds": figures})
    return 0


if __name__ == "__main__":
    end_with(main)
