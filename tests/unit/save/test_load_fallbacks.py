"""Files that a load starts to read and then leaves to torch.load, and files without a record."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import stillframe
import torch
from fix_checkpoints import by_path, by_stillframe
from stillframe import CorruptCheckpointError

ALIGNMENT = 64


def state() -> dict[str, Any]:
    return {"a": torch.arange(5000.0), "b": torch.arange(7.0), "epoch": 3}


def repack_with_storages_elsewhere(source: Path, target: Path) -> None:
    """Write an archive whose first records are where torch would put them, and whose storages are
    not.

    So only the header of a storage shows that another program has written it.
    """
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        assert new.fp is not None
        for name in old.namelist():
            info = zipfile.ZipInfo(name)
            if "/data/" not in name:
                used = new.fp.tell() + 30 + len(name) + 4
                padding = -used % ALIGNMENT
                info.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
            new.writestr(info, old.read(name))
            new.fp.write(bytes(200))
            new.start_dir = new.fp.tell()


@pytest.mark.parametrize("write", [by_path, by_stillframe])
def test_load_into_leaves_a_repacked_file_to_torch(write, tmp_path, monkeypatch):
    write(state(), tmp_path / "a.pt")
    repack_with_storages_elsewhere(tmp_path / "a.pt", tmp_path / "b.pt")
    calls = []
    load = torch.load
    monkeypatch.setattr(
        torch, "load", lambda *args, **options: calls.append(args) or load(*args, **options)
    )
    into = {"a": torch.zeros(5000), "b": torch.zeros(7), "epoch": 0}
    assert stillframe.load(tmp_path / "b.pt", into=into) is into
    assert torch.equal(into["a"], state()["a"]) and torch.equal(into["b"], state()["b"])
    assert into["epoch"] == 3
    assert stillframe.load(tmp_path / "b.pt")["epoch"] == 3
    assert len(calls) == 2


def without_record(source: Path, target: Path, *, renamed: bool) -> None:
    """Rename data/1, which removes the record and keeps the layout."""
    if renamed:
        target.write_bytes(source.read_bytes().replace(b"/data/1", b"/data/9"))
        return
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            if not name.endswith("/data/1"):
                new.writestr(name, old.read(name))


@pytest.mark.parametrize("renamed", [True, False])
@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("write", [by_path, by_stillframe])
def test_file_that_lacks_a_record_is_corrupt(write, weights_only, renamed, tmp_path):
    write(state(), tmp_path / "a.pt")
    without_record(tmp_path / "a.pt", tmp_path / "b.pt", renamed=renamed)
    into = {"a": torch.zeros(5000), "b": torch.zeros(7)}
    for options in ({}, {"into": into}, {"mmap": True}):
        if options.get("mmap") and not renamed:
            continue  # refused as packed by another program
        with pytest.raises(CorruptCheckpointError, match="record data/1 is missing") as error:
            stillframe.load(tmp_path / "b.pt", weights_only=weights_only, **options)
        assert str(tmp_path / "b.pt") in str(error.value)
        if renamed and not options.get("mmap"):
            assert "is missing: b" in str(error.value)
    assert not into["a"].any()
