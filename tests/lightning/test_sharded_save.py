"""A sharded save as its handle shows it, on one rank. test_sharded.py has two, and Trainers."""

import errno
import os
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import stillframe
import torch
import torch.distributed as dist
from stillframe._base.paths import Place
from stillframe._lightning import sharded_save
from stillframe._lightning.sharded_save import Parts, ShardedSave, of_save, submit
from stillframe._save import ordered
from stillframe._save.options import SaveOptions
from stillframe.testing import fault, held

pytestmark = pytest.mark.filterwarnings(r"ignore:::torch\..*")


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def save(engine, tmp_path):
    """`save()` begins one."""

    def begun(engine=engine):
        parts = Parts({"w": torch.zeros(50_000)}, {"epoch": 3}, rank=0)
        place = Place.of(str(tmp_path / "c"))
        return submit(parts, place, SaveOptions(), engine=engine)

    return begun


def test_an_error_that_nobody_has_seen_is_raised_by_wait_all_once(save):
    with fault("pwrite", err=errno.ENOSPC, sticky=True):
        submitted = save()
        with pytest.raises(stillframe.SaveError, match="No space"):
            stillframe.wait_all()
    stillframe.wait_all()
    assert submitted.done()


def test_an_error_is_the_handles_however_late_that_hears_of_it(save, monkeypatch):
    go, end = threading.Event(), ShardedSave.end

    def late(self):
        go.wait(60)
        return end(self)

    monkeypatch.setattr(ShardedSave, "end", late)
    with fault("rename", err=errno.ENOSPC, nth=1):
        first = save()
        second = save()  # waits for the other's end, and does not raise its error
    go.set()
    assert first.exception().errno == errno.ENOSPC
    second.result()
    stillframe.wait_all()


def test_what_wait_all_waits_for_is_named_once(save, tmp_path):
    with held("rename"):
        submitted = save()
        with pytest.raises(TimeoutError) as raised:
            stillframe.wait_all(0.05)
    submitted.result()
    assert str(raised.value).count(f"{tmp_path / 'c'}: ") == 1


def test_what_keeps_a_file_from_making_way_is_the_error(save, tmp_path, monkeypatch):
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


def test_a_call_that_breaks_off_lets_the_save_end(save, monkeypatch):
    begun, saved = [], sharded_save._saved

    def noted(*args):
        begun.append(saved(*args))
        return begun[-1]

    def refuse(*args):
        raise MemoryError("no room in the log")

    with monkeypatch.context() as patch:
        patch.setattr(sharded_save, "_saved", noted)
        patch.setattr(ordered, "submit", refuse)
        with pytest.raises(MemoryError, match="no room"):
            save()
    error = begun[0].upload_completion.exception(timeout=60)
    assert "the call broke off" in str(error)
    save().result()


def test_a_save_that_is_not_to_wait_is_refused_while_one_is_under_way(save, monkeypatch):
    asked, saved = [], sharded_save._saved

    def noted(*args):
        asked.append(args[-1].when_busy)
        assert asked == ["wait", "raise"][: len(asked)]  # or it would wait for ever
        return saved(*args)

    monkeypatch.setattr(sharded_save, "_saved", noted)
    with stillframe.Engine(when_busy="raise") as busy:
        with held("rename"):
            first = save()
            with pytest.raises(stillframe.BusyError):
                save(busy)
        first.result()


def test_a_report_has_the_time_of_the_call(save):
    report = save().result()
    assert 0 < report.blocked_s <= report.durable_after_s


def following(copied):
    """A save whose copy that is."""
    handle = ShardedSave("c", None, 0.0)
    handle.follow(SimpleNamespace(staging_completion=copied, staged_nbytes=3))
    return handle


def test_a_save_is_staged_when_its_copy_is_there():
    copied = Future()
    handle = following(copied)
    with pytest.raises(TimeoutError, match="not staged yet"):
        handle.wait_staged(timeout=0)
    assert not handle.staging_completion.done()
    copied.set_result(None)
    handle.wait_staged(timeout=0)
    handle.staging_completion.result(timeout=60)


def test_a_save_whose_copy_failed_never_is(monkeypatch):
    copied, heard = Future(), []
    handle = following(copied)
    monkeypatch.setattr(type(handle._outcome), "notify_staged", lambda each: heard.append(each))
    copied.set_exception(OSError("torn"))
    assert not heard and not handle._is_staged()
    with pytest.raises(TimeoutError, match="not durable yet"):
        handle.wait_staged(timeout=0)


def test_what_failed_on_several_ranks_is_told_by_rank_and_is_the_firsts():
    class Failed(BaseException):
        def __init__(self):
            full = stillframe.SaveError(errno.ENOSPC, "full", "x", "rename")
            self.failures = {10: (KeyError("b"), None), 2: (full, None)}

    error = of_save(Failed(), "c")
    assert type(error) is stillframe.SaveError
    assert (error.errno, error.filename, error.phase) == (errno.ENOSPC, "c", "rename")
    assert error.strerror == "rank 2: full; rank 10: KeyError('b')"
