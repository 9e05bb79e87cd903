"""Counts of driver calls of a save from a device, and the step from which its bytes are
deferred."""

from __future__ import annotations

import io
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import stillframe
import torch
from stillframe import testing
from stillframe._tree import skeleton

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from gpu_counts import bounds, count

MIB = 1 << 20


@pytest.mark.parametrize("batches", [True, False], ids=["batches", "single copies of rows"])
def test_save_makes_few_driver_calls_and_defers_nearly_all_bytes(batches, tmp_path, fake):
    if not batches:  # a driver that has batches of spans, and no batches of rows
        fake.fail("cuMemcpy3DBatchAsync_v2", sticky=True, code=801)
    found = count(tmp_path, nbytes=72 << 10, block_bytes=4 * MIB)
    assert found["tensors"] == 1200
    for what, figure, most in bounds(found):
        if not batches and what.startswith("calls in async_save"):
            most += 1200  # at most one for each storage
        assert figure <= most, what
    assert found["call"]["samples"] > 0
    assert found["deferred_after_step"][0] == 0


def test_device_lane_has_normal_priority(tmp_path, fake):
    """Training may wait for a device's lane, so lanes keep the normal priority. The writers are
    niced, because training never waits for them."""
    stillframe.save({"w": torch.zeros(100_000)}, tmp_path / "a.pt")
    threads = {
        (task / "comm").read_text().strip(): task for task in Path("/proc/self/task").iterdir()
    }
    nice = {name: int(_stat(task)[16]) for name, task in threads.items()}
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert nice["sfr-cuda0"] == own
    assert nice["sfr-lane0"] == max(own, 10)
    slack_ns = Path("/proc", threads["sfr-cuda0"].name, "timerslack_ns").read_text()
    assert int(slack_ns) <= 1000


def _stat(task: Path) -> list[str]:
    """Return the fields of /proc/*/stat after the name, which may contain spaces."""
    return (task / "stat").read_text().rpartition(")")[2].split()


class Tags(pickle.Unpickler):
    """An unpickler that collects the location tags of a skeleton's storages, in order."""

    def __init__(self, made: skeleton.Skeleton) -> None:
        super().__init__(io.BytesIO(made.data))
        self.tags: list[str] = []
        self.load()

    def find_class(self, module: str, name: str) -> Any:
        return (lambda *_: None) if module == "torch._utils" else super().find_class(module, name)

    def persistent_load(self, pid: tuple[Any, ...]) -> None:
        self.tags.append(pid[3])


def test_device_tag_is_read_once_per_save(monkeypatch):
    asked: list[int] = []

    def location(storage: torch.UntypedStorage) -> str:
        asked.append(storage.nbytes())
        return f"tag of {storage.nbytes() // 20}"

    replaced = testing._skeleton_replacements()
    replaced["device_index"] = lambda tensor: tensor.numel() // 20
    types = skeleton._make_torch_types(
        **replaced, location=location, dtypes=[(torch.int8, "CharStorage")]
    )
    monkeypatch.setattr(skeleton, "_types", types)
    tree = [torch.ones(n, dtype=torch.int8) for n in range(1, 60)]
    tags = [f"tag of {n // 20}" for n in range(1, 60)]
    for _ in range(2):
        assert Tags(skeleton.build(tree)).tags == tags
        assert asked == [1, 20, 40]
        asked.clear()
    registry = list(torch.serialization._package_registry)
    torch.serialization.register_package(1, lambda _: "mine", lambda *_: None)
    try:
        assert Tags(skeleton.build(tree)).tags == tags
    finally:
        torch.serialization._package_registry[:] = registry
    assert asked == list(range(1, 60))
