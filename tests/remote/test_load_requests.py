"""The requests of a load of a URL, the memory that it takes, and its end."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections import Counter

import pytest
import stillframe
import torch
from fix_buckets import fetchers
from fix_checkpoints import by_path, legacy, small_state
from fix_waits import eventually
from safetensors.torch import save_file
from stillframe import _core
from stillframe._base import urls
from stillframe._base.calls import stack
from stillframe._remote import file as remote_file
from stillframe._remote.store import Store
from stillframe._save import ordered
from stillframe.errors import ForkError

CHUNK = 64 << 10


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(remote_file, "CHUNK_BYTES", CHUNK)
    _core._set_limits(reader_chunk_bytes=16 << 10)
    yield
    assert eventually(lambda: not fetchers())
    _core._set_limits()


def numbers(count=200_000):
    return {f"w{i}": torch.arange(i, i + count, dtype=torch.float32) for i in range(5)}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


class Watched:
    """Replaces `Store.get`: counts requests, and may stop some of them.

    Attributes:
        starts: The first byte of each request.
        sizes: The bytes that requests asked for.
        most: The most requests at a time.
        memory: The most bytes of the file in memory, as its requests see it.
        stop: Requests that begin in this range wait until `go` is set.
    """

    def __init__(self, monkeypatch):
        self.starts = []
        self.sizes = set()
        self.most = self.memory = 0
        self.stop = range(0)
        self.go = threading.Event()
        self.stopped = threading.Event()
        self._now = 0
        self._get = Store.get
        monkeypatch.setattr(Store, "get", lambda *arguments: self._watch(*arguments))

    def _watch(self, store, key, start, end, version=""):
        self.starts.append(start)
        self.sizes.add(end - start)
        self._now += 1
        self.most = max(self.most, self._now)
        self.memory = max(self.memory, held_bytes())
        if start in self.stop and not self.go.is_set():
            self.stopped.set()
            assert self.go.wait(60)
        try:
            return self._get(store, key, start, end, version)
        finally:
            self._now -= 1


def held_bytes():
    """Return the bytes of files in memory whose bytes are on their way."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            if "stillframe-remote" in os.readlink(f"/proc/self/fd/{fd}"):
                found += os.fstat(int(fd)).st_blocks * 512
        except OSError:
            pass  # closed meanwhile
    return found


@pytest.fixture
def watched(monkeypatch):
    return Watched(monkeypatch)


# ---- requests and memory ---------------------------------------------------------------------


