"""Uploads that follow saves: what goes up, in which order, and what waits for it."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import threading
from pathlib import Path

import pytest
import stillframe
from fix_mirror import StubFileSystem, drop, entries, has_entries, leave, put, state, uploaded
from fix_waits import eventually
from stillframe._base import paths
from stillframe._base.file_kinds import MARKER
from stillframe._base.threads import thread_refused_error
from stillframe._remote import journal, mirror, sending, stores
from stillframe._remote.backlog import backlog
from stillframe._save import ordered
from stillframe.testing import fault, held


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return an empty directory for checkpoints."""
    (tmp_path / "ckpt").mkdir()
    return tmp_path / "ckpt"


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---- what goes up ----


def test_mirror_may_be_a_whole_bucket(run, memory_files):
    stillframe.save(state(1), run / "a.pt", mirror="memory://")
    uploaded()
    assert memory_files.cat("/a.pt") == (run / "a.pt").read_bytes()


@pytest.mark.parametrize("slash", ["/", ""])
def test_saved_file_is_uploaded_under_its_name(store, run, slash):
    stillframe.save(state(1), run / "a.pt", mirror=store.url.rstrip("/") + slash)
    stillframe.async_save(state(2), run / "b.safetensors", mirror=store.url.rstrip("/") + slash)
    uploaded()
    assert store.names() == {"a.pt", "b.safetensors"}
    assert all(store.read(name) == (run / name).read_bytes() for name in store.names())
    assert sorted(os.listdir(run)) == ["a.pt", "b.safetensors"]


def test_save_is_durable_and_returns_while_the_store_does_not_answer(store, run):
    with store.held():
        report = stillframe.save(state(1), run / "a.pt", mirror=store.url)
        assert report.path == str(run / "a.pt")
        store.wait_for("begin", "a.pt")
        assert store.names() == set() and has_entries(run, "due")
        stillframe.wait_all()  # does not wait for uploads
        with pytest.raises(TimeoutError, match="1 upload to stub"):
            stillframe.wait_all(timeout=0.01, mirrors=True)
    uploaded()
    assert store.names() == {"a.pt"}


def test_file_that_a_link_leads_to_is_uploaded_under_its_own_name(store, run):
    (run / "real").mkdir()
    (run / "real/a.pt").touch()
    (run / "link.pt").symlink_to(run / "real/a.pt")
    stillframe.save(state(1), run / "link.pt", mirror=store.url)
    uploaded()
    assert store.names() == {"a.pt"} and not (run / "real" / journal.NAME).exists()


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ({"mirror": "backup/run"}, ValueError, "'s3://bucket/run/', not 'backup/run'"),
        ({"mirror": Path("backup")}, TypeError, "has to be a URL"),
        ({"mirror": "stub://disk/x", "storage_options": "key"}, TypeError, "has to be a dict"),
        ({"mirror": "nosuchstore://x/"}, ValueError, "nosuchstore"),
    ],
)
def test_mirror_that_makes_no_sense_is_refused_in_the_call(run, arguments, error, words):
    for save in (stillframe.save, stillframe.async_save):
        with pytest.raises(error, match=words):
            save(state(1), run / "a.pt", **arguments)
        with pytest.raises(ValueError, match="mirror= is for local paths"):
            save(state(1), "memory://run/a.pt", mirror="memory://run/b/")
    assert os.listdir(run) == []


@pytest.mark.parametrize("end", ["failed", "cancelled"])
def test_failed_or_cancelled_save_is_not_uploaded(store, run, end):
    stillframe.save(state(0), run / "a.pt")
    if end == "failed":
        with fault("rename"):
            handle = stillframe.async_save(state(1), run / "a.pt", mirror=store.url)
            assert isinstance(handle.exception(), stillframe.SaveError)
    else:
        with held("fdatasync"):
            handle = stillframe.async_save(state(1), run / "a.pt", mirror=store.url)
            assert entries(run) == ["save"]
            assert handle.cancel()
        stillframe.wait_all()
    uploaded()
    assert store.puts("begin") == [] and os.listdir(run) == ["a.pt"]


