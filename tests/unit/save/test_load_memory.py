"""The peak memory of loads, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import stillframe
import torch
from fix_memory import peak_of
from stillframe._load import restore

NBYTES, NR = 1 << 20, 64
# A buffer of a MiB for each of four threads, the directory, the pickle, pages of libraries, and
# what malloc keeps. The measured sum is 11 MiB.
FIXED = 20 << 20


@pytest.fixture(params=["torch.save", "stillframe.save"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    state = {f"t{i}": torch.full((NBYTES // 4,), float(i)) for i in range(NR)}
    if request.param == "torch.save":
        torch.save(state, tmp_path / "x.pt")
    else:
        stillframe.save(state, tmp_path / "x.pt", durable=False)
    return tmp_path / "x.pt"


@pytest.mark.parametrize("verify", [False, True])
def test_a_load_takes_no_more_memory_than_the_state(path, verify):
    peak = peak_of(lambda: stillframe.load(path, verify=verify))
    assert 0.9 * NBYTES * NR <= peak <= 1.02 * NBYTES * NR + FIXED


def test_a_load_into_tensors_takes_no_second_copy(path):
    into = {f"t{i}": torch.zeros(NBYTES // 4) for i in range(NR)}

    def fill() -> None:
        stillframe.load(path, into=into)
        assert all(bool((into[f"t{i}"][::4096] == i).all()) for i in range(NR))

    # A child that writes to its parent's memory gets new pages, but not more of them.
    assert peak_of(fill) <= FIXED


def test_load_through_memory_takes_only_the_bytes_in_flight(path, monkeypatch):
    monkeypatch.setattr("stillframe._load.fill._AHEAD_BYTES", 8 << 20)
    columns = {f"t{i}": torch.zeros(NBYTES // 4, 2)[:, 0] for i in range(NR)}
    assert peak_of(lambda: stillframe.load(path, into=columns)) <= NBYTES * NR // 2 + FIXED // 2


class _Noting:
    """A restore that records the calls of `into` and `go`."""

    def __init__(self, core: Any, calls: list[str]) -> None:
        self._core = core
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        if name in ("into", "go"):
            self._calls.append(name)
        return getattr(self._core, name)


def test_no_memory_is_allocated_while_readers_fill_earlier_memory(path, monkeypatch):
    calls: list[str] = []
    real = restore.open_archive
    monkeypatch.setattr(
        restore, "open_archive", lambda core, *rest: real(_Noting(core, calls), *rest)
    )
    monkeypatch.setattr(restore, "_BATCH_BYTES", NBYTES)
    stillframe.load(path)
    assert calls.count("into") > NR // 2
    assert calls.index("go") == calls.count("into")
    assert calls.count("go") == 1  # not once for every requested storage
