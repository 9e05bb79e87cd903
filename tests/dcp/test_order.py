"""The order of `stillframe.dcp` saves among the process's other saves and removes."""

import contextlib
import errno
import gc
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import stillframe
import torch
import torch.distributed.checkpoint as stock
from fix_dcp import loaded
from fix_processes import start_python
from fix_waits import eventually
from stillframe import _core, dcp
from stillframe._base import paths
from stillframe._base.paths import CheckpointPath
from stillframe._dcp import checkpoint
from stillframe._dcp.api import saver_of_this_process
from stillframe._dcp.rounds import SaveRequest
from stillframe._save import completion, ordered
from stillframe._snapshot.save import SnapshotSave
from stillframe.testing import fault, held
from torch.distributed.checkpoint.api import CheckpointException


def state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), value)}


def begin(value: float, path: Path, **options: Any) -> Any:
    return dcp.async_save(state(value), path, no_dist=True, **options).upload_completion


def value_of(path: Path) -> float:
    (value,) = set(loaded(state(0), path)["w"].tolist())
    return float(value)


@contextlib.contextmanager
def held_commits(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hold commits until the block ends; fail if no commit came."""
    go, commit_metadata = threading.Event(), checkpoint.commit_metadata

    def held(*args: Any, **options: Any) -> None:
        assert go.wait(60)
        commit_metadata(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "commit_metadata", held)
        yield go
        go.set()
        stillframe.wait_all()


def test_wait_all_waits_for_a_save_and_says_what_is_under_way(tmp_path, monkeypatch):
    with held_commits(monkeypatch) as go:
        upload = begin(1, tmp_path / "c")
        with pytest.raises(TimeoutError, match=r"1 save or remove has .*c: writing"):
            stillframe.wait_all(0.05)
        assert not upload.done() and not upload.cancel()
        go.set()
        stillframe.wait_all()
        assert upload.done()
    assert value_of(tmp_path / "c") == 1


def test_uncollected_error_is_raised_once_by_wait_all_and_not_by_later_saves(tmp_path):
    with fault("pwrite", err=errno.ENOSPC, sticky=True):
        upload = begin(1, tmp_path / "c")
        with pytest.raises(CheckpointException, match="No space"):
            stillframe.wait_all()
    assert upload.done()
    stillframe.wait_all()
    begin(2, tmp_path / "c")
    stillframe.wait_all()
    assert value_of(tmp_path / "c") == 2


def test_ended_save_has_its_result_and_is_no_longer_tracked(tmp_path):
    begin(1, tmp_path / "c").result()
    good = saver_of_this_process()._last
    with fault("pwrite", err=errno.ENOSPC, sticky=True):
        error = begin(1, tmp_path / "c").exception()
    failed = saver_of_this_process()._last
    # a traceback would reference the state
    assert error is not None and error.__traceback__ is None
    assert good is not None and good.state == "durable"
    assert failed is not None and failed.state == "failed"
    assert not {good, failed} & {*completion.in_flight.values()}


def test_error_raised_by_a_later_call_is_not_reported_again(tmp_path, caplog):
    with fault("pwrite", err=errno.ENOSPC, sticky=True):
        upload = begin(1, tmp_path / "c")
        with pytest.raises(CheckpointException, match="No space"):
            begin(2, tmp_path / "c")
    stillframe.wait_all()
    del upload
    begin(3, tmp_path / "c").result()
    gc.collect()
    assert "nobody asked" not in caplog.text


def test_error_of_a_dropped_response_is_logged(caplog):
    save = SnapshotSave("c", "c", None, entered=0.0, known_as="the path")
    save.end(None, OSError("the disk"))
    del save
    gc.collect()
    assert "the path failed and nobody asked: the disk" in caplog.text
    with pytest.raises(OSError, match="the disk"):
        stillframe.wait_all()


def test_objects_of_an_ended_save_are_freed_by_the_next_call(tmp_path):
    kept = []
    for number in range(3):
        begin(number, tmp_path / "c").result()
        stillframe.wait_all()
        kept.append(len(saver_of_this_process()._discarded))
    assert kept[0] == kept[1] == kept[2] > 0


def test_error_raised_by_a_call_is_not_raised_by_a_later_one(tmp_path):
    path = tmp_path / "c"
    path.mkdir()
    with stillframe.Engine(pool_bytes="64KiB", block_bytes="64KiB") as engine:
        large = {"w": torch.ones(1 << 20)}
        with pytest.raises(stillframe.PoolExhaustedError):
            dcp.async_save(large, path, no_dist=True, engine=engine)
        _ended, under_way = wait(
            [saver_of_this_process()._last.upload_completion], 60
        )  # the call finds no error yet
        assert not under_way
        assert path.is_dir()  # the save has not begun
        begin(2, path, engine=engine).result()
    assert value_of(path) == 2


def test_exists_is_true_for_complete_checkpoints_and_saves_under_way(tmp_path, monkeypatch):
    path = tmp_path / "c"
    assert stillframe.exists(tmp_path)  # there is no checkpoint, and no save in flight
    assert not stillframe.exists(path)
    with held_commits(monkeypatch):
        begin(1, path)
        assert stillframe.exists(path)
        (tmp_path / "link").symlink_to(path)
        assert stillframe.exists(tmp_path / "link")
    assert stillframe.exists(path)
    (path / ".metadata").rename(tmp_path / "kept")
    assert not stillframe.exists(path) and not stillframe.exists(tmp_path / "link")
    (path / "__0.metadata").touch()  # from a rank that saved alone
    assert stillframe.exists(path)
    (tmp_path / "any").mkdir()
    assert stillframe.exists(tmp_path / "any")


def test_save_through_a_link_is_ordered_under_its_target(tmp_path, monkeypatch):
    (tmp_path / "c").mkdir()
    (tmp_path / "c/__0_0.distcp").touch()  # from a save whose process died
    (tmp_path / "link").symlink_to("c")
    assert not stillframe.exists(tmp_path / "c")
    with held_commits(monkeypatch):
        begin(1, tmp_path / "link")
        assert stillframe.exists(tmp_path / "c")
    assert value_of(tmp_path / "c") == 1


def test_exists_is_false_after_a_save_is_known_to_have_failed(tmp_path):
    with fault("fdatasync", sticky=True):
        for _ in range(20):
            upload = begin(1, tmp_path / "c")
            assert upload.exception() is not None
            assert not stillframe.exists(tmp_path / "c")


def test_remove_waits_for_the_save_before_it_and_needs_its_success(tmp_path, monkeypatch, caplog):
    begin(1, tmp_path / "old").result()
    with held_commits(monkeypatch) as go:
        begin(2, tmp_path / "new")
        stillframe.remove(tmp_path / "old")
        assert not stillframe.exists(tmp_path / "old")
        assert value_of(tmp_path / "old") == 1
        go.set()
        stillframe.wait_all()
    assert not (tmp_path / "old").exists()
    with fault("pwrite", sticky=True):
        failed = begin(3, tmp_path / "newer")
        stillframe.remove(tmp_path / "new")
        assert failed.exception() is not None
        stillframe.wait_all()
    assert value_of(tmp_path / "new") == 2
    assert eventually(lambda: "was not removed: the save before it" in caplog.text)


def test_remove_does_not_touch_a_later_save_to_its_path(tmp_path):
    path = tmp_path / "c"
    begin(1, path).result()
    with held("fdatasync", sticky=False):
        stillframe.async_save([1], tmp_path / "file")  # a save that blocks the log
        stillframe.remove(path)
        upload = begin(2, path)
        assert stillframe.exists(path)
        # The save waits for the remove before it writes.
        assert not eventually(lambda: len(list(path.iterdir())) != 2, 0.1)
    upload.result()
    stillframe.wait_all()
    assert value_of(path) == 2
    assert len(list(path.iterdir())) == 2  # nothing of the first save is there


def test_commit_keeps_the_order_of_saves(tmp_path, monkeypatch):
    metadata = tmp_path / "c/.metadata"
    with held_commits(monkeypatch) as go:
        with held("fdatasync", sticky=False) as one:
            first = stillframe.async_save([1], tmp_path / "first")
            assert eventually(lambda: one.hits == 1)  # only the first save's call was made
            upload = begin(2, tmp_path / "c")
            assert eventually(lambda: any((tmp_path / "c").glob("*.distcp")))
            last = stillframe.async_save([3], tmp_path / "last")
            go.set()  # the commit still waits
            assert not eventually(metadata.exists, 0.05)
            go.clear()
        first.result()
        assert not eventually(last.done, 0.05) and not metadata.exists()
        go.set()
        upload.result()
        last.result()


def test_save_of_dcp_completes_while_a_later_save_holds_the_only_slot(tmp_path, monkeypatch):
    write, go = dcp.FileSystemWriter.write_data, threading.Event()
    monkeypatch.setattr(
        dcp.FileSystemWriter, "write_data", lambda *given: go.wait(60) and write(*given)
    )
    with stillframe.Engine(pool_bytes="8MiB", block_bytes="1MiB", max_in_flight=1) as other:
        upload = begin(1, tmp_path / "c", engine=other)
        last = stillframe.async_save([3], tmp_path / "last", engine=other)
        go.set()
        upload.result(60)
        last.result()


def test_external_work_in_the_log_cannot_save_with_dcp(tmp_path):
    seen: list[BaseException] = []

    def work(_: bool) -> bool:
        try:
            begin(1, tmp_path / "c")
        except BaseException as error:
            seen.append(error)
        return True

    ordered.submit(b"/work", _core.WORK_SAVE, work)
    stillframe.wait_all()
    (error,) = seen
    assert isinstance(error, stillframe.StillframeError) and "its own end" in str(error)


@pytest.mark.parametrize("call", ["ours", "pytorchs"])
def test_relative_path_is_resolved_at_the_call(tmp_path, monkeypatch, call):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with held("pwrite"):
        if call == "ours":
            upload = begin(1, Path("c"))
        else:
            # PyTorch may set the path of a writer later, on another thread.
            writer = dcp.FileSystemWriter("c")
            parts = {"async_stager": dcp.PinnedStager(), "storage_writer": writer}
            upload = stock.async_save(state(1), checkpoint_id="c", no_dist=True, **parts)
            upload = upload.upload_completion
        monkeypatch.chdir("elsewhere")
    upload.result()
    assert value_of(tmp_path / "c") == 1
    assert not list((tmp_path / "elsewhere").iterdir())


def test_remote_save_is_ordered_with_others():
    upload = dcp.async_save(state(2), "memory://order/c", no_dist=True).upload_completion
    stillframe.wait_all()
    assert upload.done()


EXIT = """
import atexit, sys, time, torch
import stillframe
from stillframe import dcp
from stillframe._dcp.joint import JointSave
from stillframe.testing import fault, slow

def late():
    dcp.save({"w": torch.ones(5)}, sys.argv[1] + "/late", no_dist=True)

atexit.register(late)  # runs after stillframe's own, which was registered later
slowly = slow("pwrite", 0.3)
slowly.__enter__()
if sys.argv[2] == "fails":
    failing = fault("fdatasync", sticky=True)
    failing.__enter__()
    atexit.unregister(late)
if sys.argv[2] == "planning":  # when the end begins, which `late` would wait with
    atexit.unregister(late)
    prepare = JointSave.prepare
    JointSave.prepare = lambda *given: [time.sleep(0.5), prepare(*given)][1]
dcp.async_save({"w": torch.ones(5)}, sys.argv[1] + "/c", no_dist=True)
"""


def test_save_under_way_at_exit_is_finished_and_its_failure_printed(tmp_path):
    ways = ("well", "planning", "fails")
    running = [
        start_python(
            *("-W", "ignore", "-c", EXIT, tmp_path / way, way), stderr=subprocess.PIPE, text=True
        )
        for way in ways
    ]
    *went_well, fails = (process.communicate(timeout=240)[1] for process in running)
    assert [process.returncode for process in running] == [0, 0, 0]
    for way, says in zip(ways, went_well, strict=False):
        assert "Traceback" not in says
        for path in (tmp_path / way).iterdir():
            assert (loaded({"w": torch.zeros(5)}, path)["w"] == 1).all(), path
    assert {path.name for path in (tmp_path / "well").iterdir()} == {"c", "late"}
    assert {path.name for path in (tmp_path / "planning").iterdir()} == {"c"}
    assert "a save failed" in fails and "CheckpointException" in fails
    assert not stillframe.exists(tmp_path / "fails/c")


def asked_as_by_lightning(**options: Any) -> SaveRequest:
    return SaveRequest(
        group=None,
        planner=None,
        overlap=False,
        durable=True,
        engine=None,
        when_busy="wait",
        follow_link=False,
        **options,
    )


@contextlib.contextmanager
def log_blocked_by(name: Path) -> Iterator[None]:
    """Block all entries of the log that are submitted in the block."""
    go = threading.Event()
    ordered.submit(paths.key(name, follow_link=False), _core.WORK_SAVE, lambda _: go.wait(60))
    yield
    go.set()


def test_save_that_replaces_a_file_waits_for_earlier_entries_before_writing(tmp_path):
    """Until the earlier entries have ended, the file may be the only checkpoint."""
    path = tmp_path / "a"
    path.write_bytes(b"a checkpoint of one file")
    with log_blocked_by(tmp_path / "other"):
        save = saver_of_this_process().save(
            {"w": torch.ones(3)}, CheckpointPath.of(path), asked_as_by_lightning(removes_file=True)
        )
        with pytest.raises(TimeoutError):
            save.result(timeout=0.5)
        assert path.read_bytes() == b"a checkpoint of one file"
    save.result()
    assert stillframe.exists(path) and path.is_dir()


def test_save_into_a_directory_writes_early_and_commits_in_order(tmp_path):
    path = tmp_path / "a"
    with log_blocked_by(tmp_path / "other"):
        save = saver_of_this_process().save(
            {"w": torch.ones(3)}, CheckpointPath.of(path), asked_as_by_lightning(removes_file=True)
        )
        assert eventually(lambda: path.is_dir() and any(path.glob("*.distcp")))
        assert not save.done() and not (path / ".metadata").exists()
    save.result()
    assert stillframe.exists(path)


def test_error_that_its_caller_raises_is_not_raised_by_a_later_save(tmp_path):
    def error_of(error: BaseException, path: str) -> BaseException:
        return stillframe.StillframeError(f"{path}: {type(error).__name__}")

    with fault("pwrite", err=errno.ENOSPC, sticky=True):
        save = saver_of_this_process().save(
            {"w": torch.ones(3)},
            CheckpointPath.of(tmp_path / "a"),
            asked_as_by_lightning(error_of=error_of),
        )
        stillframe._core.log_drain(None)
    begin(2, tmp_path / "a").result()
    with pytest.raises(stillframe.StillframeError, match="CheckpointException"):
        save.result()


def test_failed_save_ends_even_if_its_files_cannot_be_removed(tmp_path, monkeypatch, caplog):
    def broken(_: object) -> None:
        raise OSError(errno.EIO, "no")

    with monkeypatch.context() as patched, fault("pwrite", err=errno.ENOSPC, sticky=True):
        patched.setattr(dcp.FileSystemWriter, "abandon", broken)
        upload = begin(1, tmp_path / "c")
        with pytest.raises(CheckpointException, match="No space"):
            upload.result(60)
    assert "something is left of the failed save of" in caplog.text
    begin(2, tmp_path / "c").result()
    assert value_of(tmp_path / "c") == 2
