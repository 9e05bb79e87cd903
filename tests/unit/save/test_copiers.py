"""The number of threads that help with large copies, and their kinds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import stillframe
import torch
from fix_waits import eventually
from stillframe._base import cpus
from stillframe._save import options

LARGE = 3 << 20  # elements of float32: a copy that is large enough for helpers


@pytest.mark.parametrize(
    ("cores", "ranks", "copiers"),
    [
        *((1, None, 0), (2, None, 1), (8, "1", 7), (64, None, 7), (64, "8", 7), (16, "8", 1)),
        *((8, "8", 0), (4, "8", 0), (4, "0", 3), (4, "many", 3), (4, "", 3)),
    ],
)
def test_ranks_of_a_machine_share_its_cores(monkeypatch, cores, ranks, copiers):
    monkeypatch.setattr(cpus, "count", lambda: cores)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert options.nr_copiers() == copiers


def names_and_nice() -> dict[str, int]:
    """Return the nice value of each thread of this process, by the thread's name."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        found[(task / "comm").read_text().strip()] = int(fields[16])
    return found


def copiers_running() -> int:
    """Return the number of running copiers of all engines in this process."""
    tasks = Path("/proc/self/task").iterdir()
    return sum((task / "comm").read_text().startswith("sfr-copier") for task in tasks)


@pytest.mark.parametrize("way", ["snapshot", "save"])
def test_a_large_copy_has_helpers_of_the_callers_priority(monkeypatch, tmp_path, way):
    monkeypatch.setattr(cpus, "count", lambda: 3)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    state = {"w": torch.arange(LARGE, dtype=torch.float32)}
    before = copiers_running()
    with stillframe.Engine(pool_bytes=1 << 26) as engine:
        if way == "snapshot":
            with stillframe.snapshot(state, engine=engine) as taken:
                assert torch.equal(taken.tree["w"], state["w"])
        else:
            stillframe.save(state, tmp_path / "a.pt", engine=engine)
            assert torch.equal(stillframe.load(tmp_path / "a.pt")["w"], state["w"])
        # A new thread sets its name when it first runs.
        assert eventually(lambda: {"sfr-copier0", "sfr-copier1"} <= set(names_and_nice()))
        nice = names_and_nice()
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert (nice["sfr-copier0"], nice["sfr-copier1"]) == (own, own)
        assert copiers_running() == before + 2
    assert copiers_running() == before


def test_a_small_copy_starts_no_helper():
    before = copiers_running()
    with stillframe.Engine(pool_bytes=1 << 26) as engine:
        with stillframe.snapshot({"w": torch.ones(1000)}, engine=engine):
            pass
        assert copiers_running() == before
