"""`checkpoint`: several files that become visible as one directory."""

from __future__ import annotations

import errno
import gc
import json
import os
import sys
import threading
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import stillframe
import torch
from fix_directories import NAMES, fill, hidden, state, value_of, write
from fix_waits import eventually
from safetensors.torch import load_file
from stillframe import SaveError, StillframeError
from stillframe._save import completion
from stillframe.testing import fault, held, slow

LONG_S = 60


def one_slot(when_busy: Any = "wait") -> stillframe.Engine:
    return stillframe.Engine(
        pool_bytes="64MiB", block_bytes="1MiB", max_in_flight=1, when_busy=when_busy
    )


# ---- what is there, and when ----


def test_all_files_become_visible_at_once(tmp_path):
    path = tmp_path / "c"
    with held("exchange"), held("rename", nth=4):  # three files, then the directory
        handle = write(path, 1.0)
        assert eventually(lambda: handle.state == "writing")
        assert not path.exists() and hidden(tmp_path)
    report = handle.result(LONG_S)
    assert value_of(path) == 1.0 and not hidden(tmp_path)
    assert handle.state == "durable" and handle.path == str(path)
    assert report.nbytes == sum((path / name).stat().st_size for name in NAMES)
    assert report.num_tensors == 6
    assert handle.progress() == (report.nbytes, report.nbytes)
    assert 0 < report.blocked_s <= report.durable_after_s
    assert report.staged_after_s <= report.durable_after_s


def test_checkpoint_of_several_files_counts_as_one_save(tmp_path):
    with stillframe.Engine(pool_bytes="64MiB", block_bytes="1MiB") as engine:
        with stillframe.checkpoint(tmp_path / "c", engine=engine) as files:
            files.save({"a": torch.ones(5)}, "a.pt")
            files.save({"b": torch.ones(5)}, "b.pt")
            assert engine.stats()["saves_in_flight"] == 1
        files.handle.result(LONG_S)
        stats = engine.stats()
        assert stats["saves_total"] == 1 and stats["saves_in_flight"] == 0


def test_old_directory_is_replaced_by_the_new_one(tmp_path):
    path = tmp_path / "c"
    write(path, 1.0).result(LONG_S)
    (path / "only in the old one").touch()
    was = os.open(path, os.O_RDONLY)
    with held("exchange") as injected:
        handle = write(path, 2.0)
        assert eventually(lambda: injected.calls("exchange") == 1)
        assert (path / "only in the old one").exists()
    handle.result(LONG_S)
    assert value_of(path) == 2.0
    stillframe.wait_all(LONG_S)  # the old one is removed after the report
    assert os.listdir(was) == [] and not hidden(tmp_path)
    os.close(was)


def test_old_directory_is_not_removed_before_the_new_one_is_durable(tmp_path):
    path = tmp_path / "c"
    write(path, 1.0).result(LONG_S)
    (old,) = (os.open(path, os.O_RDONLY),)
    with slow("free", 0) as injected:
        stillframe.wait_all(LONG_S)
        before = injected.calls("fsync")
        with held("unlink", nth=1) as injected:
            handle = write(path, 2.0)
            handle.result(LONG_S)
            assert injected.calls("fsync") > before
            assert sorted(os.listdir(old)) == sorted({name.split("/")[0] for name in NAMES})
    os.close(old)


def test_without_exchange_the_old_directory_is_moved_aside(tmp_path):
    path = tmp_path / "c"
    with fault("exchange", err=errno.EINVAL, sticky=True):
        write(path, 1.0).result(LONG_S)
        write(path, 2.0).result(LONG_S)
        stillframe.wait_all(LONG_S)
    assert value_of(path) == 2.0 and not hidden(tmp_path)


def test_durable_false_syncs_nothing(tmp_path):
    with slow("free", 0) as injected:
        report = write(tmp_path / "c", 1.0, durable=False).result(LONG_S)
        assert injected.calls("fsync") == injected.calls("fdatasync") == 0
    assert value_of(tmp_path / "c") == 1.0 and report.nbytes > 0


def test_every_file_and_directory_is_synced(tmp_path):
    with slow("free", 0) as injected:
        write(tmp_path / "c", 1.0).result(LONG_S)
        # The saves sync their directories; then 5 files, 4 directories and the parent.
        assert injected.calls("fsync") == 3 + 5 + 4 + 1
        assert injected.calls("fdatasync") == 3


