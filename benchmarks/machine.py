"""The machine under a benchmark: facts about it, its free resources, and other processes' load.

This module also makes the directory that a benchmark writes to, and measures a process's memory.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import importlib.metadata
import multiprocessing
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import BenchError, format_size, raw

# ---- memory of this process ----------------------------------------------------------------


def status_bytes(key: str) -> int:
    """Return a size in /proc/self/status, such as `VmRSS` or `VmHWM`, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise BenchError(f"/proc/self/status has no {key}")


def reset_peak_rss() -> None:
    """Set VmHWM, the peak of resident memory, to the present RSS (proc(5): clear_refs, 5)."""
    Path("/proc/self/clear_refs").write_text("5")


def keep_memory() -> None:
    """Make glibc keep freed memory from now on; with another C library do nothing.

    Otherwise each step returns its gradients to the system and takes them again, which changes step
    times by up to a third, with saves and without.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, to the largest value that glibc accepts
        mallopt(-1, -1)  # M_TRIM_THRESHOLD, so that memory is never returned


# ---- other processes -----------------------------------------------------------------------


def _user_ticks(pid: int | None) -> int:
    """Return the user time of a process in clock ticks, 0 if it has just ended."""
    try:
        # Field 14 of proc(5), counted from field 3, because the name (field 2) may contain spaces.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])
    except FileNotFoundError:
        return 0


DISTURBING_SHARE = 0.03  # if other processes take more, the output says that figures are disturbed


class Others(raw.Others):  # type: ignore[misc,name-defined]
    """The share of the machine that other processes take; our own children do not count."""

    def _own_seconds(self) -> float:
        """Return the time of this process and of its children, running and ended."""
        children = multiprocessing.active_children()
        live = sum(_user_ticks(child.pid) for child in children) / os.sysconf("SC_CLK_TCK")
        ended = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        return float(super()._own_seconds() + live + ended)


# ---- the machine ---------------------------------------------------------------------------


def _block_device(path: Path) -> str:
    """Return model, scheduler and kind of the disk that has `path`; "" if nothing is known."""
    device = os.stat(path).st_dev
    node = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    facts = []
    for name in ("device/model", "../device/model", "queue/scheduler", "queue/rotational"):
        with contextlib.suppress(OSError):
            text = (node / name).read_text().strip()
            active = re.search(r"\[(.+)\]", text)  # the scheduler in use is in brackets
            value = active.group(1) if active else text
            facts.append(f"{os.path.basename(name)} {value}")
    return ", ".join(facts)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.lower().startswith(("model name", "cpu model", "cpu part")):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine_facts(directory: Path) -> dict[str, Any]:
    """Return what a reader needs to judge the figures: machine, versions, the command line.

    directory: Where the benchmark writes; its file system and disk are described.
    """
    filesystem, source, options = raw.mount_of(directory)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _command(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_available_bytes": raw.available_memory_bytes(),
        "load_average_at_start": os.getloadavg()[0],
        "kernel": platform.release().split("-")[0],
        "filesystem": filesystem,
        "filesystem_source": source,
        "mount_options": options,
        "block_device": _block_device(directory),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "lightning": _version("lightning"),
        "fsspec": _version("fsspec"),
        "stillframe": _version("stillframe"),
        "switch_interval_s": sys.getswitchinterval(),
    }


def _command() -> str:
    """Return the command line, with DIR and FILE in place of this machine's paths."""
    words = [Path(sys.executable).name, *sys.argv]
    for option, name in (("--dir", "DIR"), ("--json", "FILE")):
        if option in words[:-1]:
            words[words.index(option) + 1] = name
    return " ".join(words)


def facts_lines(facts: dict[str, Any]) -> list[str]:
    """Return the machine in three lines, for the head of a table."""
    return [
        f"{facts['cpu']}, {facts['cores']} cores, "
        f"{format_size(facts['memory_available_bytes'])} of memory free, "
        f"load {facts['load_average_at_start']:.1f} at the start",
        f"Linux {facts['kernel']}, {facts['filesystem']} on {facts['filesystem_source']}"
        f" ({facts['block_device'] or 'device unknown'})",
        f"Python {facts['python']}, torch {facts['torch']}, lightning {facts['lightning']}, "
        f"stillframe {facts['stillframe'] or 'not installed'}; {facts['date']}; "
        f"{facts['command']}",
    ]


# ---- the directory that is written to ------------------------------------------------------


def add_directory_options(parser: argparse.ArgumentParser) -> None:
    """Add `--dir`, `--allow-tmpfs` and `--json`, which are the same in every script."""
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path("."),
        help="where the files go: a directory on the disk to measure (default: here); "
        "a directory of its own is made there and removed at the end",
    )
    parser.add_argument(
        "--allow-tmpfs", action="store_true", help="write to memory all the same (no disk figures)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="also save every figure here")


@contextlib.contextmanager
def scratch_directory(parent: Path, *, allow_tmpfs: bool, need_bytes: int) -> Iterator[Path]:
    """Make a fresh directory under `parent`; remove it afterwards, after Ctrl-C and SIGTERM too.

    Raises BenchError if `parent` is no directory, is in memory, or has no room.
    """
    if not parent.is_dir():
        raise BenchError(f"--dir {parent}: no such directory")
    filesystem = raw.file_system_of(parent)
    if filesystem in raw.MEMORY and not allow_tmpfs:
        raise BenchError(
            f"--dir {parent} is on {filesystem}, which is memory: nothing there is durable and "
            "no figure would tell about a disk. Name a directory on a disk with --dir, or pass "
            "--allow-tmpfs."
        )
    free = shutil.disk_usage(parent).free
    if free < need_bytes:
        raise BenchError(
            f"--dir {parent} has {format_size(free)} free, this run needs "
            f"{format_size(need_bytes)}: name another directory or a smaller state"
        )
    made = Path(tempfile.mkdtemp(prefix="stillframe-bench-", dir=parent))
    with raw.remove_directory_afterwards(made.resolve()) as path:
        yield path


@contextlib.contextmanager
def measured_in(
    options: argparse.Namespace, *, memory: int, disk: int
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield (scratch directory, the machine's facts).

    Raises:
        BenchError: There are not `memory` bytes of memory, or not `disk` bytes of disk, free.
    """
    check_memory(memory)
    with scratch_directory(
        options.dir, allow_tmpfs=options.allow_tmpfs, need_bytes=disk
    ) as directory:
        yield directory, machine_facts(directory)


def check_memory(need_bytes: int) -> None:
    """Raise BenchError if the run would not fit into memory."""
    left = raw.available_memory_bytes()
    if left < need_bytes:
        raise BenchError(
            f"this run needs about {format_size(need_bytes)} of memory, {format_size(left)} are "
            "free: choose a smaller state, or --quick"
        )
