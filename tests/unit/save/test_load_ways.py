"""Loads that map the file, loads by several processes, and the progress of a load."""

import os
import signal
import threading
import time
import traceback
from pathlib import Path

import pytest
import stillframe
import torch
import torch.distributed as dist
from fix_checkpoints import flip, legacy, offset_of_storage, pack, same, small_state
from stillframe import CorruptCheckpointError
from stillframe._base import bar
from stillframe._load import load, placement, restore
from stillframe.testing import slow
from torch.utils.serialization import config

NBYTES = 8 << 20


@pytest.fixture
def path(tmp_path):
    torch.save(small_state(), tmp_path / "x.pt")
    return tmp_path / "x.pt"


# ---- mmap=True ----------------------------------------------------------------------


def mapped_files():
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}


@pytest.mark.parametrize("verify", [False, True])
def test_mapped_tensors_equal_the_saved_ones_and_are_in_the_file(verify, path):
    found = stillframe.load(path, mmap=True, verify=verify)
    assert str(path) in mapped_files()
    assert same(found, small_state())


def test_a_mapped_file_may_be_replaced_and_is_not_written_to(tmp_path):
    path = tmp_path / "x.pt"
    torch.save([torch.ones(5000)], path)
    before = path.read_bytes()
    (found,) = stillframe.load(path, mmap=True)
    found += 1
    assert path.read_bytes() == before
    stillframe.save([torch.zeros(5000)], path)
    assert torch.equal(found, torch.full((5000,), 2.0))


def test_mapped_bytes_are_checked_first_unless_verify_is_false(path):
    flip(path, offset_of_storage(path))
    with pytest.raises(CorruptCheckpointError, match="data/0"):
        stillframe.load(path, mmap=True)
    stillframe.load(path, mmap=True, verify=False)


def test_file_that_cannot_be_mapped_raises_with_the_reason(path, tmp_path):
    with pytest.raises(ValueError, match="leave mmap out"):
        stillframe.load(path, mmap=True, into=small_state())
    packed = pack(path, tmp_path / "packed.pt")
    stillframe.load(packed)
    with pytest.raises(ValueError, match="packed it; load it without mmap=True"):
        stillframe.load(packed, mmap=True)
    legacy([torch.ones(3)], tmp_path / "legacy.pt")
    with pytest.raises(RuntimeError, match="mmap"):
        stillframe.load(tmp_path / "legacy.pt", mmap=True)


def test_load_without_mmap_never_maps(path, tmp_path):
    legacy(small_state(), tmp_path / "legacy.pt")
    with config.patch("load.mmap", True):
        for each in (tmp_path / "legacy.pt", pack(path, tmp_path / "packed.pt")):
            assert same(stillframe.load(each), small_state())


def test_damaged_header_that_torch_ignores_is_found(tmp_path):
    torch.save([torch.ones(1 << 20)], tmp_path / "x.pt")
    packed = pack(tmp_path / "x.pt", tmp_path / "packed.pt")
    flip(packed, packed.read_bytes().index(b"data/0"))
    with pytest.raises(CorruptCheckpointError, match="header"):
        stillframe.load(packed, verify=False)


def test_torch_load_error_of_a_damaged_file_is_reported_as_damage(tmp_path, monkeypatch):
    """Without `verify`, headers of long records are checked after the load."""

    def fail_to_load(file, how):
        raise RuntimeError("of torch's own")

    torch.save([torch.ones(1 << 20)], tmp_path / "x.pt")
    packed = pack(tmp_path / "x.pt", tmp_path / "packed.pt")
    monkeypatch.setattr(load, "_torch_load", fail_to_load)
    with pytest.raises(RuntimeError, match="of torch's own"):
        stillframe.load(packed, verify=False)
    flip(packed, packed.read_bytes().index(b"data/0"))
    with pytest.raises(CorruptCheckpointError, match="header") as damaged:
        stillframe.load(packed, verify=False)
    assert "of torch's own" in str(damaged.value.__cause__)


