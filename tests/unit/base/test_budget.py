"""The default size of a pool, computed from the files in which the system reports free memory."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import stillframe
from stillframe._base import budget

MIB, GIB = 1 << 20, 1 << 30


class System:
    """Files of a system with 8 GiB available, in a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write(
            "proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable:    8388608 kB\nBuffers: 1\n"
        )

    def write(self, name: str, text: str) -> None:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def group(self, folder: str, **values: object) -> None:
        for name, value in values.items():
            dotted = name.replace("memory_", "memory.", 1)
            self.write(f"sys/fs/cgroup/{folder}/{dotted}", f"{value}\n")

    def shared(self, held: int = 0) -> int:
        return budget.measure(held, self.root).shared


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return System(tmp_path)


def test_pool_budget_is_half_of_the_available_memory(system):
    assert system.shared() == 4 * GIB


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [("8", GIB // 2), ("1", 4 * GIB), ("0", 4 * GIB), ("", 4 * GIB), ("many", 4 * GIB)],
)
def test_ranks_of_a_machine_share_the_budget(system, monkeypatch, ranks, expected):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert system.shared() == expected


def test_memory_held_by_pools_is_not_counted_twice(system):
    system.write("proc/meminfo", "MemAvailable: 7340032 kB\n")  # 1 GiB less
    assert system.shared(held=GIB) == 4 * GIB


@pytest.mark.parametrize(
    ("meminfo", "cgroup"),
    [
        (None, None),
        ("", ""),
        ("MemAvailable: none\nxMemAvailable: 5 kB", "\n:::\nx\n0\n0:\n7:memory\n"),
        ("MemAvailable: none", "5:memory:/a\n0::/a\n"),
    ],
)
def test_unknown_memory_leaves_one_block(system, meminfo, cgroup):
    (system.root / "proc/meminfo").unlink()
    if meminfo is not None:
        system.write("proc/meminfo", meminfo)
    if cgroup is not None:
        system.write("proc/self/cgroup", cgroup)
    system.group("memory/a", memory_limit_in_bytes=9223372036854771712, memory_usage_in_bytes=5)
    assert system.shared() == 0


def test_cgroup_v2_and_its_parents_limit_the_budget(system):
    task, job = "job.slice/task-3", "job.slice"
    system.write("proc/self/cgroup", f"0::/{task}\n")
    system.group(task, memory_max="max", memory_current=1000)
    assert system.shared() == 4 * GIB
    system.group(task, memory_max=4 * GIB, memory_current=GIB)
    assert system.shared() == 3 * GIB // 2
    system.group(job, memory_max=3 * GIB, memory_current=2 * GIB)
    assert system.shared() == GIB // 2
    # Of that, 1 GiB is inactive file pages.
    system.group(job, memory_stat=f"anon 5\ninactive_anon 77\nactive_file 5\ninactive_file {GIB}")
    assert system.shared() == GIB
    # More is inactive than used, because the two files are not read at the same moment.
    system.group(job, memory_stat="inactive_file 99999999999")
    assert system.shared() == 3 * GIB // 2
    system.group(job, memory_current=9999999999, memory_stat="inactive_file 0")
    assert system.shared() == 0  # its limit is exceeded already


def test_cgroup_v1_limits_the_budget(system):
    system.write(
        "proc/self/cgroup", "9:name=systemd:/x\n5:cpu,memory:/docker/abc\n3:cpuset:/\n0::/\n"
    )
    group = "memory/docker/abc"
    system.group(group, memory_limit_in_bytes=9223372036854771712, memory_usage_in_bytes=GIB)
    assert system.shared() == 4 * GIB
    system.group(group, memory_limit_in_bytes=4 * GIB)
    assert system.shared() == 3 * GIB // 2
    system.group(group, memory_stat=f"inactive_file 5\ntotal_inactive_file {GIB}")
    assert system.shared() == 2 * GIB
    system.write("proc/self/cgroup", "9:memoryless:/docker/abc\n5:cpu,memory2:/docker/abc\n")
    assert system.shared() == 4 * GIB


def test_cgroup_mount_counts_as_the_own_group_inside_a_container(system):
    system.write("proc/self/cgroup", "4:memory:/docker/name-on-the-host\n")
    system.group("memory", memory_limit_in_bytes=2 * GIB, memory_usage_in_bytes=0)
    assert system.shared() == GIB
    system.write("proc/self/cgroup", "0::/\n")
    system.group(".", memory_max=GIB, memory_current=0)
    assert system.shared() == GIB // 2
    system.write("proc/self/cgroup", "0::/../../elsewhere\n")
    assert system.shared() == GIB // 2
    system.write("proc/self/cgroup", "0::/a\n")  # cgroup v2 beside v1
    system.group("unified/a", memory_max=GIB // 2, memory_current=0)
    assert system.shared() == GIB // 4


def test_limit_of_address_space_leaves_half_of_itself_to_each_process(system, monkeypatch):
    limit = [2 * GIB]
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (limit[0], limit[0]))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    system.write("proc/self/statm", f"{GIB // 2 // resource.getpagesize()} 1000 1000 1 0 1000 0\n")
    assert budget.measure(0, system.root) == (2 * GIB, 768 * MIB)
    system.write("proc/self/statm", "9999999999 1000 1000 1 0 1000 0\n")
    assert budget.measure(0, system.root).most == 0
    limit[0] = resource.RLIM_INFINITY
    assert budget.measure(0, system.root).most > 1 << 50


def test_unreadable_system_files_set_no_limit(system):
    system.write("proc/self/cgroup", "0::/a\n")
    system.group("a", memory_max=GIB, memory_current=0)
    assert system.shared() == GIB // 2
    (system.root / "sys/fs/cgroup/a/memory.max").unlink()
    (system.root / "sys/fs/cgroup/a/memory.max").mkdir()
    (system.root / "sys/fs/cgroup/a/memory.current").write_bytes(b"\xff\x00")
    assert system.shared() == 4 * GIB


def test_only_an_engine_without_pool_bytes_uses_the_budget(monkeypatch):
    monkeypatch.delenv("STILLFRAME_POOL_BYTES", raising=False)
    monkeypatch.setattr(budget, "measure", lambda held: budget.Budget(1 << 50, 64 * MIB))
    with stillframe.Engine() as found, stillframe.Engine(pool_bytes="48MiB") as given:
        assert found.stats()["pool_bytes"] == 64 * MIB
        assert given.stats()["pool_bytes"] == 48 * MIB


def test_budget_knows_the_memory_of_all_pools(monkeypatch):
    monkeypatch.delenv("STILLFRAME_POOL_BYTES", raising=False)
    shares: list[int] = []

    def measured(held: int) -> budget.Budget:
        shares.append(held)
        return budget.Budget(1 << 50, 64 * MIB)

    monkeypatch.setattr(budget, "measure", measured)
    with stillframe.Engine() as first:
        first.warm_up("32MiB")
        with stillframe.Engine():
            pass
    assert shares[1] - shares[0] == 32 * MIB
