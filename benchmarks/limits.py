"""What can this machine do at best? The raw limits that a save is measured against.

    python benchmarks/limits.py --dir DIR

Three figures for the same number of bytes: a copy from memory to memory; a write past the page
cache (O_DIRECT, 4 MiB a call, one thread, into a fallocated file) with fdatasync; a write
through the page cache with fsync. README.md says how each is counted.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import mmap
import os
import threading
import time
from pathlib import Path

import pictures
from common import Series, end_with, format_size, format_times, parse_size, print_table, raw
from machine import add_directory_options, facts_lines, measured_in

CALL_BYTES = raw.CALL_BYTES
PAGE_BYTES = raw.PAGE_BYTES
LONGEST_SOURCE = 1 << 30  # bytes that a raw write is made from

_libc = ctypes.CDLL(None, use_errno=True)  # ctypes releases the interpreter lock in its calls
_libc.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.memcpy.restype = ctypes.c_void_p
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def _address(buffer: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def copy_seconds(source: mmap.mmap, target: mmap.mmap, nr_threads: int = 1) -> float:
    """Seconds to copy all of `source` into `target` (as long, touched), in `nr_threads` parts."""
    nbytes, src, dst = len(source), _address(source), _address(target)
    part = -(-nbytes // nr_threads)

    def copy(off: int) -> None:
        _libc.memcpy(dst + off, src + off, min(part, nbytes - off))

    if nr_threads == 1:
        start = time.perf_counter()
        copy(0)
        return time.perf_counter() - start
    threads = [threading.Thread(target=copy, args=(i * part,)) for i in range(nr_threads)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def write_seconds(
    path: Path, source: mmap.mmap, *, direct: bool, nbytes: int | None = None
) -> float:
    """Seconds to write `source` to the new file `path` and have it on the disk.

    nbytes: length of the file; a source that is shorter (far longer than any cache) is repeated.

    Counted: fallocate, the writes, fdatasync (fsync for the buffered way). Not counted: open,
    close, and the removal, which follows. OSError with EINVAL where the filesystem has no
    O_DIRECT.
    """
    nbytes = len(source) if nbytes is None else nbytes
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    fd = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600)
    try:
        with memoryview(source) as view:
            start = time.perf_counter()
            if direct and _libc.fallocate(fd, 0, 0, nbytes) != 0:
                code = ctypes.get_errno()
                if code != errno.EOPNOTSUPP:
                    raise OSError(code, os.strerror(code), str(path))
            off = 0
            while off < nbytes:
                at = off % len(source)
                off += os.pwrite(fd, view[at : at + min(CALL_BYTES, nbytes - off)], off)
            if direct:
                os.fdatasync(fd)
            else:
                os.fsync(fd)
            return time.perf_counter() - start
    finally:
        os.close(fd)
        path.unlink()


class RawDisk:
    """The raw writes of `nbytes`, for scripts that measure them between their own rounds."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        self._directory = directory
        self._nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        self._source = raw.make_buffer(min(self._nbytes, LONGEST_SOURCE))

    def _write(self, name: str, *, direct: bool) -> float:
        path = self._directory / name
        return write_seconds(path, self._source, direct=direct, nbytes=self._nbytes)

    def direct(self) -> float:
        """Seconds; falls back to nan where the filesystem has no O_DIRECT."""
        try:
            return self._write("raw.direct", direct=True)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return float("nan")
            raise

    def buffered(self) -> float:
        """Seconds."""
        return self._write("raw.buffered", direct=False)


def measure_copy(nbytes: int, rounds: int, nr_threads: int = 1) -> list[float]:
    """Seconds a copy of `nbytes`, warm: the first copy is thrown away."""
    nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    source, target = raw.make_buffer(nbytes), raw.make_buffer(nbytes)
    values = [copy_seconds(source, target, nr_threads) for _ in range(rounds + 1)]
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
    nbytes = -(-args.state // PAGE_BYTES) * PAGE_BYTES
    with measured_in(args, memory=3 * nbytes, disk=2 * nbytes) as (directory, facts):
        series = {"memcpy, one thread": Series.of(measure_copy(nbytes, args.rounds))}
        if len(os.sched_getaffinity(0)) > 1:
            series["memcpy, two threads"] = Series.of(measure_copy(nbytes, args.rounds, 2))
        disk = RawDisk(directory, nbytes)
        pairs = [(disk.direct(), disk.buffered()) for _ in range(args.rounds)]
        series["O_DIRECT write + fdatasync"] = Series.of([pair[0] for pair in pairs])
        series["buffered write + fsync"] = Series.of([pair[1] for pair in pairs])
    print("\n".join(facts_lines(facts)))
    rows = [
        [
            name,
            format_times(s.spread),
            f"{nbytes / s.median / 1e9:.2f} GB/s",
        ]
        for name, s in series.items()
    ]
    print_table(
        f"Raw limits, {format_size(nbytes)}, {args.rounds} rounds",
        ["", "median (min..max)", "rate"],
        rows,
    )
    figures = {name: s.to_json() for name, s in series.items()}
    pictures.keep(args.json, {"facts": facts, "nbytes": nbytes, "seconds": figures})
    return 0


if __name__ == "__main__":
    end_with(main)
