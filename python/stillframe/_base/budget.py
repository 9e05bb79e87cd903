"""The memory of pools without `pool_bytes`: half of what the system leaves.

    budget = (what the system leaves + what our pools hold already) / 2 / local ranks

"What the system leaves" is the least of these numbers:

    MemAvailable of the machine
    limit - usage + inactive file pages, of the process's memory cgroup (v1 or v2)
    the same of each parent of this cgroup

The kernel reclaims inactive file pages before memory runs short. The memory of our pools is added
back, because the system counts it as used, and the core subtracts it again from the budget.

With a limit of address space (`ulimit -v`), one pool gets at most half of the addresses left.

A missing or unexpected file under /proc or /sys counts as no limit.
"""

from __future__ import annotations

import mmap
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from stillframe import _core

_NO_LIMIT = 1 << 62  # more than any machine has


class Budget(NamedTuple):
    """The most bytes that pools without `pool_bytes` may take."""

    shared: int  # for all such pools of this process together
    most: int  # for one pool


class _CgroupNames(NamedTuple):
    """The names in one version of the cgroup interface."""

    limit: str  # a file
    usage: str  # a file
    inactive: str  # the key in `memory.stat` for inactive file pages


_V1 = _CgroupNames("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _CgroupNames("memory.max", "memory.current", "inactive_file")


def measure(held: int, root: Path = Path("/")) -> Budget:
    """Return the budget: this rank's share of half the memory that is free or held by its pools.

    `held` is the number of bytes that they hold. The directory `root` has `proc` and `sys`.
    """
    left = min(_machine_bytes_left(root), _cgroup_bytes_left(root))
    # Without any figures the budget is 0, and each pool has one block: slow, but safe.
    shared = 0 if left == _NO_LIMIT else (left + held) // 2 // _count_local_ranks()
    return Budget(shared, most=_address_space_bytes_left(root) // 2)


def _machine_bytes_left(root: Path) -> int:
    kib = _number(root / "proc/meminfo", "MemAvailable:")
    return _NO_LIMIT if kib is None else kib * 1024


def _cgroup_bytes_left(root: Path) -> int:
    """Return the least number of bytes that a memory cgroup of the process leaves."""
    mount, least = root / "sys/fs/cgroup", _NO_LIMIT
    # A line is `number:controllers:/group`. In cgroup v2 it is `0::/group`.
    for line in _text(root / "proc/self/cgroup").split("\n"):
        number, _, rest = line.partition(":")
        controllers, colon, group = rest.partition(":")
        if not colon:
            continue
        if "memory" in controllers.split(","):
            least = min(least, _cgroup_and_parents_bytes_left(mount / "memory", group, _V1))
        elif number == "0" and not controllers:
            least = min(
                least,
                _cgroup_and_parents_bytes_left(mount, group, _V2),
                # where v1 is mounted too
                _cgroup_and_parents_bytes_left(mount / "unified", group, _V2),
            )
    return least


def _cgroup_and_parents_bytes_left(mount: Path, group: str, files: _CgroupNames) -> int:
    """Return the least number of bytes that are left within the limits of a cgroup and its parents.

    In a container, `group` may be a path on the host, which does not exist below `mount`. Then one
    of its parents, or `mount` itself, is the container's own group.
    """
    folder = mount / group.strip("/")
    return min(
        _single_cgroup_bytes_left(each, files) for each in _folder_and_parents(folder, mount)
    )


def _folder_and_parents(folder: Path, mount: Path) -> Iterator[Path]:
    """Yield `folder` and each of its parents, up to `mount`."""
    while folder != mount:
        yield folder
        folder = folder.parent
    yield mount


def _single_cgroup_bytes_left(folder: Path, files: _CgroupNames) -> int:
    """Return how many more bytes the processes of one cgroup may use."""
    # Without a limit the file has "max" in v2, and a huge number in v1.
    limit = _number(folder / files.limit)
    usage = _number(folder / files.usage)
    if limit is None or limit == _NO_LIMIT or usage is None:
        return _NO_LIMIT
    inactive = _number(folder / "memory.stat", files.inactive + " ") or 0  # its lines are "KEY N"
    # The files are not read at the same moment, so `inactive` may be larger than `usage`.
    used = max(0, usage - inactive)
    return max(0, limit - used)


def _count_local_ranks() -> int:
    """Return the number of ranks on this machine, according to torchrun."""
    found = re.match(r"\s*(\d+)", os.environ.get("LOCAL_WORLD_SIZE", ""))
    return max(1, int(found[1])) if found else 1


def _address_space_bytes_left(root: Path) -> int:
    """Return the bytes of address space that RLIMIT_AS leaves."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return _NO_LIMIT
    pages = _number(root / "proc/self/statm") or 0
    return max(0, limit - pages * mmap.PAGESIZE)


def _number(file: Path, key: str = "") -> int | None:
    """Return the number after `key` at the start of a line, or without a key the number at the
    start of the file. Return None if there is no such number or file."""
    start = rf"(?m)^{re.escape(key)}" if key else r"\A"
    found = re.search(rf"{start}[ \t]*(\d+)", _text(file))
    return min(int(found[1]), _NO_LIMIT) if found else None


def _text(file: Path) -> str:
    # Python's own read would release the interpreter lock several times.
    return _core.read_text(bytes(file)).decode("ascii", "replace")
