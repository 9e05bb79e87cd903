"""Fixtures for loads to a device: a file, a current stream, and a check for leaks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from stillframe._base import device as _device
from stillframe.testing import FakeDriver


@pytest.fixture
def file(state: dict[str, torch.Tensor], tmp_path: Path) -> Path:
    torch.save(state, tmp_path / "a.pt")
    return tmp_path / "a.pt"


@pytest.fixture(autouse=True)
def stream(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> int:
    """Make a stream current that is not the calling thread."""
    handle = fake.stream()
    monkeypatch.setattr(_device, "current_stream", lambda device: handle)
    return handle


@pytest.fixture(autouse=True)
def nothing_is_left(fake: FakeDriver, stream: int) -> Iterator[None]:
    before = living(fake)
    yield
    assert living(fake) == before


def living(fake: FakeDriver) -> dict[str, int]:
    """Count the driver's objects, reader threads and open files."""
    kinds = ("streams", "events", "allocated", "contexts")
    return {
        **{kind: fake.live(kind) for kind in kinds},
        "readers": _nr_readers(),
        "files": len(os.listdir("/proc/self/fd")),
    }


def _nr_readers() -> int:
    """Count the threads of loads. A joined thread may be listed for another moment."""
    for _ in range(1000):
        found = 0
        for each in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it has just ended
                found += (each / "comm").read_text().startswith(("sfr-reader", "sfr-onload"))
        if not found:
            break
        time.sleep(0.001)
    return found
