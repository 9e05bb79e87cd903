"""Commits of a DCP checkpoint in which a call fails, and the files that they may remove."""

import errno
import os
from types import SimpleNamespace
from typing import Any

import pytest
import stillframe.dcp
import torch
import torch.distributed.checkpoint as dcp
from fix_dcp import equal, loaded
from fix_entries import Recorded, Step, stepping
from stillframe import _core
from stillframe._base import steps
from stillframe._dcp import checkpoint
from stillframe._dcp.location import Directory
from stillframe.dcp import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

OLD, NEW = {"a": torch.zeros(1000)}, {"a": torch.ones(1000)}


# The steps of a commit, in order: the metadata and its directory entry, the data files' entries,
# the rename, and its directory entry.
STEPS = [_core.STEP_WRITE_SYNCED, *2 * [_core.STEP_SYNC], _core.STEP_RENAME, _core.STEP_SYNC]


def failing(monkeypatch: pytest.MonkeyPatch, nth: int) -> list[int]:
    """Fail the nth step from now on, counted from 0; return the steps before it."""
    seen: list[int] = []

    def on_step(step: Step, taken: bool) -> int:
        if not taken:
            seen.append(step[0])
        return errno.EIO if len(seen) == nth + 1 and not taken else 0

    monkeypatch.setattr(_core, "take_steps", stepping(on_step))
    return seen


@pytest.mark.parametrize("save", ["dcp", "ours"])
@pytest.mark.parametrize("nth", range(len(STEPS)))
def test_failure_of_any_commit_step_is_raised_and_one_checkpoint_is_complete(
    tmp_path, monkeypatch, caplog, save, nth
):
    stillframe.dcp.save(OLD, tmp_path)
    is_new = nth > STEPS.index(_core.STEP_RENAME)
    seen = failing(monkeypatch, nth)
    with pytest.raises(CheckpointException, match="Input/output error"):
        if save == "ours":
            stillframe.dcp.save(NEW, tmp_path)
        else:
            dcp.save(NEW, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    monkeypatch.undo()
    assert seen[: nth + 1] == STEPS[: nth + 1]
    assert equal(loaded(NEW, tmp_path), NEW if is_new else OLD)
    assert not list(tmp_path.glob("*.tmp"))
    assert "something is left" not in caplog.text
    if save == "ours":  # DCP's own save does not report the end, so the next save removes the files
        assert len(list(tmp_path.glob("*.distcp"))) == 1 + is_new
    dcp.save(OLD, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    assert len(list(tmp_path.glob("*.distcp"))) == 1


def test_a_first_save_whose_commit_fails_leaves_nothing(tmp_path, monkeypatch, caplog):
    failing(monkeypatch, 0)
    with pytest.raises(CheckpointException, match="Input/output error"):
        stillframe.dcp.save(NEW, tmp_path / "c")
    assert list(tmp_path.iterdir()) == [] and caplog.text == ""


def test_directory_that_cannot_be_listed_fails_no_save(tmp_path, monkeypatch, caplog):
    def unlisted(directory: str) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), directory)

    stillframe.dcp.save(OLD, tmp_path)
    monkeypatch.setattr(steps, "names", unlisted)
    stillframe.dcp.save(NEW, tmp_path)
    assert equal(loaded(NEW, tmp_path), NEW)
    assert "what" in caplog.text and "was not removed: [Errno 13] Permission denied" in caplog.text


def test_no_file_is_removed_if_the_metadata_cannot_be_read(tmp_path, monkeypatch, caplog):
    (tmp_path / ".metadata").write_bytes(b"no pickle")
    (tmp_path / "__0_0.0123abcd.distcp").write_bytes(b"of a checkpoint that may be mended")
    failing(monkeypatch, STEPS.index(_core.STEP_RENAME))
    with pytest.raises(CheckpointException, match="Input/output error"):
        stillframe.dcp.save(NEW, tmp_path)
    assert len(list(tmp_path.glob("*.distcp"))) == 2
    assert "files of a failed save stay" in caplog.text


def test_rank_that_saves_alone_removes_only_its_own_files(tmp_path):
    others = ["__1_0.0123abcd.distcp", "__1.metadata.0123abcd.tmp", ".metadata.0123abcd.tmp"]
    for name in ("__0_0.0123abcd.distcp", *others):
        (tmp_path / name).touch()
    nothing: Any = SimpleNamespace(storage_data={})
    directory = Directory(str(tmp_path))
    checkpoint.remove_unreferenced_files(nothing, directory, 0)
    assert sorted(os.listdir(tmp_path)) == sorted(others)
    checkpoint.remove_unreferenced_files(nothing, directory, None)
    assert os.listdir(tmp_path) == []


def test_new_directories_are_synced_like_the_checkpoint(tmp_path, monkeypatch):
    recorded = Recorded(tmp_path)
    with recorded(monkeypatch):
        writer = FileSystemWriter(tmp_path / "a/b/c")
        dcp.save(NEW, storage_writer=writer, no_dist=True)
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a/b")} <= {*recorded.synced()}


@pytest.mark.parametrize("options", [{"durable": False}, {"sync_files": False}])
def test_durable_false_skips_all_syncs(tmp_path, monkeypatch, options):
    recorded = Recorded(tmp_path)
    with recorded(monkeypatch):
        dcp.save(NEW, storage_writer=FileSystemWriter(tmp_path / "a", **options), no_dist=True)
    assert recorded.synced() == []


def test_first_of_several_file_errors_is_raised_and_no_file_stays(tmp_path, monkeypatch):
    made: list[Any] = []

    class File(checkpoint.DataFile):
        def failure(self) -> BaseException | None:
            super().failure()
            return OSError(f"of file {made.index(self)}")

        def wait_and_check_written(self) -> bool:
            return super().failure() is None

    def make(*args: Any, **named: Any) -> File:
        made.append(File(*args, **named))
        return made[-1]

    monkeypatch.setattr(checkpoint, "DataFile", make)
    state = {"a": torch.ones(10), "b": torch.ones(10)}
    writer = FileSystemWriter(tmp_path, single_file_per_rank=False)
    with pytest.raises(CheckpointException, match="of file 0"):
        dcp.save(state, storage_writer=writer, no_dist=True)
    assert len(made) == 2 and os.listdir(tmp_path) == []
