"""`last.ckpt` as a link, on file systems without links, and after a crash."""

import errno
import os
import shutil

import pytest
from stillframe._base import paths
from stillframe._lightning import rotation


@pytest.fixture
def ends(tmp_path):
    (tmp_path / "a.ckpt").write_text("a")
    return str(tmp_path / "a.ckpt"), str(tmp_path / "last.ckpt")


@pytest.fixture
def done(monkeypatch):
    """Record the names of synced files and directories, in order."""
    steps = []

    def noted(what, function):
        def call(path, *others):
            steps.append((what, os.path.basename(path)))
            return function(path, *others)

        return call

    for owner, name in ((paths, "sync_file"), (paths, "sync_directory"), (os, "replace")):
        monkeypatch.setattr(owner, name, noted(name, getattr(owner, name)))
    return steps


REPLACED = ("replace", ".last.ckpt.stillframe-link")


@pytest.mark.parametrize("durable", [True, False])
def test_link_is_made_before_its_directory_is_synced(ends, tmp_path, done, durable):
    assert rotation.make_link(*ends, durable=durable)
    assert done == [REPLACED, ("sync_directory", tmp_path.name)][: 1 + durable]
    assert os.readlink(ends[1]) == "a.ckpt"


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.ENOSYS])
@pytest.mark.parametrize("durable", [True, False])
def test_copy_that_replaces_a_link_is_synced_before_its_rename(
    ends, tmp_path, done, monkeypatch, caplog, number, durable
):
    def refuse(*names):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "symlink", refuse)
    assert rotation.make_link(*ends, durable=durable)
    synced = [("sync_file", REPLACED[1]), REPLACED, ("sync_directory", tmp_path.name)]
    assert done == (synced if durable else [REPLACED])
    assert not os.path.islink(ends[1])
    with open(ends[1]) as file:
        assert file.read() == "a"
    assert "has no symbolic links" in caplog.text


def test_leftover_of_a_dead_process_is_replaced(ends, tmp_path):
    os.symlink("gone.ckpt", tmp_path / ".last.ckpt.stillframe-link")
    assert rotation.make_link(*ends, durable=True)
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "last.ckpt"]
    assert os.readlink(ends[1]) == "a.ckpt"


def test_link_is_recognised_by_relative_and_absolute_targets(ends, tmp_path):
    (tmp_path / "links").mkdir()
    link = str(tmp_path / "links" / "last.ckpt")
    for text in ("../a.ckpt", f"../../{tmp_path.name}/a.ckpt", ends[0]):
        os.symlink(text, link)
        assert rotation.points_to(link, ends[0]), text
        assert not rotation.points_to(link, str(tmp_path / "b.ckpt"))
        os.unlink(link)
    shutil.copy(ends[0], link)
    assert not rotation.points_to(link, ends[0])
    assert not rotation.points_to(str(tmp_path / "nothing"), ends[0])