# ---- shared=True --------------------------------------------------------------------


def read_from_disk(load):
    """Return the bytes that a call reads from the disk."""

    def so_far():
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["read_bytes"])

    before = so_far()
    load()
    return so_far() - before


@pytest.mark.product_limits
def test_ranks_that_load_one_file_have_the_disk_read_it_once(tmp_path):
    path = tmp_path / "x.pt"
    torch.save([torch.ones(NBYTES // 4)], path)
    drop_pages(path)
    alone = [read_from_disk(lambda: stillframe.load(path)) for _ in range(2)]
    if alone[0] < NBYTES:
        pytest.skip("this file system does not read past the page cache, or does not count")
    assert alone[1] >= NBYTES  # the first load has left nothing in the page cache
    together = [read_from_disk(lambda: stillframe.load(path, shared=True)) for _ in range(5)]
    assert together[0] >= NBYTES // 2  # readahead has put the rest into the page cache
    assert min(together[1:]) == 0  # a busy machine may evict pages of the program meanwhile


def drop_pages(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def as_rank(rank, path, shared):
    """Load as one of two gloo ranks at the same time; record the bytes read from the disk."""
    torch.set_num_threads(1)  # the parent's threads do not exist here
    store = path.with_name(f"store-{shared}")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    dist.barrier()
    found = []
    nbytes = read_from_disk(lambda: found.extend(stillframe.load(path, shared=shared)))
    assert (found[0][::1000] == 1).all()
    path.with_name(f"{rank}-{shared}").write_text(str(nbytes))
    dist.barrier()  # a rank that exits closes the other's connection


@pytest.mark.product_limits
def test_two_ranks_on_gloo_that_load_at_once_have_the_disk_read_it_once(tmp_path):
    path = tmp_path / "x.pt"
    torch.save([torch.ones(NBYTES // 4)], path)
    read = {}
    for shared in (False, True):
        drop_pages(path)
        ranks = [forked(as_rank, rank, path, shared) for rank in range(2)]
        assert [status_of(rank) for rank in ranks] == [0, 0]
        read[shared] = sum(int((tmp_path / f"{rank}-{shared}").read_text()) for rank in range(2))
    if read[False] < 2 * NBYTES:
        pytest.skip("this file system does not read past the page cache, or does not count")
    assert NBYTES // 2 <= read[True] <= 1.25 * NBYTES


def as_rank_of_five(rank, directory):
    """Load as a rank while others die: the next one during its load, the one after it before."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=5
    )
    # A rank that dies earlier fails the connections of the others.
    (directory / f"connected{rank}").touch()
    while len([*directory.glob("connected*")]) < 5:
        time.sleep(0.01)
    path = directory / f"{rank}.pt"
    if rank == 1:
        restore.Archive.storage = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        stillframe.load(path, shared=True)
    if rank == 2:
        os._exit(3)
    while not (directory / "they are gone").exists():
        time.sleep(0.01)
    if rank == 4:
        with pytest.raises(
            CorruptCheckpointError, match=r"4\.pt cannot be loaded: it is truncated"
        ):
            stillframe.load(path, shared=True)
        return
    assert torch.equal(stillframe.load(path, shared=True)[0], torch.full((100_000 + rank,), rank))


def test_dead_rank_or_another_file_does_not_affect_other_ranks(tmp_path):
    for rank in range(5):
        torch.save([torch.full((100_000 + rank,), rank)], tmp_path / f"{rank}.pt")
    os.truncate(tmp_path / "4.pt", 300_000)
    ranks = [forked(as_rank_of_five, rank, tmp_path) for rank in range(5)]
    assert [status_of(rank) for rank in ranks[1:3]] == [-signal.SIGKILL, 3]
    (tmp_path / "they are gone").touch()
    assert [status_of(ranks[rank]) for rank in (0, 3, 4)] == [0, 0, 0]


def forked(call, *arguments):
    """Fork a process that makes the call; its exit status is 0 if the call returns."""
    pid = os.fork()
    if pid:
        return pid
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(200)
    try:
        call(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def status_of(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# ---- a bar --------------------------------------------------------------------------


class Bars:
    """A stand-in for the progress bar that records its calls."""

    def __init__(self):
        self.shown = []
        self.seen = threading.Event()

    def __enter__(self):
        return self.update

    def __exit__(self, *error):
        pass

    def __call__(self, path, nbytes):
        self.total = nbytes
        return self

    def update(self, done, total):
        assert total == self.total
        self.shown.append(done)
        if done:
            self.seen.set()


@pytest.fixture
def bars(monkeypatch):
    bars = Bars()
    monkeypatch.setattr(bar, "bar", bars)
    monkeypatch.setattr(bar, "_UPDATE_EVERY_S", 0.001)
    return bars


@pytest.mark.product_limits
@pytest.mark.parametrize("into", [False, True])
def test_long_load_shows_progress_on_a_terminal(into, bars, tmp_path, monkeypatch):
    path = tmp_path / "x.pt"
    torch.save([torch.ones(NBYTES // 4)], path)
    monkeypatch.setattr(bar, "_QUIET_S", 0.0)
    target = [torch.zeros(NBYTES // 4)] if into else None
    stillframe.load(path, into=target)
    assert bars.shown == []  # stderr is no terminal

    monkeypatch.setattr(bar, "is_stderr_terminal", lambda: True)
    with slow("pread", 0.02):
        stillframe.load(path, into=target)
    assert bars.total == path.stat().st_size
    assert bars.shown == sorted(bars.shown)
    assert 0 < bars.shown[-1] <= bars.total
    assert "sf-progress" not in {thread.name for thread in threading.enumerate()}


def test_a_short_load_shows_nothing(bars, path, monkeypatch):
    monkeypatch.setattr(bar, "is_stderr_terminal", lambda: True)
    monkeypatch.setattr(bar, "_QUIET_S", 60.0)
    stillframe.load(path)
    assert bars.shown == []


# ---- map_location -------------------------------------------------------------------


def test_tensors_saved_on_a_device_follow_map_location(tmp_path, monkeypatch):
    path = tmp_path / "x.pt"
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        torch.save(small_state(), path)
    for where in ("cpu", torch.device("cpu"), {"cuda:0": "cpu"}, lambda storage, location: storage):
        assert same(stillframe.load(path, where), small_state())
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="Attempting to deserialize object on a CUDA"):
            stillframe.load(path)


# ---- which way a load takes ---------------------------------------------------------


@pytest.mark.parametrize("into", [None, {}])
def test_archive_left_to_torch_is_logged_and_closed(into, path, monkeypatch, caplog, used_restores):
    monkeypatch.setattr(restore, "why_torch_must_read", lambda core, map_location: "of a reason")
    with caplog.at_level("DEBUG", "stillframe"):
        stillframe.load(path, into=into)
    assert "of a reason" in caplog.text
    for core in used_restores:
        with pytest.raises(ValueError, match="closed"):
            core.done()


@pytest.fixture
def used_restores(monkeypatch):
    """Record every restore that a load opens."""
    opened = []
    original = load.Request.open

    def noted(how, fd):
        found, core = original(how, fd)
        opened.append(core)
        return found, core

    monkeypatch.setattr(load.Request, "open", noted)
    return opened


def test_load_that_cannot_plan_its_copies_goes_by_way_of_host_memory(
    path, monkeypatch, caplog, used_restores
):
    monkeypatch.setattr(placement, "may_find_devices", lambda map_location: True)
    monkeypatch.setattr(placement, "_devices", lambda core, map_location: 1 / 0)
    with caplog.at_level("DEBUG", "stillframe"):
        assert same(stillframe.load(path), small_state())
    assert "by way of host memory: no devices were found ahead: ZeroDivisionError" in caplog.text