@pytest.mark.parametrize("into", [False, True])
def test_each_range_is_fetched_once_and_memory_stays_within_a_window(
    into, bucket, tmp_path, watched
):
    url = bucket.made_by(by_path, numbers(), tmp_path)
    target = {name: torch.zeros_like(tensor) for name, tensor in numbers().items()}
    assert equal(stillframe.load(url, into=target if into else None), numbers())
    chunks = -(-(tmp_path / "made.pt").stat().st_size // CHUNK)
    assert chunks > 60
    again = {start: times for start, times in Counter(watched.starts).items() if times > 1}
    assert len(watched.starts) - chunks <= 2, again  # a header may cross the end of a chunk
    assert {*watched.starts} == {*range(0, chunks * CHUNK, CHUNK)}
    assert watched.memory <= 24 * CHUNK


@pytest.mark.parametrize("into", [False, True])
def test_files_of_an_index_share_one_window_of_memory(into, memory, tmp_path, watched, monkeypatch):
    monkeypatch.setattr(remote_file, "PEEK_BYTES", 4 << 10)
    names, state = {}, {}
    for i in range(12):
        part = {f"w{i}": torch.arange(i, i + 12 * CHUNK // 8)}
        save_file(part, tmp_path / f"{i}.safetensors")
        memory.upload(tmp_path / f"{i}.safetensors", f"hf/{i}.safetensors")
        names[f"w{i}"] = f"{i}.safetensors"
        state |= part
    text = json.dumps({"weight_map": names}).encode()
    url = memory.put("hf/model.safetensors.index.json", text)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    assert equal(stillframe.load(url, into=target if into else None), state)
    assert watched.memory <= 24 * CHUNK
    assert CHUNK in watched.sizes and 4 << 10 in watched.sizes  # the headers


def test_load_fetches_several_ranges_at_the_same_time(memory, tmp_path, watched):
    url = memory.made_by(by_path, numbers(), tmp_path)
    watched.stop = range(20 * CHUNK, 40 * CHUNK)
    loads = threading.Thread(target=lambda: stillframe.load(url))
    loads.start()
    assert eventually(lambda: watched._now == 8)
    watched.go.set()
    loads.join()
    assert watched.most == 8


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(("write", "mmap"), [(by_path, True), (legacy, False)])
def test_file_that_torch_reads_is_fetched_once(write, mmap, verify, memory, tmp_path, watched):
    url = memory.made_by(write, numbers(), tmp_path)
    assert equal(stillframe.load(url, mmap=mmap, verify=verify), numbers())
    assert len(watched.starts) == len({*watched.starts})


def test_requests_name_the_version_that_the_first_one_found(server, tmp_path):
    by_path(numbers(1000), tmp_path / "x.pt")
    server.put("x.pt", (tmp_path / "x.pt").read_bytes())
    stillframe.load(server.url("x.pt"))
    assert server.lines() == ["HEAD /bkt/x.pt", "GET /bkt/x.pt"]
    headers = {name.lower(): value for name, value in server.requests[1].headers.items()}
    assert headers["if-match"] and re.fullmatch(r"bytes=0-\d+", headers["range"])


def test_bytes_after_the_last_record_are_not_fetched_ahead(memory, tmp_path, watched):
    """Only what the records up to the wanted one need is read ahead."""
    from stillframe._base import records
    from stillframe._remote import disk as disks

    url = memory.made_by(by_path, numbers(), tmp_path)
    disk, path = disks.resolve_disk_and_path(url)
    with disk, disk.open(path) as file:
        core = _core.restore(file.fileno(), True)[1]
        assert core is not None
        records.read(core, ("data.pkl",))
        core.close()
    assert len(watched.starts) == 2  # the beginning and the end


# ---- threads, signals, forks -----------------------------------------------------------------


def test_load_leaves_no_thread_and_no_open_file(bucket, tmp_path):
    url = bucket.made_by(by_path, numbers(), tmp_path)
    stillframe.load(url)
    assert not fetchers() and not held_bytes()
    with pytest.raises(FileNotFoundError):
        stillframe.load(bucket.url("none"))
    bucket.put("x", (tmp_path / "made.pt").read_bytes()[:300_000])
    with pytest.raises(stillframe.CorruptCheckpointError):
        stillframe.load(bucket.url("x"))
    assert not fetchers() and not held_bytes()


@pytest.mark.parametrize("from_byte", [0, CHUNK, 30 * CHUNK])
@pytest.mark.parametrize("how", ["new", "into", "mmap"])
def test_ctrl_c_ends_the_wait_and_leaves_no_thread(how, from_byte, memory, tmp_path, watched):
    url = memory.made_by(by_path, numbers(), tmp_path)
    watched.stop = range(from_byte, from_byte + 9 * CHUNK)
    target = {name: torch.zeros_like(tensor) for name, tensor in numbers().items()}

    def interrupt():
        assert watched.stopped.wait(60)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    interrupts = threading.Thread(target=interrupt)
    interrupts.start()
    with pytest.raises(KeyboardInterrupt):
        stillframe.load(url, into=target if how == "into" else None, mmap=how == "mmap")
    interrupts.join()
    assert fetchers()  # of requests that are not answered
    watched.go.set()
    assert eventually(lambda: not fetchers())
    assert eventually(lambda: not held_bytes())
    assert equal(stillframe.load(url), numbers())


def test_fork_in_the_middle_of_a_load_harms_neither_process(memory, tmp_path):
    url = memory.made_by(by_path, numbers(), tmp_path)
    results = []

    def place(storage, location):
        if not results:
            pid = os.fork()
            if pid == 0:
                os._exit(bytes_are_gone())
            results.append(os.waitpid(pid, 0)[1])
        return storage

    assert equal(stillframe.load(url, place), numbers())
    assert results == [0]


def bytes_are_gone():
    try:
        return int(held_bytes() != 0)
    except BaseException:
        return 2


def test_forked_child_can_load_from_fsspecs_memory(memory, tmp_path):
    url = memory.made_by(by_path, small_state(), tmp_path)
    stillframe.load(url)
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(not torch.equal(stillframe.load(url)["weight"], small_state()["weight"]))
        finally:
            os._exit(3)
    assert os.waitpid(pid, 0)[1] == 0


def test_forked_child_of_a_process_with_a_client_gets_a_fork_error(server, tmp_path):
    by_path(small_state(), tmp_path / "x.pt")
    server.put("x.pt", (tmp_path / "x.pt").read_bytes())
    stillframe.load(server.url("x.pt"))
    pid = os.fork()
    if pid == 0:
        try:
            stillframe.load(server.url("x.pt"))
        except ForkError:
            os._exit(0)
        finally:
            os._exit(3)
    assert os.waitpid(pid, 0)[1] == 0


# ---- order -----------------------------------------------------------------------------------


def submit_save(memory, path, key):
    """Submit a save of an object that ends only when this thread waits for it."""
    caller, name = threading.get_ident(), urls.key(memory.url(key))

    def waits():
        frames = stack(sys._current_frames()[caller])
        calls = [each for each in frames if each.f_code is ordered.wait_for_saves_of_key.__code__]
        return any(name.startswith(each.f_locals["key"]) for each in calls)

    def save(after_good):
        eventually(waits, timeout_s=10)  # or the caller has given up
        memory.upload(path, key)
        return True

    ordered.submit(name, _core.WORK_SAVE, save)


@pytest.mark.parametrize("call", ["load", "latest"])
def test_load_waits_for_saves_of_its_url_submitted_before_it(call, memory, tmp_path):
    by_path(small_state(), tmp_path / "x.pt")
    submit_save(memory, tmp_path / "x.pt", "run/x.pt")
    url = memory.url("run/x.pt") if call == "load" else stillframe.latest(memory.url("run"))
    assert torch.equal(stillframe.load(url)["weight"], small_state()["weight"])


def test_load_of_an_index_waits_for_saves_next_to_it(memory, tmp_path):
    state = {"w": torch.arange(5)}
    save_file(state, tmp_path / "1.safetensors")
    text = b'{"weight_map": {"w": "1.safetensors"}}'
    url = memory.put("hf/model.safetensors.index.json", text)
    submit_save(memory, tmp_path / "1.safetensors", "hf/1.safetensors")
    assert equal(stillframe.load(url), state)