def test_name_outside_the_checkpoint_or_used_before_is_refused(tmp_path):
    with stillframe.checkpoint(tmp_path / "c") as files:
        for name in ("", "/a", "..", "../a", "a/../../b", "a/..", "a/", ".", "s3://a", "a\0b"):
            with pytest.raises(ValueError, match=r"."):
                files.save(1, name)
        with pytest.raises(TypeError, match="has to be a str"):
            files.save(1, 5)  # type: ignore[arg-type]
        files.save(1, "./a//b.pt")
        with pytest.raises(ValueError, match="was saved already"):
            files.save(2, "a/b.pt")
        files.save(3, Path("c.pt"))  # type: ignore[arg-type]
    files.handle.result(LONG_S)
    assert stillframe.load(tmp_path / "c/a/b.pt") == 1
    assert stillframe.load(tmp_path / "c/c.pt") == 3


def test_refused_object_leaves_its_name_free(tmp_path):
    with stillframe.checkpoint(tmp_path / "c") as files:
        with pytest.raises(Exception, match="pickle"):
            files.save(threading.Lock(), "a.pt")
        files.save(1, "a.pt")
    files.handle.result(LONG_S)
    assert os.listdir(tmp_path / "c") == ["a.pt"]


def test_large_tensors_are_split_and_the_index_names_them(tmp_path):
    tensors = {f"w{i}": torch.full((1000,), float(i)) for i in range(5)}
    with stillframe.checkpoint(tmp_path / "c") as files:
        files.save_safetensors(tensors, "model.safetensors", max_shard_size=8000)
    files.handle.result(LONG_S)
    index = json.loads((tmp_path / "c/model.safetensors.index.json").read_text())
    assert len({*index["weight_map"].values()}) == 3
    for name, tensor in tensors.items():
        loaded = load_file(tmp_path / "c" / index["weight_map"][name])
        assert torch.equal(loaded[name], tensor)


def test_empty_checkpoint_is_an_empty_directory(tmp_path):
    with stillframe.checkpoint(tmp_path / "c") as files:
        pass
    report = files.handle.result(LONG_S)
    assert (report.nbytes, report.num_tensors) == (0, 0)
    assert os.listdir(tmp_path / "c") == []


def test_link_is_followed_and_trailing_slash_means_the_directory(tmp_path):
    write(tmp_path / "c", 1.0).result(LONG_S)
    (tmp_path / "link").symlink_to("c")
    handle = write(f"{tmp_path}/link/", 2.0)  # type: ignore[arg-type]
    handle.result(LONG_S)
    assert (tmp_path / "link").is_symlink() and value_of(tmp_path / "c") == 2.0


def test_path_of_something_else_than_a_directory_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for path, code in (
        (tmp_path / "file", errno.ENOTDIR),
        (tmp_path / "none/c", errno.ENOENT),
        (f"{tmp_path}/.", errno.EINVAL),
        ("/", errno.EISDIR),
    ):
        with pytest.raises(SaveError) as caught, stillframe.checkpoint(path):
            raise AssertionError("the block began")
        assert (caught.value.errno, caught.value.phase) == (code, "open")
    with pytest.raises(ValueError, match="local path"):
        stillframe.checkpoint(tmp_path / "c", storage_options={"key": "a"})
    assert os.listdir(tmp_path) == ["file"]


def test_checkpoint_fails_if_a_file_has_its_name_at_the_commit(tmp_path):
    path = tmp_path / "c"
    with held("fsync"):
        handle = write(path, 1.0)
        path.touch()
    error = handle.exception(LONG_S)
    assert isinstance(error, SaveError) and error.errno == errno.ENOTDIR
    assert path.is_file() and not hidden(tmp_path)


# ---- failures ----


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_exception_in_the_block_leaves_nothing(tmp_path, kind):
    path = tmp_path / "c"
    write(path, 1.0).result(LONG_S)
    done: list[Any] = []
    with (
        held("fdatasync"),
        pytest.raises(kind),
        stillframe.checkpoint(path, on_durable=lambda *_: done.append(1)) as files,
    ):
        fill(files, 2.0)
        raise kind
    with pytest.raises(CancelledError, match="its block raised"):
        files.handle.result(LONG_S)
    assert files.handle.state == "cancelled" and files.handle.done()
    assert not hidden(tmp_path) and value_of(path) == 1.0
    assert eventually(lambda: not completion.in_flight)
    stillframe.wait_all(LONG_S)  # and raises none of the files' errors
    assert done == [] and value_of(path) == 1.0 and not hidden(tmp_path)


