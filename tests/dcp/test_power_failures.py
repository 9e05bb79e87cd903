"""Every state that a power failure may leave of a directory loads as its old checkpoint or its new
one. What the core does to a data file (written, synced, renamed) is one change of the directory
here; tests/c/save/test_crash.c has what is inside it."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fix_entries import Call, Recorded, what_stands
from stillframe._dcp import image
from stillframe.dcp import FileSystemWriter


def identity(path: str) -> str | None:
    stands = what_stands(path)
    return f"file {os.stat(path).st_ino}" if stands == "file" else stands


def recorded_save(path: Path, top: Path, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    recorded, failure, seen = Recorded(top, identity), image.DataFile.failure, set()

    def noted(self: Any) -> Any:
        error = failure(self)
        if error is None and self.path not in seen:
            seen.add(self.path)
            change = {self.path: identity(self.path)}
            recorded.calls.append(Call("rename", os.path.realpath(path), change))
        return error

    with monkeypatch.context() as patched:
        patched.setattr(image.DataFile, "failure", noted)
        with recorded(monkeypatch):
            save(path, 2.0)
    assert len(seen) == 3
    return recorded


def save(path: Path, value: float) -> None:
    state = {f"w{i}": torch.full((500,), value) for i in range(6)}
    dcp.save(state, storage_writer=FileSystemWriter(path, thread_count=3), no_dist=True)


def files(path: Path) -> dict[str, str | None]:
    return {str(each): identity(str(each)) for each in path.iterdir()}


def holds(state: dict[str, str], checkpoint: dict[str, str | None]) -> bool:
    return all(state.get(name) == stands for name, stands in checkpoint.items())


@pytest.mark.parametrize("overwritten", [True, False])
def test_a_power_failure_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path, monkeypatch, overwritten
):
    path = tmp_path / "above" / "checkpoint"
    old: dict[str, str | None] = {}
    if overwritten:
        save(path, 1.0)
        old = files(path)
    recorded = recorded_save(path, tmp_path, monkeypatch)
    new, metadata = files(path), str(path / ".metadata")
    seen = set()
    for state in recorded.every_state():
        if state.get(metadata) == new[metadata]:
            assert holds(state, new)
            seen.add("new")
        else:
            assert state.get(metadata) == old.get(metadata)
            assert holds(state, old)
            seen.add("old")
    assert seen == {"old", "new"}
    # Once the save has ended there is nothing but the new one.
    assert all(holds(state, new) for state in recorded.states())
