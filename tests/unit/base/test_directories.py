"""Directories and links that Python makes: their states after a power failure."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from fix_entries import Recorded
from stillframe._base import paths
from stillframe._lightning import rotation
from stillframe.errors import SaveError


def make(path: Path, *, durable: bool = True) -> paths.SaveTarget:
    return paths.target(str(path), follow_link=False, create_parents=True, durable=durable)


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def failing(number: int):
    def fsync(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    return fsync


# ---- directories -------------------------------------------------------------------------------


def test_new_directories_are_there_after_any_power_failure(tmp_path, monkeypatch):
    recorded = Recorded(tmp_path)
    with recorded(monkeypatch):
        target = make(tmp_path / "a/b/c/file.ckpt")
    assert target.directory == os.fsencode(os.path.realpath(tmp_path / "a/b/c"))
    made = [str(tmp_path.resolve() / each) for each in ("a", "a/b", "a/b/c")]
    assert all(set(made) <= state.keys() for state in recorded.states())
    assert recorded.synced() == [os.path.dirname(each) for each in made]


def test_directories_that_are_there_already_are_not_synced_again(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    recorded = Recorded(tmp_path)
    with recorded(monkeypatch):
        make(tmp_path / "a/b/file.ckpt")
        make(tmp_path / "a/b/file.ckpt")
    assert [call.kind for call in recorded.calls] == ["mkdir", "sync"]


def test_directories_of_a_save_that_need_not_be_durable_are_not_synced(tmp_path, monkeypatch):
    recorded = Recorded(tmp_path)
    with recorded(monkeypatch):
        make(tmp_path / "a/b/file.ckpt", durable=False)
    assert [call.kind for call in recorded.calls] == ["mkdir", "mkdir"]


def test_directory_made_by_another_process_meanwhile_is_used(tmp_path, monkeypatch):
    mkdir = os.mkdir

    def late(path: str) -> None:
        mkdir(path)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "mkdir", late)
        make(tmp_path / "a/b/file.ckpt")
    assert (tmp_path / "a/b").is_dir()


def test_file_in_place_of_a_directory_is_named(tmp_path, monkeypatch):
    (tmp_path / "a").touch()
    with pytest.raises(SaveError) as caught:
        make(tmp_path / "a/b/file.ckpt")
    assert (caught.value.errno, caught.value.phase) == (errno.ENOTDIR, "open")
    assert (tmp_path / "a").is_file()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EBADF])
def test_a_directory_that_cannot_be_synced_is_an_error_of_the_save(tmp_path, monkeypatch, number):
    before = descriptors()
    monkeypatch.setattr(os, "fsync", failing(number))
    with pytest.raises(SaveError) as caught:
        make(tmp_path / "a/file.ckpt")
    assert (caught.value.errno, caught.value.phase) == (number, "open")
    assert descriptors() == before


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_directories_are_made_on_a_file_system_without_directory_sync(
    tmp_path, monkeypatch, number
):
    before = descriptors()
    monkeypatch.setattr(os, "fsync", failing(number))
    assert make(tmp_path / "a/file.ckpt").name == b"file.ckpt"
    assert descriptors() == before


def test_directory_without_read_permission_is_refused_before_the_save(tmp_path, monkeypatch):
    # Root may read everything, so the answers of both checks are replaced.
    resolve = paths._core.resolve

    def looks_unreadable(text: bytes, follow: bool) -> tuple[bytes, bytes, int, bool, int]:
        parent, name, kind, _, device = resolve(text, follow)
        return parent, name, kind, False, device

    monkeypatch.setattr(paths._core, "resolve", looks_unreadable)
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    with pytest.raises(SaveError, match="cannot be synced without permission") as caught:
        make(tmp_path / "file.ckpt")
    assert (caught.value.errno, caught.value.phase) == (errno.EACCES, "open")
    assert make(tmp_path / "file.ckpt", durable=False).name == b"file.ckpt"


def test_circular_link_is_refused_if_it_is_followed(tmp_path):
    link = tmp_path / "round"
    link.symlink_to("round")
    with pytest.raises(SaveError) as caught:
        paths.target(str(link), follow_link=True, create_parents=False, durable=True)
    assert (caught.value.errno, caught.value.phase) == (errno.ELOOP, "open")
    assert make(link).name == b"round"


def test_directory_whose_remove_is_in_the_log_may_be_saved_over(tmp_path, monkeypatch):
    (tmp_path / "epoch").mkdir()
    with pytest.raises(SaveError):
        make(tmp_path / "epoch")
    monkeypatch.setattr(paths._core, "log_exists", lambda key: 0)
    assert make(tmp_path / "epoch").name == b"epoch"


# ---- links -------------------------------------------------------------------------------------


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Make a directory with two checkpoints, and a link to the older one."""
    for name in ("old.ckpt", "new.ckpt"):
        (tmp_path / name).touch()
    (tmp_path / "last.ckpt").symlink_to("old.ckpt")
    return tmp_path.resolve()


