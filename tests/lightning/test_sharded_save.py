"""A sharded save as its handle shows it, on one rank. test_sharded.py has two, and Trainers."""

import errno
import os
import threading

import pytest
import stillframe
import torch
import torch.distributed as dist
from stillframe._lightning.sharded_save import Parts, ShardedSave, submit
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

    def begun():
        parts = Parts({"w": torch.zeros(50_000)}, {"epoch": 3}, rank=0)
        path = str(tmp_path / "c")
        return submit(parts, path, SaveOptions(), engine=engine, when_busy="wait")

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
