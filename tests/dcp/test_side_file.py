"""`meta.pt` is committed together with its checkpoint, wherever a process dies."""

import itertools
import os
import pickle
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from fix_dcp import loaded
from fix_entries import Step, stepping
from stillframe import _core, dcp
from stillframe._dcp import checkpoint, side_file
from stillframe._dcp.side_file import SideFile, mend
from stillframe._lightning.sharded import _check_and_repair_checkpoint as make_ready

META = "meta.pt"


class DiedError(BaseException):
    """Simulates the death of the process: no clean-up code runs after it."""


def state(number: int) -> dict[str, Any]:
    return {"w": torch.full((10,), float(number))}


def save(directory: Path, number: int) -> None:
    writer = dcp.FileSystemWriter(directory)
    writer.side_file = SideFile(META, {"step": number})
    stock.save(state(number), storage_writer=writer, no_dist=True)


def save_as_lightning(directory: Path, number: int) -> None:
    stock.save(state(number), checkpoint_id=directory, no_dist=True)
    torch.save({"step": number}, directory / META)


def tensors_of(directory: Path) -> int:
    return int(loaded(state(0), directory)["w"][0])


def meta_of(directory: Path) -> int:
    return int(torch.load(directory / META)["step"])


def dying_at(monkeypatch: pytest.MonkeyPatch, nth: int) -> Callable[[], bool]:
    """Raise DiedError before the nth change of a name; return whether it was reached."""
    count = itertools.count(1)
    died = []

    def live(name: str) -> None:
        if died or next(count) == nth:
            died.append(name)
            raise DiedError(name)

    def before(name: str) -> None:
        original = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            live(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(os, name, call)

    def step(each: Step, taken: bool) -> None:
        if not taken:
            live(f"step {each[0]}")

    for name in ("link", "replace", "rename", "unlink"):
        before(name)
    monkeypatch.setattr(_core, "take_steps", stepping(step))
    return lambda: bool(died)


@pytest.mark.parametrize("old", [None, save, save_as_lightning], ids=["new", "ours", "theirs"])
def test_death_at_any_step_leaves_the_old_or_the_new_checkpoint(old, tmp_path, monkeypatch):
    seen = set()
    for nth in itertools.count(1):
        directory = tmp_path / str(nth)
        if old is not None:
            old(directory, 1)
        with monkeypatch.context() as patch:
            died = dying_at(patch, nth)
            try:
                save(directory, 2)
            except BaseException as error:
                assert died(), error
        if (directory / ".metadata").exists():
            tensors = tensors_of(directory)
            # A reader of meta.pt finds the file for these tensors, or none.
            assert not (directory / META).exists() or meta_of(directory) == tensors
            mend(os.fspath(directory), META)
            assert meta_of(directory) == tensors
            seen.add(tensors)
        else:
            assert old is None
        if not died():
            break
    assert nth > 4
    assert seen == ({2} if old is None else {1, 2})
    assert len(list(directory.glob("meta*"))) == 2  # the next save removes the rest


@pytest.mark.parametrize("old", [None, save, save_as_lightning], ids=["new", "ours", "theirs"])
def test_failed_commit_keeps_the_old_checkpoint(old, tmp_path, monkeypatch):
    directory = tmp_path / "c"
    if old is not None:
        old(directory, 1)

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("no metadata today")

    with monkeypatch.context() as patch, pytest.raises(BaseException, match="no metadata today"):
        patch.setattr(checkpoint, "commit_metadata", broken)
        save(directory, 2)
    if old is None:
        assert not list(directory.glob("*meta*"))
    else:
        assert (tensors_of(directory), meta_of(directory)) == (1, 1)
    save(directory, 3)
    assert (tensors_of(directory), meta_of(directory)) == (3, 3)


@pytest.mark.parametrize("old", [save, save_as_lightning], ids=["ours", "theirs"])
def test_failure_to_write_the_second_file_keeps_the_old_checkpoint(
    old, tmp_path, monkeypatch, caplog
):
    def broken(*_: Any, **__: Any) -> None:
        raise OSError("no file today")

    old(tmp_path, 1)
    with monkeypatch.context() as patch, pytest.raises(BaseException, match="no file today"):
        patch.setattr(side_file, "_write", broken)
        save(tmp_path, 2)
    assert (tensors_of(tmp_path), meta_of(tmp_path)) == (1, 1)
    assert "stillframe:" not in caplog.text  # there was nothing to undo


def test_checkpoint_without_its_second_file_is_replaced(tmp_path):
    stock.save(state(1), checkpoint_id=tmp_path / "a", no_dist=True)
    save(tmp_path / "b", 1)
    (tmp_path / "b" / META).unlink()
    for directory in (tmp_path / "a", tmp_path / "b"):
        save(directory, 2)
        assert (tensors_of(directory), meta_of(directory)) == (2, 2)


def test_foreign_files_with_similar_names_stay(tmp_path):
    mine = ["meta.notes.pt", "metadata.pt", "meta.0123abcd.pt.mine"]
    mine += [f"meta.{uuid.uuid4()}.txt", f"meta.{uuid.uuid4()}.pt.mine"]
    save(tmp_path, 1)
    for name in mine:
        (tmp_path / name).touch()
    save(tmp_path, 2)
    mend(os.fspath(tmp_path), META)
    assert [name for name in mine if not (tmp_path / name).exists()] == []
    assert len(list(tmp_path.glob("meta*"))) == 2 + len(mine)


def test_files_of_equal_length_and_time_are_compared_by_their_bytes(tmp_path):
    one, other, copy = (tmp_path / name for name in ("one", "other", "copy"))
    for path, text in ((one, "abc"), (other, "abd"), (copy, "abc")):
        path.write_text(text)
        os.utime(path, (1, 1))
    assert side_file._has_same_file_content(os.fspath(one), os.fspath(copy))
    assert not side_file._has_same_file_content(os.fspath(one), os.fspath(other))


def test_failed_undo_does_not_hide_the_first_error(tmp_path, monkeypatch, caplog):
    def broken(what: str) -> Callable[..., None]:
        def call(*_: Any, **__: Any) -> None:
            raise ValueError(what)

        return call

    monkeypatch.setattr(checkpoint, "commit_metadata", broken("the commit"))
    monkeypatch.setattr(side_file, "mend", broken("the mending"))
    with pytest.raises(BaseException, match="the commit"):
        save(tmp_path / "c", 1)
    assert "is left as it is: the mending" in caplog.text


def test_meta_is_written_and_synced_before_the_first_metadata(tmp_path, monkeypatch):
    synced: list[str] = []
    fsync, commit_metadata = os.fsync, checkpoint.commit_metadata

    def noted(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    def check_and_commit(*args: Any, **kwargs: Any) -> None:
        assert meta_of(tmp_path / "c") == 1
        (own,) = (tmp_path / "c").glob("meta.*.pt")
        assert os.fspath(own) in synced
        commit_metadata(*args, **kwargs)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(checkpoint, "commit_metadata", check_and_commit)
    save(tmp_path / "c", 1)


def test_copy_replaces_the_link_on_file_systems_without_links(tmp_path, monkeypatch, caplog):
    def refused(*_: Any) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refused)
    for number in (1, 2):
        save(tmp_path / "c", number)
        assert (tensors_of(tmp_path / "c"), meta_of(tmp_path / "c")) == (number, number)
        assert len(list((tmp_path / "c").glob("meta*"))) == 2
        mend(os.fspath(tmp_path / "c"), META)
        assert "stillframe:" not in caplog.text  # the copy was recognised as equal


def test_mend_leaves_lightnings_own_checkpoint_unchanged(tmp_path):
    directory = tmp_path / "c"
    save(directory, 1)
    save_as_lightning(directory, 2)
    mend(os.fspath(directory), META)
    assert (tensors_of(directory), meta_of(directory)) == (2, 2)


def test_mend_changes_nothing_if_metadata_cannot_be_read(tmp_path):
    directory = tmp_path / "c"
    save(directory, 1)
    (directory / META).unlink()
    (directory / ".metadata").write_bytes(pickle.dumps(3))
    mend(os.fspath(directory), META)
    assert not (directory / META).exists()
    assert side_file._read_save_id(os.fspath(directory)) is None


def test_lightnings_load_finds_meta_after_a_crash_before_its_link(tmp_path):
    save(tmp_path / "c", 1)
    (tmp_path / "c" / META).unlink()
    make_ready(str(tmp_path / "c"))
    assert meta_of(tmp_path / "c") == 1