def test_link_is_replaced_atomically(checkpoints, monkeypatch):
    link = str(checkpoints / "last.ckpt")
    recorded = Recorded(checkpoints)
    with recorded(monkeypatch):
        assert rotation.make_link(str(checkpoints / "new.ckpt"), link, durable=True)
    assert {state.get(link) for state in recorded.every_state()} == {"-> old.ckpt", "-> new.ckpt"}
    assert {state.get(link) for state in recorded.states()} == {"-> new.ckpt"}
    assert recorded.synced() == [str(checkpoints)]


def test_link_replaces_a_name_atomically_for_readers(checkpoints, monkeypatch):
    seen = []
    recorded = Recorded(checkpoints)
    with recorded(monkeypatch):
        rotation.make_link(
            str(checkpoints / "new.ckpt"), str(checkpoints / "last.ckpt"), durable=True
        )
        seen = [call.kind for call in recorded.calls]
    assert seen[-2:] == ["replace", "sync"] and "symlink" in seen
    assert sorted(os.listdir(checkpoints)) == ["last.ckpt", "new.ckpt", "old.ckpt"]


def test_link_with_durable_false_syncs_nothing(checkpoints, monkeypatch):
    recorded = Recorded(checkpoints)
    with recorded(monkeypatch):
        rotation.make_link(
            str(checkpoints / "new.ckpt"), str(checkpoints / "last.ckpt"), durable=False
        )
    assert recorded.synced() == []


def test_leftover_link_of_a_dead_process_is_replaced(checkpoints):
    (checkpoints / ".last.ckpt.stillframe-link").symlink_to("elsewhere")
    rotation.make_link(str(checkpoints / "new.ckpt"), str(checkpoints / "last.ckpt"), durable=True)
    assert os.readlink(checkpoints / "last.ckpt") == "new.ckpt"
    assert sorted(os.listdir(checkpoints)) == ["last.ckpt", "new.ckpt", "old.ckpt"]


def test_a_link_in_the_working_directory_is_made_and_synced(checkpoints, monkeypatch):
    monkeypatch.chdir(checkpoints)
    recorded = Recorded(checkpoints)
    with recorded(monkeypatch):
        assert rotation.make_link("new.ckpt", "last.ckpt", durable=True)
    assert recorded.synced() == [str(checkpoints)]
    assert os.readlink("last.ckpt") == "new.ckpt"


def test_a_link_whose_directory_cannot_be_synced_is_an_error(checkpoints, monkeypatch):
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(SaveError) as caught:
        rotation.make_link(
            str(checkpoints / "new.ckpt"), str(checkpoints / "last.ckpt"), durable=True
        )
    assert (caught.value.errno, caught.value.phase) == (errno.EIO, "link")


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.ENOSYS])
def test_file_system_without_links_gets_a_copy(checkpoints, monkeypatch, number):
    def no_links(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    (checkpoints / "new.ckpt").write_bytes(b"new")
    monkeypatch.setattr(os, "symlink", no_links)
    recorded = Recorded(checkpoints)
    with recorded(monkeypatch):
        assert rotation.make_link(
            str(checkpoints / "new.ckpt"), str(checkpoints / "last.ckpt"), durable=True
        )
    calls = [(call.kind, call.directory) for call in recorded.calls]
    copy = str(checkpoints / ".last.ckpt.stillframe-link")  # the copy, before it gets the name
    assert calls == [("sync", copy), ("replace", str(checkpoints)), ("sync", str(checkpoints))]
    assert not (checkpoints / "last.ckpt").is_symlink()
    assert (checkpoints / "last.ckpt").read_bytes() == b"new"


def test_failed_link_is_reported_and_the_old_one_stays(checkpoints, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "symlink", full)
    with pytest.raises(SaveError) as caught:
        rotation.make_link(
            str(checkpoints / "new.ckpt"), str(checkpoints / "last.ckpt"), durable=True
        )
    assert (caught.value.errno, caught.value.phase) == (errno.ENOSPC, "link")
    assert os.readlink(checkpoints / "last.ckpt") == "old.ckpt"


def test_link_to_a_missing_target_is_refused(checkpoints):
    link = checkpoints / "last.ckpt"
    assert not rotation.make_link(str(checkpoints / "gone.ckpt"), str(link), durable=True)
    assert os.readlink(link) == "old.ckpt"


def test_remove_deletes_the_link_and_not_its_directory(tmp_path):
    (tmp_path / "epoch").mkdir()
    (tmp_path / "epoch/shard").touch()
    (tmp_path / "last").symlink_to("epoch")
    rotation.remove_tree(str(tmp_path / "last"))
    rotation.remove_tree(str(tmp_path / "nothing"))
    assert (tmp_path / "epoch/shard").exists() and not (tmp_path / "last").is_symlink()
    rotation.remove_tree(str(tmp_path / "epoch"))
    assert not (tmp_path / "epoch").exists()