def test_failed_file_fails_the_checkpoint_and_is_named(tmp_path):
    path = tmp_path / "c"
    write(path, 1.0).result(LONG_S)
    with fault("fdatasync", nth=2):
        handle = write(path, 2.0)
        error = handle.exception(LONG_S)
    assert isinstance(error, SaveError) and error.phase == "sync" and error.errno == errno.EIO
    assert os.path.dirname(error.filename).startswith(str(path))
    assert handle.state == "failed" and not hidden(tmp_path) and value_of(path) == 1.0
    stillframe.wait_all(LONG_S)  # the error was collected


def test_checkpoint_fails_if_a_file_of_other_code_cannot_be_synced(tmp_path):
    path = tmp_path / "c"
    for nth in (2, 3):  # the first fsync is the one of `files.save`
        with fault("fsync", nth=nth):
            with stillframe.checkpoint(path) as files:
                files.save(1, "a.pt")
                (Path(files.path) / "b").mkdir()
                (Path(files.path) / "b/other.txt").touch()
            error = files.handle.exception(LONG_S)
        assert isinstance(error, SaveError) and error.phase == "sync"
        assert error.filename == str(path) and "Input/output error" in str(error)
        assert not path.exists() and not hidden(tmp_path)


def test_old_directory_stays_next_to_the_new_one_if_their_parent_cannot_be_synced(tmp_path):
    path = tmp_path / "c"
    write(path, 1.0).result(LONG_S)
    # A save's first 12 syncs are of the files and directories in it, the 13th is of the parent.
    with fault("fsync", nth=13):
        error = write(path, 2.0).exception(LONG_S)
    assert isinstance(error, SaveError) and error.phase == "sync directory"
    assert value_of(path) == 2.0
    (old,) = hidden(tmp_path)
    assert value_of(tmp_path / old) == 1.0
    stillframe.save(1, tmp_path / "other.pt")
    assert not hidden(tmp_path)


def test_uncollected_error_of_a_file_is_raised_once(tmp_path):
    with fault("fdatasync"):
        handle = write(tmp_path / "c", 1.0)
        with pytest.raises(SaveError, match="Input/output"):
            stillframe.wait_all(LONG_S)
    stillframe.wait_all(LONG_S)
    assert handle.state == "failed"


def test_file_that_vanishes_is_no_error(tmp_path):
    with stillframe.checkpoint(tmp_path / "c") as files:
        (Path(files.path) / "a").touch()
        os.symlink("nowhere", Path(files.path) / "link")
        os.mkfifo(Path(files.path) / "pipe")
        files.save(1, "b.pt")
        (Path(files.path) / "a").unlink()
    files.handle.result(LONG_S)
    assert sorted(os.listdir(tmp_path / "c")) == ["b.pt", "link", "pipe"]


def test_save_into_a_directory_that_is_replaced_meanwhile_fails(tmp_path):
    path = tmp_path / "c"
    write(path, 1.0).result(LONG_S)
    with held("exchange") as injected:
        handle = write(path, 2.0)
        assert eventually(lambda: injected.calls("exchange") == 1)
        late = stillframe.async_save(1, path / "late.pt")
        assert eventually(lambda: bool(hidden(path)))  # in the old directory
    handle.result(LONG_S)
    error = late.exception(LONG_S)
    assert isinstance(error, SaveError) and error.phase == "rename"
    stillframe.wait_all(LONG_S)
    assert value_of(path) == 2.0 and not hidden(tmp_path)


# ---- the handle ----


def test_handle_is_not_waited_for_inside_its_block(tmp_path):
    ended: list[Any] = []
    with stillframe.checkpoint(tmp_path / "c") as files:
        handle = files.handle
        assert not handle.done() and handle.state == "staging"
        for wait in (handle.result, handle.exception, handle.wait_staged):
            with pytest.raises(StillframeError, match="after the block"):
                wait()
        other = threading.Thread(target=lambda: ended.append(handle.result(LONG_S)))
        other.start()
        files.save(1, "a.pt")
        stillframe.wait_all(LONG_S)  # nothing of it is in the log
        assert ended == []
    other.join(LONG_S)
    assert ended == [handle.result()]


def test_futures_and_callbacks_end_with_the_checkpoint(tmp_path):
    told: list[Any] = []
    path = tmp_path / "c"
    with held("fdatasync"):
        with stillframe.checkpoint(path, on_durable=lambda *args: told.append(args)) as files:
            staged = files.handle.staging_completion
            files.save(state(1.0), "a.pt")
            files.save(state(1.0), "b.pt")
            assert not staged.done()
        handle = files.handle
        handle.wait_staged(LONG_S)
        staged.result(LONG_S)
        upload = handle.upload_completion
        handle.add_done_callback(lambda each: told.append(each))
        assert not upload.done() and handle.state in ("staged", "writing")
        with pytest.raises(TimeoutError):
            handle.result(0)
    assert upload.result(LONG_S) is handle.result(LONG_S)
    assert eventually(lambda: len(told) == 2)
    assert told == [(path, handle.result()), handle]


