"""The handle of a sharded save, on one rank. test_sharded.py has two ranks and Trainers."""

import errno
import os
import threading
from types import SimpleNamespace

import pytest
import stillframe
import torch
import torch.distributed as dist
from stillframe._base.paths import CheckpointPath
from stillframe._dcp.api import saver_of_this_process
from stillframe._lightning import sharded
from stillframe._lightning.sharded import CheckpointContents, as_exception, submit
from stillframe._save import ordered
from stillframe._save.options import SaveOptions
from stillframe._snapshot.save import SnapshotSave
from stillframe.testing import fault, held

pytestmark = pytest.mark.filterwarnings(r"ignore:::torch\..*")


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def save(engine, tmp_path):
    """Return `save()`, which begins a save."""

    def begun(engine=engine):
        contents = CheckpointContents({"w": torch.zeros(50_000)}, {"epoch": 3}, rank=0)
        target = CheckpointPath.of(str(tmp_path / "c"))
        return submit(contents, target, SaveOptions(), engine=engine)

    return begun


def test_uncollected_error_is_raised_once_by_wait_all(save):
    with fault("pwrite", err=errno.ENOSPC, sticky=True):
        submitted = save()
        with pytest.raises(stillframe.SaveError, match="No space"):
            stillframe.wait_all()
    stillframe.wait_all()
    assert submitted.done()


def test_handle_gets_an_error_that_arrives_late(save, monkeypatch):
    go, end = threading.Event(), SnapshotSave.end

    def late(self, *args, **options):
        assert go.wait(60)
        end(self, *args, **options)

    monkeypatch.setattr(SnapshotSave, "end", late)
    with fault("rename", err=errno.ENOSPC, nth=1):
        first = save()
        threading.Timer(0.1, go.set).start()
        second = save()  # waits for the first save's end, and does not raise its error
    assert first.exception().errno == errno.ENOSPC
    second.result()
    stillframe.wait_all()


def test_wait_all_names_each_save_once(save, tmp_path):
    with held("rename"):
        submitted = save()
        with pytest.raises(TimeoutError) as raised:
            stillframe.wait_all(0.05)
    submitted.result()
    assert str(raised.value).count(f"{tmp_path / 'c'}: ") == 1


def test_error_removing_the_old_file_fails_the_save(save, tmp_path, monkeypatch):
    (tmp_path / "c").write_bytes(b"a checkpoint of one file")
    unlink = os.unlink

    def refuse(path, *args, **options):
        if path == str(tmp_path / "c"):
            raise PermissionError(errno.EPERM, "not today", path)
        unlink(path, *args, **options)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(stillframe.SaveError, match="not today"):
        save().result()
    assert (tmp_path / "c").read_bytes() == b"a checkpoint of one file"


def test_interrupted_call_still_ends_the_save(save, monkeypatch):
    def refuse(*args):
        raise MemoryError("no room in the log")

    with monkeypatch.context() as patch:
        patch.setattr(ordered, "submit", refuse)
        with pytest.raises(MemoryError, match="no room"):
            save()
    error = saver_of_this_process()._last.exception(timeout=60)
    assert "no room in the log" in str(error)  # every rank gets the same text
    save().result()
    stillframe.wait_all()  # the error was raised already, so wait_all raises nothing


def test_save_with_when_busy_raise_is_refused_while_one_is_under_way(save, monkeypatch):
    asked, saved = [], sharded._start

    def noted(*args):
        asked.append(args[-1].when_busy)
        assert asked == ["wait", "raise"][: len(asked)]  # otherwise the save would wait forever
        return saved(*args)

    monkeypatch.setattr(sharded, "_start", noted)
    with stillframe.Engine(when_busy="raise") as busy:
        with held("rename"):
            first = save()
            with pytest.raises(stillframe.BusyError):
                save(busy)
        first.result()


def test_sharded_report_has_the_time_of_the_call(save):
    report = save().result()
    assert 0 < report.blocked_s <= report.durable_after_s


def test_save_is_staged_when_its_copy_is_complete(save):
    handle = save()
    handle.wait_staged(timeout=60)
    handle.staging_completion.result(timeout=60)
    handle.result()


class Copying:
    """A snapshot whose copy ends when the test says so."""

    nbytes, num_tensors, deferred_nbytes = 12, 1, 0

    def __init__(self):
        self._copy = SimpleNamespace(error=None, core=SimpleNamespace(wait=lambda _: (False, -1)))

    def end(self, error=None):
        self._copy.error = error
        self._copy.core.wait = lambda _: (True, -1)

    def wait(self, timeout):
        if not self._copy.core.wait(0)[0]:
            raise TimeoutError
        if self._copy.error is not None:
            raise self._copy.error


def following(copying):
    """Return a save of that snapshot."""
    handle = SnapshotSave("c", "c", None, entered=0.0)
    handle.set_snapshot(copying)
    return handle


def test_save_still_being_copied_becomes_staged_at_the_copys_end():
    copying = Copying()
    handle = following(copying)
    with pytest.raises(TimeoutError, match="not staged yet"):
        handle.wait_staged(timeout=0)
    staged = handle.staging_completion
    assert not staged.done()
    copying.end()
    handle.record_copied()
    handle.wait_staged(timeout=0)
    staged.result(timeout=0)
    assert not handle.done()


@pytest.mark.parametrize("before", [True, False])
def test_save_whose_copy_failed_is_never_staged(before):
    copying = Copying()
    handle = following(copying)
    staged = handle.staging_completion if before else None
    copying.end(stillframe.TornSnapshotError("torn"))
    handle.record_copied()
    staged = staged or handle.staging_completion
    assert not handle._is_staged()
    with pytest.raises(stillframe.TornSnapshotError):
        staged.result(timeout=0)
    with pytest.raises(TimeoutError, match="not durable yet"):
        handle.wait_staged(timeout=0)


def test_futures_of_saves_written_by_others_cannot_be_cancelled():
    handle = SnapshotSave("c", "c", None, entered=0.0)
    futures = handle.staging_completion, handle.upload_completion
    assert not any(each.cancel() for each in futures)
    handle.end(None, None, value="metadata")
    assert [each.result(timeout=0) for each in futures] == [None, "metadata"]


def test_error_of_several_ranks_lists_ranks_and_has_the_first_ranks_type():
    class Failed(BaseException):
        def __init__(self):
            full = stillframe.SaveError(errno.ENOSPC, "full", "x", "rename")
            self.failures = {10: (KeyError("b"), None), 2: (full, None)}

    error = as_exception(Failed(), "c")
    assert type(error) is stillframe.SaveError
    assert (error.errno, error.filename, error.phase) == (errno.ENOSPC, "c", "rename")
    assert error.strerror == "rank 2: full; rank 10: KeyError('b')"