@pytest.mark.parametrize("when_busy", ["skip", "raise"])
def test_skipped_or_refused_save_leaves_no_journal_entry(store, run, when_busy):
    with stillframe.Engine(max_in_flight=1, when_busy=when_busy) as engine, held("fdatasync"):
        stillframe.async_save(state(1), run / "a.pt", engine=engine)
        if when_busy == "skip":
            again = stillframe.async_save(state(2), run / "b.pt", mirror=store.url, engine=engine)
            assert again.state == "skipped"
        else:
            with pytest.raises(stillframe.BusyError):
                stillframe.async_save(state(2), run / "b.pt", mirror=store.url, engine=engine)
        assert entries(run) == []


def test_interrupted_call_leaves_no_journal_entry(store, run, monkeypatch):
    def add(*args, add=journal.add):
        add(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(journal, "add", add)
    with pytest.raises(KeyboardInterrupt):
        stillframe.async_save(state(1), run / "a.pt", mirror=store.url)
    assert entries(run) == []
    uploaded()
    assert os.listdir(run) == []


# ---- the order ----


def test_uploads_keep_the_order_of_the_saves(store, run):
    names = [f"{n}.pt" for n in (3, 1, 2, 0)]
    with store.held():
        for name in names:
            stillframe.async_save(state(1), run / name, mirror=store.url)
        stillframe.wait_all()
        store.wait_for("begin", names[0])
        assert store.puts("begin") == names[:1]  # one at a time
        assert has_entries(run, *["due"] * 4)
    uploaded()
    assert store.puts("begin") == store.puts() == names


def test_only_the_newest_of_replaced_files_is_uploaded(store, run):
    with store.held():
        stillframe.save(state(0), run / "first.pt", mirror=store.url)
        store.wait_for("begin", "first.pt")
        for n in range(3):
            stillframe.save(state(n), run / "last.pt", mirror=store.url)
            stillframe.save(state(n), run / f"{n}.pt", mirror=store.url)
    uploaded()
    assert store.puts() == ["first.pt", "0.pt", "1.pt", "last.pt", "2.pt"]
    assert store.read("last.pt") == (run / "last.pt").read_bytes()


def test_file_replaced_during_its_upload_is_uploaded_whole_before_the_new_one(store, run):
    large = state(1, 3 * sending._PIECE // 4)  # in three pieces
    versions = []
    with store.held():
        stillframe.save(large, run / "a.pt", mirror=store.url)
        versions.append(digest(run / "a.pt"))
        store.wait_for("begin", "a.pt")
        stillframe.save(state(2), run / "a.pt", mirror=store.url)
        versions.append(digest(run / "a.pt"))
    uploaded()
    assert store.puts() == ["a.pt", "a.pt"] and store.puts("content") == versions


def test_prefix_that_fails_does_not_delay_another(store, run):
    (run / "blocked").touch()  # a file where the store would make a directory
    stillframe.save(state(1), run / "a.pt", mirror=f"stub://disk{run}/blocked/")
    stillframe.save(state(1), run / "b.pt", mirror=store.url)
    store.wait_for("end", "b.pt")
    assert has_entries(run, "due")
    (run / "blocked").unlink()
    uploaded()
    assert (run / "blocked/a.pt").read_bytes() == (run / "a.pt").read_bytes()


# ---- a store that is down ----


def test_store_that_is_down_gives_one_warning_and_its_uploads_wait(store, run, caplog):
    caplog.set_level(logging.INFO, logger="stillframe")
    with store.down():
        for n in range(3):
            stillframe.save(state(n), run / f"{n}.pt", mirror=store.url)
        assert eventually(lambda: "try 4 to upload" in caplog.text)
        left = backlog(str(run))
        assert left.uploads == 3 and left.prefixes == [store.url]
        assert left.nbytes == sum((run / f"{n}.pt").stat().st_size for n in range(3))
        assert len(warnings_in(caplog)) == 1
        assert "0.pt waits to be uploaded: " in warnings_in(caplog)[0]
        assert "the store is down" in warnings_in(caplog)[0]
    uploaded()
    assert store.puts() == ["0.pt", "1.pt", "2.pt"]
    assert len(warnings_in(caplog)) == 1 and "go on" in caplog.text
    assert backlog(str(run)) is None
    with store.down():
        stillframe.save(state(3), run / "3.pt", mirror=store.url)
        assert eventually(
            lambda: len(warnings_in(caplog)) == 2
        )  # it warns again when the store is down again


def test_save_succeeds_although_its_mirror_cannot_be_opened(store, run, caplog, monkeypatch):
    def connect(self, *args, **options):
        assert threading.current_thread().name == "sf-mirror"
        if (store.control / "down").exists():
            raise ConnectionError("no route to the store")
        inner(self, *args, **options)

    inner = StubFileSystem.__init__
    monkeypatch.setattr(StubFileSystem, "__init__", connect)
    monkeypatch.setattr(stores, "_kept", [])
    with store.down():
        stillframe.save(state(1), run / "a.pt", mirror=store.url)
        assert eventually(lambda: "no route to the store" in caplog.text)
        assert has_entries(run, "due")
    uploaded()
    assert store.names() == {"a.pt"}


def test_upload_waits_for_a_thread_that_the_system_refuses(store, run, caplog, monkeypatch):
    def refuse(thread):
        raise thread_refused_error()

    monkeypatch.setattr(mirror, "uploader", mirror._Uploader())
    with monkeypatch.context() as patches:
        patches.setattr(mirror.threads, "start", refuse)
        handle = stillframe.async_save(state(1), run / "a.pt", mirror=store.url)
        handle.result()
        assert "uploads wait for a thread" in caplog.text
        with pytest.raises(TimeoutError, match="not uploaded yet: 1 upload to stub"):
            stillframe.wait_all(mirrors=True)
    uploaded()
    assert store.names() == {"a.pt"}


def test_pauses_between_tries_grow_up_to_a_bound(monkeypatch):
    monkeypatch.setattr(mirror.random, "uniform", lambda low, high: high)
    monkeypatch.setattr(mirror.time, "monotonic", lambda: 0.0)
    uploader = mirror._Uploader()
    entry = journal.Entry("/nowhere", "a.pt", "stub:///", "a.pt")
    pauses = []
    for _ in range(9):
        uploader._failed(entry, OSError("no"))
        pauses.append(uploader._failures["stub:///"].next_try_s)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_file_that_is_gone_is_dropped_with_a_warning(store, run, caplog):
    with store.held():
        stillframe.save(state(1), run / "first.pt", mirror=store.url)
        store.wait_for("begin", "first.pt")
        stillframe.save(state(1), run / "a.pt", mirror=store.url)
        (run / "a.pt").unlink()
    uploaded()
    assert "a.pt is gone, and was not uploaded" in caplog.text
    assert store.names() == {"first.pt"} and entries(run) == []


def test_save_that_was_killed_before_it_made_its_file_is_dropped_silently(store, run, caplog):
    journal.add(journal.Entry(str(run), "a.pt", store.url, "a.pt")).release()
    stillframe.save(state(1), run / "b.pt", mirror=store.url)
    uploaded()
    assert store.puts() == ["b.pt"] and entries(run) == [] and warnings_in(caplog) == []


def test_file_that_becomes_shorter_is_not_uploaded(store, run, caplog):
    (run / "a.bin").write_bytes(bytes(sending._PIECE + 1))
    with store.held():
        put(run / "a.bin", store.url)
        store.wait_for("begin", "a.bin")
        os.truncate(run / "a.bin", 10)
    uploaded()
    assert store.names() == set()
    assert "it became shorter while it was read" in caplog.text
    drop(run)


def test_link_in_the_place_of_a_file_is_not_followed(store, run, caplog):
    (run / "secret").touch()
    (run / "a.pt").symlink_to("secret")
    put(run / "a.pt", store.url)
    uploaded()
    assert store.names() == set() and "a.pt cannot be read to upload it" in caplog.text
    drop(run)


def test_prefix_that_has_failed_is_not_tried_again_at_exit(store, run):
    leave(run, store.url, "a.pt", b"left")
    uploader = mirror._Uploader()
    uploader._directories[str(run)] = None
    uploader._failures[store.url] = mirror._Failures(1, 0.0)
    uploader._ending = True
    assert uploader._next() != 0.0 and store.puts("begin") == []
    uploader._ending = False
    assert uploader._next() == 0.0 and store.puts() == ["a.pt"]


def test_file_that_cannot_be_read_delays_no_other(store, run, caplog, monkeypatch):
    def refuse(store, key, path, check):
        if path.endswith("a.pt"):
            raise sending.LocalReadError from OSError(errno.EIO, os.strerror(errno.EIO))
        return send(store, key, path, check)

    send = sending.send_file
    monkeypatch.setattr(sending, "send_file", refuse)
    stillframe.save(state(1), run / "a.pt", mirror=store.url)
    stillframe.save(state(1), run / "b.pt", mirror=store.url)
    uploaded()
    assert store.names() == {"b.pt"} and entries(run) == ["due"]
    assert warnings_in(caplog) == [
        f"stillframe: {run}/a.pt cannot be read to upload it: [Errno 5] Input/output error"
    ]
    drop(run)


# ---- removes ----


def test_remove_waits_for_the_upload(store, run, caplog):
    caplog.set_level(logging.INFO, logger="stillframe")
    with store.held():
        stillframe.save(state(1), run / "a.pt", mirror=store.url)
        store.wait_for("begin", "a.pt")
        stillframe.remove(run / "a.pt")
        assert f"{run}/a.pt is removed when it is uploaded" in caplog.text
        stillframe.wait_all()
        assert (run / "a.pt").exists() and not stillframe.exists(run / "a.pt")
    uploaded()
    assert os.listdir(run) == [] and store.names() == {"a.pt"}


def test_remove_waits_for_a_save_under_way_and_its_upload(store, run):
    with held("fdatasync"):
        stillframe.async_save(state(1), run / "a.pt", mirror=store.url)
        stillframe.remove(run / "a.pt")
    uploaded()
    assert os.listdir(run) == [] and store.names() == {"a.pt"}


def test_remove_with_wait_for_mirror_false_does_not_wait(store, run, caplog):
    with store.held():
        stillframe.save(state(1), run / "first.pt", mirror=store.url)
        store.wait_for("begin", "first.pt")
        stillframe.save(state(1), run / "a.pt", mirror=store.url)
        stillframe.remove(run / "a.pt")
        stillframe.remove(run / "a.pt", wait_for_mirror=False)
        stillframe.wait_all()
        assert not (run / "a.pt").exists()
        (run / "a.pt").touch()
        assert stillframe.exists(run / "a.pt")  # the first remove no longer waits
        (run / "a.pt").unlink()
    uploaded()
    assert store.names() == {"first.pt"} and "a.pt is gone" in caplog.text


def test_remove_of_a_directory_waits_for_uploads_from_it(store, run):
    (run / "deep/er").mkdir(parents=True)
    with store.held():
        stillframe.save(state(1), run / "deep/er/a.pt", mirror=store.url)
        stillframe.remove(run / "deep")
        stillframe.wait_all()
        assert (run / "deep/er/a.pt").exists()
    uploaded()
    assert os.listdir(run) == [] and store.names() == {"a.pt"}


def test_remove_reads_no_journal_entry_again(store, run, monkeypatch):
    """Else its call takes long while hundreds of uploads wait."""
    read, inner = [], journal._read

    def noted(directory, file):
        read.append(file)
        return inner(directory, file)

    with store.held():
        for n in range(20):
            stillframe.save(state(n), run / f"{n}.pt", mirror=store.url)
        store.wait_for("begin", "0.pt")
        stillframe.remove(run / "nothing")
        monkeypatch.setattr(journal, "_read", noted)
        for n in range(10):
            stillframe.remove(run / f"{n}.pt")
        leave(run, store.url, "other.pt", b"of another process")
        stillframe.remove(run / "other.pt")
        assert len(read) == 1
        stillframe.wait_all()
        assert {f"{n}.pt" for n in range(10)} | {"other.pt"} <= {*os.listdir(run)}
    uploaded()
    assert sorted(os.listdir(run)) == sorted(f"{n}.pt" for n in range(10, 20))


@pytest.mark.parametrize("removed", ["dir/a.pt", "dir"])
def test_remove_that_waits_leaves_a_later_save_to_its_path(store, run, removed):
    (run / "dir").mkdir()
    with store.held():
        stillframe.save(state(1), run / "dir/a.pt", mirror=store.url)
        stillframe.remove(run / removed)
        assert not stillframe.exists(run / "dir/a.pt")
        stillframe.save(state(2), run / "dir/a.pt")
        assert stillframe.exists(run / "dir/a.pt")
    uploaded()
    assert stillframe.load(run / "dir/a.pt")["w"][0] == 2


def test_remove_of_a_path_without_an_upload_does_not_wait(store, run):
    with store.held():
        stillframe.save(state(1), run / "a.pt", mirror=store.url)
        stillframe.save(state(1), run / "a.pt.old")
        stillframe.remove(run / "a.pt.old")
        stillframe.wait_all()
        assert not (run / "a.pt.old").exists()


# ---- directories ----


def test_checkpoint_is_uploaded_file_by_file_and_its_marker_last(store, run):
    with stillframe.checkpoint(run / "step-1", mirror=store.url) as files:
        files.save(state(1), "model.pt")
        for name in (".metadata", "zzz.json"):
            Path(files.path, name).write_text(name)
        Path(files.path, "deep").mkdir()
        files.save(state(2), "deep/optimizer.pt")
    assert files.handle.result().nbytes
    uploaded()
    names = store.puts()
    assert sorted(names[:-2]) == ["model.pt", "optimizer.pt", "zzz.json"]
    assert names[-2:] == [".metadata", MARKER]
    local = {str(each.relative_to(run)) for each in run.rglob("*") if each.is_file()}
    assert store.names() == local | {f"step-1/{MARKER}"}
    assert all(store.read(name) == (run / name).read_bytes() for name in local)
    marked = json.loads(store.read(f"step-1/{MARKER}"))["files"]
    assert marked == {name[len("step-1/") :]: (run / name).stat().st_size for name in local}


def test_failed_checkpoint_is_not_uploaded(store, run):
    with stillframe.checkpoint(run / "last") as files:
        files.save(state(0), "model.pt")
    with (
        pytest.raises(RuntimeError, match="halfway"),
        stillframe.checkpoint(run / "last", mirror=store.url) as files,
    ):
        files.save(state(1), "model.pt")
        raise RuntimeError("halfway")
    with fault("exchange"):
        with stillframe.checkpoint(run / "last", mirror=store.url) as files:
            files.save(state(1), "model.pt")
        assert isinstance(files.handle.exception(), stillframe.SaveError)
    uploaded()
    assert store.puts("begin") == [] and os.listdir(run) == ["last"]


def test_checkpoint_that_cannot_be_submitted_is_not_uploaded(store, run, monkeypatch):
    def refuse(*args):
        assert entries(run) == ["save"]
        raise KeyboardInterrupt

    (run / "last").mkdir()
    monkeypatch.setattr(ordered, "submit", refuse)
    with (
        pytest.raises(KeyboardInterrupt),
        stillframe.checkpoint(run / "last", mirror=store.url) as files,
    ):
        files.save(state(1), "model.pt")
    uploaded()
    assert store.puts("begin") == [] and os.listdir(run) == ["last"]


def test_replaced_checkpoint_has_no_marker_until_it_is_complete(store, run):
    def save(*names: str) -> None:
        with stillframe.checkpoint(run / "last", mirror=store.url) as files:
            for name in names:
                files.save(state(len(names)), name)
            Path(files.path, ".metadata").touch()
        files.handle.result()

    save("a.pt", "b.pt")
    uploaded()
    with store.held():
        save("b.pt")
        assert eventually(lambda: store.puts("begin").count("b.pt") == 2)
        assert store.names() == {"last/a.pt", "last/b.pt"}
    uploaded()
    assert store.names() == {"last/b.pt", "last/.metadata", f"last/{MARKER}"}
    assert store.read("last/b.pt") == (run / "last/b.pt").read_bytes()


def test_directory_replaced_during_its_upload_is_uploaded_again(store, run):
    def write(value: str) -> None:
        with stillframe.checkpoint(run / "last", mirror=store.url) as files:
            for name in ("a", "b"):
                Path(files.path, name).write_text(value)
        files.handle.result()

    with store.held():
        write("old")
        store.wait_for("begin", "a")
        write("new")
    uploaded()
    assert [store.read(f"last/{name}") for name in ("a", "b")] == [b"new", b"new"]
    assert store.names() == {"last/a", "last/b", f"last/{MARKER}"}
    assert entries(run) == []


def test_directory_that_changes_in_place_is_complete_in_the_store(store, run, caplog):
    (run / "theirs").mkdir()
    for name in ("a", ".metadata"):
        (run / "theirs" / name).write_text(name)
    with store.held():
        put(run / "theirs", store.url)
        store.wait_for("begin", "a")
        (run / "theirs/b").write_text("b")
    uploaded()
    assert store.puts() == ["a", "a", "b", ".metadata", MARKER]
    assert "the directory changed while it was uploaded" in caplog.text
    with store.held():
        put(run / "theirs", store.url)
        assert eventually(lambda: store.puts("begin").count("a") == 3)
        (run / "theirs/.metadata").unlink()
        (run / "theirs/b").unlink()
    uploaded()
    assert store.names() == {"theirs/a", f"theirs/{MARKER}"}


def test_links_and_temporaries_in_a_directory_are_not_uploaded(store, run):
    (run / "theirs").mkdir()
    (run / "theirs/model.bin").write_bytes(b"model")
    (run / "theirs/link").symlink_to("model.bin")
    (run / "theirs/.stillframe-x.tmp").touch()
    (run / "a.bin").write_bytes(b"a")
    put(run / "theirs", store.url)
    put(run / "a.bin", store.url)
    uploaded()
    assert store.names() == {"theirs/model.bin", f"theirs/{MARKER}", "a.bin"}


# ---- the journal ----


class Calls:
    """Counts calls of this thread that reach the disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        thread = threading.get_ident()
        for module, name in [
            *((os, name) for name in ("open", "write", "rename", "mkdir", "unlink", "rmdir")),
            *((os, name) for name in ("fsync", "fdatasync", "listdir", "scandir")),
            (fcntl, "flock"),
        ]:
            inner = getattr(module, name)

            def call(*args, inner=inner, name=name, **kwargs):
                if threading.get_ident() == thread:
                    self.names.append(name)
                return inner(*args, **kwargs)

            monkeypatch.setattr(module, name, call)


def test_call_with_a_mirror_makes_few_system_calls_and_no_sync(store, run, monkeypatch):
    stillframe.save(state(1), run / "first.pt", mirror=store.url)
    uploaded()
    with held("fdatasync"), monkeypatch.context() as patches:
        calls = Calls(patches)
        stillframe.async_save(state(1), run / "a.pt", mirror=store.url)
        assert calls.names == ["open", "mkdir", "open", "flock", "write", "rename"]
        stillframe.async_save(state(1), run / "b.pt", mirror=store.url)
        assert calls.names[6:] == ["open", "flock", "write", "rename"]
    uploaded()


def test_journal_entry_is_on_the_disk_before_the_save_counts_as_durable(store, run, monkeypatch):
    synced = []

    def sync(path, sync=paths.sync_file):
        sync(path)
        synced.append((Path(path).parent.name, (run / "a.pt").exists(), handle._outcome.settled))

    with held("fdatasync"):
        handle = stillframe.async_save(state(1), run / "a.pt", mirror=store.url)
        monkeypatch.setattr(paths, "sync_file", sync)
    with store.held():
        handle.result()
        assert synced[0] == (journal.NAME, True, False)


def test_save_with_durable_false_syncs_no_journal_entry(store, run, monkeypatch):
    monkeypatch.setattr(paths, "sync_file", lambda path: pytest.fail("synced"))
    stillframe.save(state(1), run / "a.pt", durable=False, mirror=store.url)
    uploaded()
    assert store.names() == {"a.pt"}


def test_credentials_are_neither_in_the_journal_nor_in_the_log_of_tries(store, run, caplog):
    caplog.set_level(logging.DEBUG, logger="stillframe")
    with store.down():
        stillframe.save(
            state(1),
            run / "a.pt",
            mirror=store.url.replace("stub://", "stub://name:hunter2@"),
            storage_options={"secret": "hunter2"},
        )
        assert eventually(lambda: "try 3" in caplog.text)
        (file,) = (run / journal.NAME).glob("*.due")
        assert json.loads(file.read_text()) == {
            "path": "a.pt",
            "prefix": store.url,
            "name": "a.pt",
        }
        assert "hunter2" not in caplog.text
    words = f"try 2 to upload {run}/a.pt to {store.url}a.pt failed; the next follows in "
    (line,) = [each for each in caplog.messages if words in each]
    assert "the store is down" in line


def test_uploads_left_by_another_process_use_this_ones_storage_options(store, run, monkeypatch):
    other = store.url.replace("run/", "other/")
    leave(run, store.url, "a.pt", b"left")
    leave(run, other, "b.pt", b"left")
    seen = []

    def open_store(url, options, open_store=mirror.open_store):
        seen.append((url, options))
        return open_store(url, {})

    monkeypatch.setattr(mirror, "open_store", open_store)
    stillframe.save(state(1), run / "c.pt", mirror=store.url, storage_options={"key": "k"})
    uploaded()
    assert {url for url, _ in seen} == {store.url, other}
    assert all(options == {"key": "k"} for _, options in seen)
    assert store.names() == {"a.pt", "c.pt"} and store.puts() == ["a.pt", "b.pt", "c.pt"]


def test_torn_entries_and_foreign_files_in_a_journal_are_ignored(store, run):
    there = run / journal.NAME
    there.mkdir()
    stem = "01234567890123456789-1"
    for suffix, content in {
        "due": "",
        "save": '{"path": "a.pt", "pre',
        "new": '{"path": "a.pt"}',
    }.items():
        (there / f"{stem}.{suffix}").write_text(content)
    for n, path in enumerate(("../a.pt", "..", "", 5)):
        content = {"path": path, "prefix": store.url, "name": "x"}
        (there / f"0123456789012345678{n}-2.due").write_text(json.dumps(content))
    (there / "README").touch()
    stillframe.save(state(1), run / "b.pt", mirror=store.url)
    uploaded()
    assert os.listdir(there) == ["README"] and store.names() == {"b.pt"}


def test_journal_entry_of_a_save_under_way_is_not_taken_for_a_dead_ones(store, run):
    """Should it be nevertheless, as on a file system without locks, it is written again."""
    with held("fdatasync"):
        handle = stillframe.async_save(state(1), run / "a.pt", mirror=store.url)
        (entry,) = journal.entries(str(run))
        assert not entry.is_due() and backlog(str(run)) is None
        entry.remove()
    handle.result()
    assert eventually(lambda: store.names() == {"a.pt"})


def test_journal_entry_that_becomes_due_while_the_journal_is_read_waits_for_the_next_turn(
    run, monkeypatch
):
    """An entry becomes due when its save ends or its process is killed."""
    (run / journal.NAME).mkdir()
    due = iter([True, False, True])
    entry = journal.Entry(str(run), "a.pt", "memory://run/", "a.pt", "00000000000000000001.json")
    monkeypatch.setattr(mirror, "_entries_of", lambda directories: [entry])
    monkeypatch.setattr(journal.Entry, "is_due", lambda self: next(due))
    assert not mirror._Uploader()._upload_oldest_due_from(str(run), [entry], set())


def test_journal_entry_renamed_while_the_journal_is_read_is_found(run, monkeypatch):
    def read(directory, file):
        if not journal_is_read:
            journal_is_read.append(True)
            pending.make_due(durable=False)
        return inner(directory, file)

    journal_is_read, inner = [], journal._read
    pending = journal.add(journal.Entry(str(run), "a.pt", "stub://disk/", "a.pt"))
    monkeypatch.setattr(journal, "_read", read)
    assert entries(run) == ["due"]


def test_lock_of_a_journal_that_was_removed_does_not_count(run, monkeypatch):
    def flock(fd):
        os.rename(run / journal.NAME, run / "removed")  # between the open and the lock
        return inner(fd)

    inner = journal._flock
    leave(run, "stub://disk/", "a.pt", b"left")
    monkeypatch.setattr(journal, "_flock", flock)
    assert journal.lock(str(run)) is None and not journal._locked


def test_journal_entry_that_a_process_is_writing_is_not_removed_as_torn(run):
    (run / journal.NAME).mkdir()
    new = run / journal.NAME / "01234567890123456789-1.new"
    with open(new, "w") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        journal.unlock(str(run), journal.lock(str(run)))
        assert new.exists()
    journal.unlock(str(run), journal.lock(str(run)))
    assert os.listdir(run) == []


def test_added_journal_entry_and_its_directory_are_synced(run, monkeypatch):
    synced = []
    monkeypatch.setattr(paths, "sync_directory", lambda path: synced.append(Path(path)))
    journal.add_due(journal.Entry(str(run), "a.pt", "stub://disk/", "a.pt"), durable=True)
    assert synced == [run, run / journal.NAME]


def test_journal_that_cannot_be_written_does_not_fail_the_save(store, run, caplog):
    (run / journal.NAME).touch()  # in the way
    stillframe.save(state(1), run / "a.pt", mirror=store.url)
    assert "a.pt will not be uploaded: " in caplog.text
    assert stillframe.load(run / "a.pt")["w"][0] == 1


def test_file_is_uploaded_from_a_file_system_without_locks(store, run, monkeypatch):
    def flock(fd, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with held("fdatasync"):
        stillframe.async_save(state(1), run / "a.pt", mirror=store.url)
        (entry,) = journal.entries(str(run))
        assert not entry.is_due()
    uploaded()
    assert store.puts() == ["a.pt"]


def test_mirrors_option_that_is_not_a_bool_is_refused(run):
    with pytest.raises(TypeError):
        stillframe.wait_all(mirrors=None)
    with pytest.raises(TypeError):
        stillframe.remove(run / "a.pt", wait_for_mirror="no")


# ---- a real store ----


@pytest.fixture
def quick(monkeypatch):
    """Try again soon."""
    monkeypatch.setattr(mirror, "_LONGEST_PAUSE_S", 0.02)


def test_mirror_in_s3_keeps_the_old_object_until_the_new_one_is_whole(
    server, small_parts, run, quick, caplog
):
    caplog.set_level(logging.INFO, logger="stillframe")
    stillframe.save(state(1, small_parts), run / "a.pt", mirror=server.url("run/"))
    uploaded()
    old = (run / "a.pt").read_bytes()
    assert server.objects() == {"run/a.pt": old}
    server.refusing = True
    stillframe.save(state(2, small_parts), run / "a.pt", mirror=server.url("run/"))
    assert eventually(lambda: "try 3 to upload" in caplog.text)
    assert server.objects() == {"run/a.pt": old} and len(warnings_in(caplog)) == 1
    server.refusing = False
    uploaded()
    assert server.objects() == {"run/a.pt": (run / "a.pt").read_bytes()}
    assert len(server.lines("POST")) >= 4 and server.unfinished_uploads() == []


def test_latest_and_load_accept_the_checkpoint_in_a_mirror(server, run):
    with stillframe.checkpoint(run / "step-1", mirror=server.url("run/")) as files:
        files.save(state(1), "model.pt")
    uploaded()
    assert stillframe.latest(server.url("run")) == server.url("run/step-1")
    assert stillframe.load(server.url("run/step-1/model.pt"))["w"][0] == 1