def test_cancel_keeps_the_old_directory_until_the_rename(tmp_path):
    path = tmp_path / "c"
    write(path, 1.0).result(LONG_S)
    with held("fdatasync"):
        handle = write(path, 2.0)
        staged = handle.staging_completion
        assert handle.cancel() and handle.cancel()
    with pytest.raises(CancelledError):
        handle.result(LONG_S)
    assert staged.done()
    stillframe.wait_all(LONG_S)
    assert value_of(path) == 1.0 and not hidden(tmp_path) and handle.state == "cancelled"
    with held("exchange") as injected:
        handle = write(path, 3.0)
        assert eventually(lambda: injected.calls("exchange") == 1)
        assert not handle.cancel()
    handle.result(LONG_S)
    assert not handle.cancel() and value_of(path) == 3.0


def test_cancel_inside_the_block_ends_with_nothing(tmp_path):
    with stillframe.checkpoint(tmp_path / "c") as files:
        files.save(1, "a.pt")
        assert files.handle.cancel()
    with pytest.raises(CancelledError):
        files.handle.result(LONG_S)
    assert os.listdir(tmp_path) == []


def test_checkpoint_is_used_once_and_only_in_its_block(tmp_path):
    unused = stillframe.checkpoint(tmp_path / "a")
    for use in (lambda: unused.path, lambda: unused.handle, lambda: unused.save(1, "a")):
        with pytest.raises(StillframeError, match=r"with stillframe\.checkpoint"):
            use()
    with unused:
        pass
    with pytest.raises(StillframeError, match="has ended"):
        unused.save(1, "a.pt")
    with pytest.raises(StillframeError, match="used once"), unused:
        pass
    assert unused.handle.result(LONG_S) is not None


def test_dropped_checkpoint_leaves_nothing(tmp_path):
    files = stillframe.checkpoint(tmp_path / "c", engine=(engine := one_slot()))
    files.__enter__()
    files.save(1, "a.pt")
    assert hidden(tmp_path)
    del files
    gc.collect()
    assert eventually(lambda: not completion.in_flight)
    stillframe.save(1, tmp_path / "b.pt", engine=engine)
    assert os.listdir(tmp_path) == ["b.pt"]


# ---- the order ----


def test_load_of_a_file_waits_for_its_directory(tmp_path):
    path = tmp_path / "c"
    for value in (1.0, 2.0):
        with slow("fsync", 0.02):
            write(path, value)
            assert stillframe.exists(path) and stillframe.exists(path / "optimizer.pt")
            assert stillframe.exists(path / "logs/0/log.txt")
            assert not stillframe.exists(path / "none.pt")
            assert stillframe.load(path / "optimizer.pt")["w"][0] == value
    stillframe.wait_all(LONG_S)


def test_remove_after_a_checkpoint_removes_it(tmp_path):
    path = tmp_path / "c"
    with slow("fsync", 0.02):
        handle = write(path, 1.0)
        stillframe.remove(path)
        assert not stillframe.exists(path) and not stillframe.exists(path / "optimizer.pt")
        again = write(path, 2.0)
        assert stillframe.exists(path / "optimizer.pt")
    assert handle.result(LONG_S) and again.result(LONG_S)
    assert value_of(path) == 2.0


def test_remove_is_dropped_when_the_checkpoint_before_it_failed(tmp_path, caplog):
    write(tmp_path / "old", 1.0).result(LONG_S)
    with fault("fdatasync"):
        handle = write(tmp_path / "new", 2.0)
        stillframe.remove(tmp_path / "old")
        assert handle.exception(LONG_S) is not None
    stillframe.wait_all(LONG_S)
    assert value_of(tmp_path / "old") == 1.0


def test_two_checkpoints_of_one_path_are_committed_in_order(tmp_path):
    path = tmp_path / "c"
    handles = [write(path, float(value)) for value in range(4)]
    assert stillframe.load(path / "optimizer.pt")["w"][0] == 3.0
    assert all(handle.result(LONG_S) for handle in handles)
    stillframe.wait_all(LONG_S)
    assert value_of(path) == 3.0 and not hidden(tmp_path)


def test_rotation_with_one_slot_keeps_the_last(tmp_path):
    with one_slot() as engine:
        for value in range(5):
            write(tmp_path / f"c{value}", float(value), engine=engine)
            if value:
                stillframe.remove(tmp_path / f"c{value - 1}")
    assert os.listdir(tmp_path) == ["c4"] and value_of(tmp_path / "c4") == 4.0


