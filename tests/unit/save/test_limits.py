"""Files that have the layout of files past 4 GiB because a threshold was lowered."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from typing import Any

import pytest
import stillframe
import torch
from stillframe import _core


@pytest.fixture(autouse=True)
def restored_limits() -> Iterator[None]:
    yield
    _core._set_limits()


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    tensors = {f"t{i}": torch.randn(1000 + 7 * i, generator=generator) for i in range(40)}
    return {**tensors, "empty": torch.empty(0), "epoch": 7}


def assert_same(loaded: dict[str, Any], expected: dict[str, Any]) -> None:
    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(loaded[name], value), name
        else:
            assert loaded[name] == value


@pytest.mark.parametrize("zip64_bytes", [4096, 4500, 50_000, 120_000])
@pytest.mark.parametrize("zip64_records", [1, 47, 0xFFFF])
def test_every_reader_accepts_an_archive_with_low_zip64_thresholds(
    tmp_path, zip64_bytes, zip64_records
):
    path = tmp_path / "a.pt"
    _core._set_limits(zip64_bytes=zip64_bytes, zip64_records=zip64_records)
    stillframe.save(state(), path)
    _core._set_limits()  # readers must not need the writer's thresholds
    assert_same(torch.load(path), state())
    assert_same(torch.load(path, mmap=True), state())
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    with path.open("rb") as file:
        found = _core.check(file.fileno(), True)
    assert found["ok"], found["error"]


@pytest.mark.parametrize(
    "limits",
    [
        {"zip64_bytes": 4095},
        {"zip64_bytes": 1 << 32},
        {"zip64_records": 0},
        {"reader_chunk_bytes": 2 << 20},
        {"reader_chunk_bytes": 5000},
        {"check_chunk_bytes": 0},
        {"ahead_bytes": 0},
    ],
)
def test_limit_outside_its_range_is_refused(limits):
    with pytest.raises(ValueError, match="outside its range"):
        _core._set_limits(**limits)
