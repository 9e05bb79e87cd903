"""`stillframe info [DIR]`: facts for a bug report, as lines to paste or as JSON."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import tempfile
from pathlib import Path
from typing import Any

from stillframe._base import support
from stillframe._base.sizes import binary, decimal
from stillframe._shell import bench_raw as raw

GOOD, UNUSABLE = 0, 2  # exit statuses
_PACKAGES = ("lightning", "pytorch-lightning", "numpy", "rich", "fsspec", "obstore")
_SAVED_NBYTES = 1 << 20  # the length of the save that is tried
# The environment variables that an engine with default options reads.
_VARIABLES = ("STILLFRAME_POOL_BYTES", "STILLFRAME_LIBCUDA", "LOCAL_WORLD_SIZE")


def _versions() -> dict[str, str]:
    import torch

    facts = {
        "stillframe": support.VERSION,
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda or 'no'})",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}",
    }
    for package in _PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "none"
    return facts


def _read_processor_name() -> str:
    """Return the processor's name, or only its architecture if Linux does not tell the name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _machine_facts() -> dict[str, Any]:
    from stillframe._base import cpus  # needs the core

    affinity = cpus.inspect()  # the CPUs of stillframe's threads, and those of the main thread
    return {
        "processor": _read_processor_name(),
        "cores": len(affinity.ours),
        "cpus": sorted(affinity.ours),
        "main_thread_cpus": sorted(affinity.main),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "free_memory_bytes": raw.available_memory_bytes(),
    }


def _engine() -> dict[str, Any]:
    """Return facts about an engine with default options, and the variables that it reads."""
    from stillframe._save.engine import Engine

    with Engine() as engine:
        stats = engine.stats()
    return {
        "pool_bytes": stats["pool_bytes"],
        "block_bytes": stats["block_bytes"],
        "driver": stats["driver"],
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def _disk(directory: str) -> dict[str, Any]:
    import torch

    from stillframe._save.api import save
    from stillframe.errors import StillframeError

    facts: dict[str, Any] = {"directory": os.path.abspath(directory), "error": None}
    try:
        facts["file_system"] = raw.file_system_of(Path(directory).resolve())
        facts["free_bytes"] = shutil.disk_usage(directory).free
        with tempfile.TemporaryDirectory(prefix=".stillframe-info-", dir=directory) as scratch:
            report = save(torch.zeros(_SAVED_NBYTES // 4), Path(scratch, "info.pt"))
        facts["io_mode"] = report.io_mode
        facts["fallbacks"] = list(report.fallbacks)
    except (OSError, StillframeError) as error:
        facts["error"] = f"{type(error).__name__}: {error}"
    return facts


def collect(directory: str) -> dict[str, Any]:
    """Return all facts, as `--json` prints them."""
    return {
        "versions": _versions(),
        "machine": _machine_facts(),
        "engine": _engine(),
        "disk": _disk(directory),
        "mirror": _mirror(directory),
    }


def _mirror(directory: str) -> dict[str, Any] | None:
    """Return facts about files of the directory that are still to be uploaded, or None."""
    from stillframe._remote.backlog import backlog

    try:
        waiting = backlog(os.path.realpath(directory))
    except OSError:
        return None  # `_disk` has reported the error
    if waiting is None:
        return None
    oldest = datetime.datetime.fromtimestamp(waiting.oldest_s).astimezone()
    return {**waiting._asdict(), "oldest": oldest.isoformat(timespec="seconds")}


def _threads(machine: dict[str, Any]) -> str:
    ours, main = _ranges(machine["cpus"]), _ranges(machine["main_thread_cpus"])
    if ours == main:
        return f"on CPUs {ours}"
    return f"on CPUs {ours}; OpenMP binds the main thread to {main}"


def _ranges(cpus: list[int]) -> str:
    """Return "0-2,5" for [0, 1, 2, 5]."""
    ranges: list[str] = []
    first = 0  # the index of the first CPU of a range
    for index, cpu in enumerate(cpus):
        if index + 1 < len(cpus) and cpus[index + 1] == cpu + 1:
            continue  # the range goes on
        ranges.append(str(cpu) if first == index else f"{cpus[first]}-{cpu}")
        first = index + 1
    return ",".join(ranges)


def lines(facts: dict[str, Any]) -> list[str]:
    """Return the facts of `collect` as lines to read."""
    machine, engine, disk = facts["machine"], facts["engine"], facts["disk"]
    lines = [f"{name}: {version}" for name, version in facts["versions"].items()]
    lines += [
        f"machine: {machine['processor']}, {machine['cores']} cores,"
        f" {decimal(machine['memory_bytes'])} of memory,"
        f" {decimal(machine['free_memory_bytes'])} free",
        f"threads: {_threads(machine)}",
        f"pool: at most {binary(engine['pool_bytes'])}, blocks of {binary(engine['block_bytes'])}",
        f"driver: {engine['driver']}",
    ]
    lines += [f"{name}: {value}" for name, value in engine["environment"].items()]
    lines.append(f"directory: {disk['directory']}")
    if "free_bytes" in disk:
        lines.append(f"file system: {disk['file_system']}, {decimal(disk['free_bytes'])} free")
    if disk["error"]:
        lines.append(f"a save there fails: {disk['error']}")
    else:
        lines.append(f"a save there: {disk['io_mode']} I/O")
        lines += [f"fallback: {each}" for each in disk["fallbacks"]] or ["fallbacks: none"]
    mirror = facts["mirror"]
    if mirror is not None:
        lines.append(
            f"to be uploaded: {mirror['uploads']} ({decimal(mirror['nbytes'])}), the oldest of"
            f" {mirror['oldest']}, to {', '.join(mirror['prefixes'])}"
        )
    return lines


def run(options: argparse.Namespace) -> int:
    """Run the command; return 0, or 2 if a save into the directory fails."""
    facts = collect(options.directory)
    print(json.dumps(facts, indent=2) if options.json else "\n".join(lines(facts)))
    return UNUSABLE if facts["disk"]["error"] else GOOD