# ---- slots ----


def test_all_files_of_a_checkpoint_are_in_flight_together(tmp_path):
    with one_slot() as engine:
        with held("fdatasync"), stillframe.checkpoint(tmp_path / "c", engine=engine) as files:
            for number in range(10):
                files.save(state(1.0), f"{number}.pt")
        files.handle.result(LONG_S)
        assert len(os.listdir(tmp_path / "c")) == 10


@pytest.mark.parametrize("when_busy", ["raise", "skip"])
def test_whole_checkpoint_takes_one_slot(tmp_path, when_busy):
    with one_slot(when_busy) as engine:
        with held("fsync"):
            first = write(tmp_path / "a", 1.0, engine=engine)
            if when_busy == "raise":
                with pytest.raises(stillframe.BusyError):
                    write(tmp_path / "b", 2.0, engine=engine)
            else:
                second = write(tmp_path / "b", 2.0, engine=engine)
                assert (second.state, second.result()) == ("skipped", None)
                other = stillframe.async_save(1, tmp_path / "c.pt", engine=engine)
                assert other.state == "skipped"
            assert not stillframe.exists(tmp_path / "b")
        first.result(LONG_S)
        stillframe.wait_all(LONG_S)
        assert os.listdir(tmp_path) == ["a"]


def test_other_saves_inside_the_block_do_not_wait_for_its_slot(tmp_path):
    with one_slot() as engine:
        with stillframe.checkpoint(tmp_path / "c", engine=engine) as files:
            files.save(1, "a.pt")
            stillframe.async_save(2, tmp_path / "b.pt", engine=engine).result(LONG_S)
            inner = write(tmp_path / "d", 1.0, engine=engine)
            inner.result(LONG_S)
        files.handle.result(LONG_S)
    assert sorted(os.listdir(tmp_path)) == ["b.pt", "c", "d"]


def test_closing_the_engine_waits_for_the_checkpoint(tmp_path):
    with one_slot() as engine, slow("fsync", 0.02):
        handle = write(tmp_path / "c", 1.0, engine=engine)
        engine.close()
        assert handle.done() and value_of(tmp_path / "c") == 1.0
        with pytest.raises(StillframeError, match="closed"):
            write(tmp_path / "d", 1.0, engine=engine)


def test_engine_closed_inside_the_block_refuses_more_files(tmp_path):
    engine = one_slot()
    with stillframe.checkpoint(tmp_path / "c", engine=engine) as files:
        files.save(1, "a.pt")
        engine.close()
        with pytest.raises(StillframeError, match="closed"):
            files.save(2, "b.pt")
    files.handle.result(LONG_S)
    assert os.listdir(tmp_path / "c") == ["a.pt"]


def test_deferred_files_are_the_state_at_the_call(tmp_path):
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(300)).sum().backward()
        optimizer.step()

    for _ in range(4):
        step()
    with held("lane_copy", sticky=False), stillframe.checkpoint(tmp_path / "c") as files:
        files.save(model.state_dict(), "model.pt")
        files.save(optimizer.state_dict(), "optimizer.pt")
        wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert files.handle._files[0]._verdict.is_needed  # type: ignore[attr-defined]
    step()
    report = files.handle.result(LONG_S)
    assert report.deferred_nbytes > 0
    loaded = stillframe.load(tmp_path / "c/model.pt")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in wanted.items())


def test_done_callback_of_a_checkpoint_may_save_and_wait(tmp_path):
    done = threading.Event()

    def again(handle: Any) -> None:
        write(tmp_path / "d", 2.0).result(LONG_S)
        done.set()

    write(tmp_path / "c", 1.0).add_done_callback(again)
    assert done.wait(LONG_S) and value_of(tmp_path / "d") == 2.0


def test_forked_child_leaves_the_parents_block_alone(tmp_path):
    with stillframe.checkpoint(tmp_path / "c") as files:
        files.save(1, "a.pt")
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with pytest.raises(stillframe.ForkError):
                    files.save(2, "b.pt")
                files.__exit__(RuntimeError, RuntimeError(), None)
                with pytest.raises(stillframe.ForkError):
                    files.__exit__(None, None, None)
                write(tmp_path / "d", 3.0).result(LONG_S)
                stillframe.wait_all(LONG_S)  # also until the lock is removed
                del files
                gc.collect()
                status = 0
            finally:
                sys.stdout.flush()
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert os.path.isdir(files.path)
    files.handle.result(LONG_S)
    assert os.listdir(tmp_path / "c") == ["a.pt"] and value_of(tmp_path / "d") == 3.0
