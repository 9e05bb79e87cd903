"""Power failures: every state that one may leave loads as the old or the new checkpoint.

Writing, syncing and renaming a data file in the core counts as one change of the directory here.
tests/c/save/test_crash.c tests the steps inside it."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fix_entries import Call, Recorded, kind_at
from stillframe._dcp import checkpoint, side_file
from stillframe.dcp import FileSystemWriter

META = "meta.pt"


def identity(path: str) -> str | None:
    kind = kind_at(path)
    return f"file {os.stat(path).st_ino}" if kind == "file" else kind


def recorded_save(
    path: Path, top: Path, monkeypatch: pytest.MonkeyPatch, meta: int | None = None
) -> Recorded:
    recorded, failure, seen = Recorded(top, identity), checkpoint.DataFile.failure, set()
    write = side_file._write

    def noted(self: Any) -> Any:
        error, own = failure(self), str(path / self.name)
        if error is None and own not in seen:
            seen.add(own)
            change = {own: identity(own)}
            recorded.calls.append(Call("rename", os.path.realpath(path), change))
        return error

    def written(content: Any, own: str, **options: Any) -> None:
        write(content, own, **options)
        recorded.calls.append(Call("create", os.path.realpath(path), {own: identity(own)}))

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.DataFile, "failure", noted)
        patched.setattr(side_file, "_write", written)
        with recorded(monkeypatch):
            save(path, 2.0, meta)
    assert len(seen) == 3
    return recorded


def save(path: Path, value: float, meta: int | None = None) -> None:
    state = {f"w{i}": torch.full((500,), value) for i in range(6)}
    writer = FileSystemWriter(path, thread_count=3)
    if meta is not None:
        writer.side_file = side_file.SideFile(META, {"step": meta})
    dcp.save(state, storage_writer=writer, no_dist=True)


def save_as_lightning(path: Path, value: float, meta: int) -> None:
    save(path, value)
    torch.save({"step": meta}, path / META)


def files(path: Path) -> dict[str, str | None]:
    return {str(each): identity(str(each)) for each in path.iterdir()}


def holds(state: dict[str, str], checkpoint: dict[str, str | None]) -> bool:
    return all(state.get(name) == expected for name, expected in checkpoint.items())


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
    # After the save has ended, only the new checkpoint is possible.
    assert all(holds(state, new) for state in recorded.states())


@pytest.mark.parametrize("before", [None, save, save_as_lightning], ids=["new", "ours", "theirs"])
def test_power_failure_leaves_matching_meta_or_one_that_mend_restores(
    tmp_path, monkeypatch, before
):
    path = tmp_path / "above" / "checkpoint"
    if before is not None:
        before(path, 1.0, 1)
        old, old_metadata = identity(str(path / META)), identity(str(path / ".metadata"))
        save_id = side_file._read_save_id(str(path))
    recorded = recorded_save(path, tmp_path, monkeypatch, meta=2)
    new, metadata, link = identity(str(path / META)), str(path / ".metadata"), str(path / META)
    new_metadata, new_id = identity(metadata), side_file._read_save_id(str(path))
    seen = set()
    for state in recorded.every_state():
        current = state.get(link)
        if state.get(metadata) == new_metadata:
            assert current in (None, new)
            assert state[side_file._build_side_file_path(str(path), META, new_id)] == new
        elif before is None:
            assert metadata not in state and current in (None, new)
        else:
            assert state[metadata] == old_metadata and current in (None, old)
            assert old in (
                current,
                state.get(side_file._build_side_file_path(str(path), META, save_id)),
            )
        seen.add((state.get(metadata) == new_metadata, current))
    assert {True, False} == {committed for committed, _ in seen}
    # After the save has ended, only the new checkpoint is possible.
    assert all(state[link] == new for state in recorded.states())
