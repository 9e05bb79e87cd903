"""The target of a path: one call of C gives the same results as several of Python's functions."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from stillframe import _core
from stillframe._base import paths, urls
from stillframe.testing import fault


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "dir" / "inner").mkdir(parents=True)
    (tmp_path / "file.pt").touch()
    (tmp_path / "dir" / "\udcff.pt").touch()
    (tmp_path / "to-file").symlink_to("file.pt")
    (tmp_path / "to-dir").symlink_to("dir")
    (tmp_path / "to-link").symlink_to("to-file")
    (tmp_path / "dangling").symlink_to("dir/nothing.pt")
    (tmp_path / "round").symlink_to("round")
    (tmp_path / "to-inner").symlink_to(tmp_path / "dir" / "inner" / "..")
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.chdir(tmp_path)
    return tmp_path


SEEN = [
    *("file.pt", "./file.pt", "new.pt", "dir/new.pt", "dir//new.pt", "dir/../new.pt", "to-file"),
    *("to-dir/new.pt", "to-dir", "to-dir/", "dir/", "dir/inner/..", "to-inner/new.pt", "to-inner"),
    *("to-link", "fifo", "dir/\udcff.pt", "to-dir/../file.pt", ".", "..", "dir/.", "/", "//", "/x"),
    *("dir/inner/../../file.pt", "x" * 255),
]
NOT_SEEN = [
    "no/new.pt",
    "file.pt/new.pt",
    "round/new.pt",
    "x" * 256,
    "x" * 3000,
    "no/",
    "y/" * 3000 + "new.pt",
]
LINKS = ["dangling", "round"]


@pytest.mark.parametrize("follow_link", [True, False])
@pytest.mark.parametrize("name", SEEN + LINKS)
@pytest.mark.parametrize("absolute", [True, False])
def test_resolve_agrees_with_pythons_functions(tree, name, follow_link, absolute):
    text = f"{tree}/{name}" if absolute else name
    checkpoint = _core.resolve(os.fsencode(text), follow_link)
    if checkpoint is None:
        assert name in LINKS and follow_link  # messages name these paths as they were given
        return
    parent, last = paths._resolve_parent_and_name(text, follow_link)
    assert checkpoint[:2] == (os.fsencode(parent), os.fsencode(last))
    assert checkpoint[3] == os.access(parent, os.R_OK, effective_ids=True)
    assert checkpoint[4] == os.stat(parent).st_dev
    there = os.path.join(parent, last)
    assert checkpoint[2] == (os.lstat(there).st_mode if os.path.lexists(there) else 0)


@pytest.mark.parametrize("follow_link", [True, False])
@pytest.mark.parametrize("name", NOT_SEEN)
def test_unreadable_path_is_examined_in_python(tree, name, follow_link):
    assert _core.resolve(os.fsencode(name), follow_link) is None


def test_overlong_path_is_examined_in_python():
    assert _core.resolve(b"y/" * 50_000 + b"new.pt", False) is None


@pytest.mark.parametrize("call", ["lstat", "realpath"])
def test_failed_resolve_is_repeated_in_python(tree, call):
    with fault(call, err=errno.EIO, sticky=True):
        assert _core.resolve(b"to-file", True) is None
        target = paths.target("to-file", follow_link=True, create_parents=False, durable=True)
    assert target.name == b"file.pt"
    assert stat.S_ISREG(os.stat(os.path.join(target.directory, target.name)).st_mode)


def test_unreadable_name_is_not_taken_for_a_free_one(tree):
    with fault("lstat", err=errno.EIO, nth=2) as injected:  # the first lstat is of the directory
        assert _core.resolve(b"file.pt", False) is None
    assert injected.hits == 1


@pytest.mark.parametrize("path", ["s3://bucket/c.ckpt", "memory://c", "a+b.c-d://c"])
def test_remote_checkpoint_path_keeps_its_name(path):
    checkpoint = paths.CheckpointPath.of(path)
    assert checkpoint.remote and checkpoint.name == checkpoint.text == path
    assert checkpoint.key() == urls.key(path)


def test_checkpoint_path_is_shown_without_credentials():
    checkpoint = paths.CheckpointPath.of("memory://user:secret@c/a/?sig=secret")
    assert checkpoint.shown == "memory://c/a/"
    assert checkpoint.key() == paths.CheckpointPath.of("memory://c/a").key()


def test_file_url_is_the_local_path_that_it_names(tree):
    checkpoint = paths.CheckpointPath.of(f"file://{tree}/dir/../file.pt")
    assert not checkpoint.remote and checkpoint == paths.CheckpointPath.of(tree / "file.pt")
    assert checkpoint.key() == paths.CheckpointPath.of(tree / "file.pt").key()
    with pytest.raises(ValueError, match="no host"):
        paths.CheckpointPath.of("file://host/a")


def test_local_checkpoint_path_has_one_absolute_name(tree):
    relative, absolute = (
        paths.CheckpointPath.of("dir/../file.pt"),
        paths.CheckpointPath.of(tree / "file.pt"),
    )
    assert not relative.remote and relative == absolute and len({relative, absolute}) == 1
    assert os.fspath(relative) == str(tree / "file.pt")
    assert relative.text == "dir/../file.pt" and relative.key() == absolute.key()


def test_key_of_a_link_is_its_own_or_the_targets(tree):
    link = paths.CheckpointPath.of("to-file")
    assert link.key() != paths.CheckpointPath.of("file.pt").key()
    assert link.key(follow_link=True) == paths.CheckpointPath.of("file.pt").key()


@pytest.mark.parametrize("path", ["dir/a://b", "://b", "1a://b"])
def test_path_with_a_scheme_inside_is_local(tree, path):
    assert not paths.CheckpointPath.of(path).remote


@pytest.mark.parametrize("path", [3, None, ["a"]])
def test_invalid_checkpoint_path_is_refused(path):
    with pytest.raises(TypeError, match=r"has to be a str or os\.PathLike"):
        paths.CheckpointPath.of(path)
