"""The memory of pools without `pool_bytes`: half of what the system leaves.

    budget = (what the system leaves + what our pools hold already) / 2 / local ranks

"What the system leaves" is the least of these numbers: MemAvailable of the machine and, for the
process's memory cgroup and each of its parents (v1 and v2), limit - usage + inactive file pages.
The kernel reclaims those pages before memory runs short, and a machine that writes checkpoints has
many of them. The memory that our own pools hold is added back, because the system counts it as
used. Otherwise that memory would be subtracted twice for a second engine: here, and when the core
subtracts what other pools have.

A limit of address space (`ulimit -v`, which batch systems set) works differently. Reserved
addresses count against the limit even if no memory is used, and the limit applies to this process
alone. One pool gets at most half of the address space that is left.

The core gives each pool what the other pools have left of the budget (`csrc/core/memory/budget.c`).
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
    """The memory that default pools, those without `pool_bytes`, may take.

    Attributes:
        shared: The most bytes of all such pools in this process together.
        most: The most bytes of one pool.
    """

    shared: int
    most: int


class _Files(NamedTuple):
    """The names in one version of the cgroup interface: two files, and the key in `memory.stat` for
    inactive file pages."""

    limit: str
    usage: str
    inactive: str


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


def measure(held: int, root: Path = Path("/")) -> Budget:
    """Return the budget, from what the system leaves now.

    Args:
        held: Bytes that the pools of this process hold.
        root: The directory with `proc` and `sys`.
    """
    least = min(_left_by_machine(root), _left_by_cgroups(root))
    # A system without any figures gets pools of one block: slow, but safe.
    shared = 0 if least == _NO_LIMIT else (least + held) // 2 // _local_ranks()
    return Budget(shared, _left_by_rlimit(root) // 2)


def _left_by_machine(root: Path) -> int:
    """Return the bytes that the kernel could give away now (MemAvailable)."""
    kib = _number(root / "proc/meminfo", "MemAvailable:")
    return _NO_LIMIT if kib is None else kib * 1024


def _left_by_cgroups(root: Path) -> int:
    """Return the least number of bytes that a memory cgroup of the process, v1 or v2, leaves.

    A line of /proc/self/cgroup is `number:controllers:/group`. The line of cgroup v2 has number 0
    and no controllers.
    """
    mount, least = root / "sys/fs/cgroup", _NO_LIMIT
    for line in _text(root / "proc/self/cgroup").split("\n"):
        number, _, rest = line.partition(":")
        controllers, colon, group = rest.partition(":")
        if not colon:
            continue
        if "memory" in controllers.split(","):
            least = min(least, _left_by_chain(mount / "memory", group, _V1))
        elif number == "0" and not controllers:
            least = min(
                least,
                _left_by_chain(mount, group, _V2),
                _left_by_chain(mount / "unified", group, _V2),  # if both versions are in use
            )
    return least


def _left_by_chain(mount: Path, group: str, files: _Files) -> int:
    """Return the least number of bytes that a group or one of its parents leaves.

    Inside a container, /proc may give the group's path on the host. That path does not exist below
    the container's mount, and missing files count as no limit. One of its parents, at the latest
    the mount itself, is then the container's own group.
    """
    folder = mount / group.strip("/")
    return min(_left_by(each, files) for each in _up_to(folder, mount))


def _up_to(folder: Path, mount: Path) -> Iterator[Path]:
    """Yield `folder` and each of its parents, up to `mount`."""
    while folder != mount:
        yield folder
        folder = folder.parent
    yield mount


def _left_by(folder: Path, files: _Files) -> int:
    """Return how many bytes the limit of one group leaves, `_NO_LIMIT` if it has none."""
    # Without a limit the file has "max" in v2, and a huge number in v1.
    limit = _number(folder / files.limit)
    usage = _number(folder / files.usage)
    if limit is None or limit == _NO_LIMIT or usage is None:
        return _NO_LIMIT
    inactive = _number(folder / "memory.stat", files.inactive + " ") or 0
    # The files are not read at the same moment, so `inactive` may be larger than `usage`.
    return max(0, limit - max(0, usage - inactive))


def _local_ranks() -> int:
    """Return the number of ranks on this machine, which torchrun sets."""
    found = re.match(r"\s*(\d+)", os.environ.get("LOCAL_WORLD_SIZE", ""))
    return max(1, int(found[1])) if found else 1


def _left_by_rlimit(root: Path) -> int:
    """Return the bytes that RLIMIT_AS leaves. The first number of statm is the pages in use."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return _NO_LIMIT
    return max(0, limit - (_number(root / "proc/self/statm") or 0) * mmap.PAGESIZE)


def _number(file: Path, key: str = "") -> int | None:
    """Return the number in a file that follows `key` at the start of a line. Without a key, return
    the number at the start of the file. Return None if there is no such number or file."""
    start = rf"(?m)^{re.escape(key)}" if key else r"\A"
    found = re.search(rf"{start}[ \t]*(\d+)", _text(file))
    return min(int(found[1]), _NO_LIMIT) if found else None


def _text(file: Path) -> str:
    # Python's own read releases the interpreter lock several times for each file.
    return _core.read_text(bytes(file)).decode("ascii", "replace")
