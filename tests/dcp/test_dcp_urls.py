"""Checkpoints below URLs: saves, their failures and order, and loads. `url_ranks.py` has those of
two ranks."""

import errno
import logging
import os
import pickle
import re
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
import stillframe
import torch
import torch.distributed.checkpoint as stock
from fix_buckets import fetchers
from fix_dcp import Trained, copied, equal, loaded
from fix_processes import run_program, run_python
from fix_ranks import notes_of
from fix_store import Server
from fix_waits import eventually, leased
from stillframe import dcp
from stillframe._base.budget import Budget
from stillframe._dcp import checkpoint, fetch, uploads
from stillframe._dcp.location import Prefix
from stillframe._remote import stores
from stillframe._remote.file import Fetcher
from stillframe._remote.store import Store
from stillframe.dcp import FileSystemWriter, Reader
from stillframe.testing import fault
from test_writer import kinds
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException

URL = "memory://bkt/c"
HERE = Path(__file__).parent


@pytest.fixture
def memory() -> Iterator[Any]:
    """Return fsspec's store in memory, without objects."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield fs
    fs.store.clear()


def names(memory: Any, path: str = "/bkt/c") -> list[str]:
    """Return the names of a checkpoint's objects, with `ID` for the ids of saves."""
    found = [name.removeprefix(f"{path}/") for name in memory.find(path)]
    return sorted(re.sub(r"\.[0-9a-f]{8}\.distcp", ".ID.distcp", name) for name in found)


def state(value: float, count: int = 1) -> dict[str, torch.Tensor]:
    return {f"w{number}": torch.full((1000,), float(value)) for number in range(count)}


def save(value: Any, url: str = URL, **options: Any) -> Any:
    return dcp.save(value, url, no_dist=True, **options)


def write(value: Any, url: str = URL, **options: Any) -> None:
    stock.save(value, storage_writer=FileSystemWriter(url, **options), no_dist=True)


def found(like: Any, url: str = URL, **options: Any) -> Any:
    return loaded(like, None, storage_reader=Reader(url, **options))


# ---- what is saved ----


@pytest.mark.parametrize(
    ("options", "data"),
    [
        ({}, ["__0_0.ID.distcp"]),
        ({"thread_count": 2}, ["__0_0.ID.distcp", "__0_1.ID.distcp"]),
        ({"single_file_per_rank": False}, [f"__0_{n}.ID.distcp" for n in range(len(kinds()) + 2)]),
    ],
)
def test_pytorchs_fsspec_reader_loads_every_kind_of_item(memory, options, data):
    wanted = {**kinds(), "more": torch.ones(50_000), "rest": torch.ones(50_000)}
    write(wanted, **options)
    assert names(memory) == sorted([".metadata", *data])
    got = loaded(wanted, None, storage_reader=FsspecReader(URL))
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert got[name].dtype == value.dtype and got[name].tolist() == value.tolist(), name
        else:
            assert got[name] == value


def test_report_names_the_client_and_the_url(memory):
    report = save(state(1), f"{URL}/")
    assert (report.path, report.io_mode) == (f"{URL}/", "fsspec")
    assert report.nbytes == memory.size(memory.glob("/bkt/c/*.distcp")[0])
    assert save({}, "memory://bkt/empty").io_mode == "fsspec"


def test_saves_of_one_structure_are_planned_once(memory, monkeypatch):
    planned = []
    create = stock.DefaultSavePlanner.create_local_plan

    def noted(planner: Any) -> Any:
        planned.append(planner)
        return create(planner)

    monkeypatch.setattr(stock.DefaultSavePlanner, "create_local_plan", noted)
    for value in range(3):
        save({"of test_saves_of_one_structure_are_planned_once": torch.full((9,), value)})
        assert len(planned) == 1
        (info,) = pickle.loads(memory.cat("/bkt/c/.metadata")).storage_data.values()
        assert memory.exists(f"/bkt/c/{info.relative_path}")


def test_objects_hold_the_state_at_the_call(memory, engine):
    trained = Trained()
    for number in range(3):
        wanted = copied(trained.state())
        call = dcp.async_save(
            trained.state(), f"memory://bkt/{number}", no_dist=True, engine=engine
        )
        trained.step()
        call.upload_completion.result()
        assert equal(found(wanted, f"memory://bkt/{number}"), wanted)
    assert eventually(lambda: leased(engine) == 0)


def test_new_checkpoint_replaces_the_old_one_and_leaves_other_objects(memory):
    memory.pipe("/bkt/c/__0_0.0123abcd.distcp", b"of a save that died")
    others = ["notes.txt", "__0_0.distcp/x", "more/__0_0.0123abcd.distcp"]
    for name in others:
        memory.pipe(f"/bkt/c/{name}", b"")
    for value in range(2):
        save(state(value))
        kept = [*others[:2], "more/__0_0.ID.distcp"]
        assert names(memory) == sorted([".metadata", "__0_0.ID.distcp", *kept])
    assert equal(found(state(0)), state(1))


def test_overwrite_false_refuses_an_existing_checkpoint(memory):
    write(state(1), overwrite=False)
    before = memory.find("/bkt/c")
    with pytest.raises(CheckpointException, match=f"already exists.*{URL}"):
        write(state(2), overwrite=False)
    assert memory.find("/bkt/c") == before


def test_rank_that_saves_alone_writes_metadata_of_its_own(memory):
    stock.save(state(3), storage_writer=FileSystemWriter(URL), no_dist=True, use_collectives=False)
    assert names(memory) == ["__0.metadata", "__0_0.ID.distcp"]
    new = state(0)
    stock.load(new, storage_reader=Reader(URL), no_dist=True)
    assert equal(new, state(3))


def test_checkpoint_may_be_at_the_root_of_a_bucket(server):
    server.put("other", b"")
    save(state(1), "s3://bkt")
    assert {".metadata", "other"} < {*server.objects()}
    assert equal(found(state(0), "s3://bkt/"), state(1))


def test_credentials_in_a_url_are_in_no_object_and_no_report(memory, caplog):
    with caplog.at_level(logging.DEBUG, "stillframe"):
        report = save(state(1), "memory://user:hushhush@bkt/c?sig=hushhush")
    assert report.path == "memory://bkt/c"
    assert not any(b"hushhush" in memory.cat(name) for name in memory.find("/"))
    assert "hushhush" not in caplog.text
    writer = FileSystemWriter("memory://user:hushhush@bkt/c")
    assert writer.checkpoint_id == Reader("memory://user:hushhush@bkt/c").checkpoint_id == URL


def test_storage_options_reach_the_store(server, monkeypatch):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    url, options = server.url("c"), {"storage_options": server.options}
    save(state(1), url, **options)
    dcp.async_save(state(2), url, no_dist=True, **options).upload_completion.result()
    assert equal(found(state(0), url, **options), state(2))
    # DCP's process executor pickles the writer.
    writer = pickle.loads(pickle.dumps(FileSystemWriter(url, **options)))
    stock.save(state(3), storage_writer=writer, no_dist=True)
    assert equal(found(state(0), url, **options), state(3))


@pytest.mark.parametrize(
    "made", [FileSystemWriter, Reader, lambda *given, **options: save({}, *given, **options)]
)
def test_unusable_options_are_refused_at_once(made, tmp_path):
    with pytest.raises(ValueError, match="not for a local path"):
        made(tmp_path, storage_options={"key": "k"})
    with pytest.raises(ValueError, match="no_such_option"):
        made("s3://bkt/c", storage_options={"no_such_option": 1})


# ---- large files, and how they are sent ----


def test_large_file_is_sent_in_parts(server, small_parts, engine):
    wanted = {"a": torch.arange(500_000), "b": torch.ones(3)}
    save(wanted, server.url("c"), engine=engine)
    assert len(server.lines("PUT .*partNumber")) == 4  # of 1 MiB, the least
    assert equal(found(wanted, server.url("c")), wanted)


def test_metadata_is_sent_last_and_old_objects_are_removed_after_it(server):
    save(state(1), server.url("c"))
    server.requests.clear()
    write(state(2, 8), server.url("c"), single_file_per_rank=False)
    puts = server.lines("PUT")
    assert [line for line in puts if ".metadata" in line] == puts[-1:] and len(puts) == 9
    lines = server.lines()
    removing = [at for at, line in enumerate(lines) if re.search("DELETE|POST .*delete", line)]
    assert removing and removing[0] > lines.index(puts[-1])


def test_files_are_sent_without_threads_of_their_own(memory, monkeypatch):
    """At the interpreter's exit no thread can be started."""

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with monkeypatch.context() as patch:
        patch.setattr(uploads.threads, "start", refused)
        write(state(1, 10), single_file_per_rank=False)
    assert equal(found(state(0, 10)), state(1, 10))


# ---- failures ----


def test_store_that_is_down_fails_the_save_and_keeps_the_old_checkpoint(server):
    save(state(1), server.url("c"))
    before = server.objects()
    server.fail(503, match="PUT|POST")
    with pytest.raises(CheckpointException, match=r"s3://bkt/c/__0_0\.\w+\.distcp.*'upload'"):
        save(state(2), server.url("c"))
    assert server.objects() == before and server.unfinished_uploads() == []
    assert equal(found(state(0), server.url("c")), state(1))


def test_failed_part_leaves_no_upload(server, small_parts):
    server.fail(503, match="partNumber=3")
    with pytest.raises(CheckpointException, match="503"):
        save({"a": torch.arange(500_000)}, server.url("c"))
    assert server.objects() == {} and server.unfinished_uploads() == []


def test_failed_upload_is_over_before_its_memory_is_used_again(memory, monkeypatch):
    """After an error the client may still read the memory that it was given for a while."""
    read: list[Any] = []

    def failing(store: Any, key: str, pieces: Any, nbytes: int) -> None:
        read.append(next(pieces))
        pieces.close()
        raise OSError(errno.EIO, "no answer", key)

    monkeypatch.setattr(stores.Store, "put", failing)
    # After this pause the client would get copies, and the save would not wait for it any longer.
    monkeypatch.setattr("stillframe._save.remote._PAUSE_S", 60.0)
    more_than_a_part = {"a": torch.ones(5 << 20)}
    call = dcp.async_save(more_than_a_part, URL, no_dist=True)
    assert eventually(lambda: bool(read))
    assert not eventually(call.upload_completion.done, 0.1)
    read.clear()
    assert "no answer" in str(call.upload_completion.exception(60))


def test_first_error_ends_all_uploads_and_removes_what_was_sent(server, monkeypatch):
    begun = []
    put = stores.Store.put

    def noted(store: Any, key: str, *given: Any) -> None:
        begun.append(key)
        if "__0_2" in key:
            raise PermissionError(errno.EACCES, "not this one", key)
        put(store, key, *given)

    monkeypatch.setattr(stores.Store, "put", noted)
    monkeypatch.setattr(uploads, "_MAX_THREADS", 1)
    with pytest.raises(CheckpointException, match="not this one"):
        write(state(1, 9), server.url("c"), single_file_per_rank=False)
    assert server.objects() == {} and len(begun) < 9


def test_upload_under_way_is_given_up_when_another_fails(memory, monkeypatch):
    sent, failed, ends = threading.Event(), threading.Event(), []
    fail = uploads.Uploads.fail

    def noted(uploads: Any, error: BaseException) -> BaseException:
        first = fail(uploads, error)
        failed.set()
        return first

    def put(store: Any, key: str, pieces: Any, nbytes: int) -> None:
        if "__0_1" in key:
            assert sent.wait(60)
            raise PermissionError(errno.EACCES, "not this one", key)
        next(pieces)
        sent.set()
        assert failed.wait(60)
        try:
            for _ in pieces:
                pass
        except BaseException as error:
            ends.append(type(error))
            raise

    monkeypatch.setattr(uploads.Uploads, "fail", noted)
    monkeypatch.setattr(stores.Store, "put", put)
    with pytest.raises(CheckpointException, match="not this one"):
        write({"a": torch.ones(5 << 20), "b": torch.ones(3)}, single_file_per_rank=False)
    assert ends == [CancelledError]


def test_file_without_memory_for_buffers_fails_with_that_reason(memory, engine):
    """The upload ends as a consequence, and its own error is not the one that is raised."""
    with stillframe.snapshot([torch.zeros(15 << 20)], engine=engine) as snap:
        while engine.stats()["leased_bytes"] < engine.stats()["pool_bytes"]:
            snap.tree.append(stillframe.snapshot([torch.zeros(10)], engine=engine).tree[0])
        with (
            fault("mmap", err=errno.ENOMEM, sticky=True),
            pytest.raises(CheckpointException, match="no memory for a buffer"),
        ):
            write(state(1), engine=engine)
    assert memory.find("/bkt") == []


@pytest.mark.parametrize("call", ["ours", "pytorchs"])
def test_failed_commit_keeps_the_old_checkpoint_and_the_next_save_tidies(server, call, caplog):
    """The store may make the metadata after all, so the files that it names stay."""
    url = server.url("c")
    save(state(1), url)
    server.fail(403, times=1, match="PUT .*metadata")
    with pytest.raises(CheckpointException, match=r"s3://bkt/c/\.metadata"):
        (save if call == "ours" else write)(state(2), url)
    assert len(server.objects()) == 3
    assert equal(found(state(0), url), state(1))
    assert ("files of a failed save stay in s3://bkt/c until" in caplog.text) == (call == "ours")
    save(state(3), url)
    assert len(server.objects()) == 2
    assert equal(found(state(0), url), state(3))


def test_store_that_refuses_removes_fails_no_save(server, caplog):
    save(state(1), server.url("c"))
    server.fail(403, times=1, match="DELETE|POST .*delete")
    save(state(2), server.url("c"))
    assert "s3://bkt/c is not needed and could not be removed" in caplog.text
    server.fail(403, times=1, match="GET .*list-type")
    save(state(3), server.url("c"))
    assert "what s3://bkt/c does not need was not removed" in caplog.text
    assert len(server.objects()) == 4
    assert equal(found(state(0), server.url("c")), state(3))


def test_ranks_files_stay_if_the_metadata_cannot_be_read(server, caplog):
    server.put("c/.metadata", b"no pickle")
    server.put("c/__0_0.0123abcd.distcp", b"")
    checkpoint.remove_failed_save_files(["__0_0.0123abcd.distcp"], Prefix(server.url("c"), None))
    assert len(server.objects()) == 2 and "files of a failed save stay" in caplog.text


# ---- in the order of saves ----


def test_rotation_removes_the_old_checkpoint_only_after_a_durable_one(server):
    one, two = server.url("1"), server.url("2")
    save(state(1), one)
    with server.held("PUT /bkt/2/.metadata") as hold:
        call = dcp.async_save(state(2), two, no_dist=True)
        stillframe.remove(one)
        hold.wait_for()
        assert stillframe.exists(two) and stillframe.exists(f"{two}/")
        assert not stillframe.exists(one)
        assert "1/.metadata" in server.objects()
    call.upload_completion.result()
    stillframe.wait_all()
    assert {key.partition("/")[0] for key in server.objects()} == {"2"}
    server.fail(503, match="PUT")
    call = dcp.async_save(state(3), one, no_dist=True)
    stillframe.remove(two)
    assert isinstance(call.upload_completion.exception(), CheckpointException)
    stillframe.wait_all()
    assert stillframe.exists(two) and not stillframe.exists(one)
    assert equal(found(state(0), two), state(2))


EXIT = """
import sys, torch
from stillframe import dcp
dcp.async_save({"w": torch.ones(5)}, sys.argv[1], no_dist=True)
"""


def test_save_under_way_at_exit_is_finished(server):
    ended = run_python("-W", "ignore", "-c", EXIT, server.url("c"))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert equal(found({"w": torch.zeros(5)}, server.url("c")), {"w": torch.ones(5)})


# ---- loads ----


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("writer", ["ours", "one item a file", "pytorchs"])
def test_reader_loads_what_any_writer_has_saved(memory, writer, verify, monkeypatch):
    monkeypatch.setattr(fetch, "_RANGE_BYTES", 4096)
    monkeypatch.setattr(fetch, "_STRETCH_BYTES", 12_000)
    wanted = {**kinds(), **state(1, 20)}
    if writer == "pytorchs":
        stock.save(wanted, storage_writer=FsspecWriter(URL), no_dist=True)
    else:
        write(wanted, single_file_per_rank=writer == "ours")
    got = found(wanted, verify=verify)
    for name, value in wanted.items():
        assert (
            torch.equal(got[name], value) if isinstance(value, torch.Tensor) else got[name] == value
        )


def test_items_are_fetched_once_and_small_ones_together(server):
    wanted = {**state(1, 50), "large": torch.arange(1 << 19)}
    save(wanted, server.url("c"))
    server.requests.clear()
    assert equal(found(wanted, server.url("c")), wanted)
    assert len(server.lines("GET .*distcp")) == 1


def test_only_the_wanted_items_are_fetched(server):
    save({"large": torch.arange(1 << 19), "small": torch.ones(5)}, server.url("c"))
    server.requests.clear()
    assert equal(found({"small": torch.zeros(5)}, server.url("c")), {"small": torch.ones(5)})
    (get,) = [each for each in server.requests if re.search("GET .*distcp", each.line)]
    first, last = get.headers["range"].removeprefix("bytes=").split("-")
    assert int(last) - int(first) < 10_000


def test_items_that_do_not_fit_into_memory_are_fetched_again(server, monkeypatch):
    monkeypatch.setattr(fetch.budget, "measure", lambda held: Budget(0, 0))
    wanted = state(1, 50)
    save(wanted, server.url("c"))
    server.requests.clear()
    assert equal(found(wanted, server.url("c")), wanted)
    assert len(server.lines("GET .*distcp")) == 2


def test_no_more_is_fetched_ahead_than_is_allowed(memory, monkeypatch):
    asked, asked_at_checks = [], []
    opened, check = Fetcher.open, fetch.damage_of_item

    def noted(fetcher: Fetcher, wanted: Any) -> Any:
        asked.append(wanted)
        return opened(fetcher, wanted)

    def checked(*given: Any) -> Any:
        asked_at_checks.append(len(asked))
        return check(*given)

    monkeypatch.setattr(Fetcher, "open", noted)
    monkeypatch.setattr(fetch, "damage_of_item", checked)
    monkeypatch.setattr(fetch, "_STRETCH_BYTES", 1)
    monkeypatch.setattr(fetch, "_AHEAD_BYTES", 10_000)  # more than two items
    save(state(1, 6))
    assert equal(found(state(0, 6)), state(1, 6))
    assert asked_at_checks == [3, 4, 5, 6, 6, 6]


def test_ranges_of_a_large_item_and_of_several_are_fetched_at_the_same_time(memory, monkeypatch):
    monkeypatch.setattr(fetch, "_RANGE_BYTES", 4096)
    wanted = {"large": torch.arange(30_000), **state(1, 3)}
    write(wanted, single_file_per_rank=False)
    started, go, get = [], threading.Event(), Store.get

    def held(store: Store, key: str, start: int, *rest: Any) -> Any:
        started.append((key, start))
        if key.endswith(".distcp"):
            assert go.wait(60)
        return get(store, key, start, *rest)

    monkeypatch.setattr(Store, "get", held)
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(found, wanted)
        assert eventually(lambda: len([key for key, _ in started if "distcp" in key]) == 8)
        go.set()
        assert equal(load.result(), wanted)
    assert len({*started}) == len(started)


@pytest.mark.parametrize("room", [1 << 30, 0])
def test_load_of_many_files_needs_few_descriptors(memory, monkeypatch, room):
    monkeypatch.setattr(fetch.budget, "measure", lambda held: Budget(room, room))
    wanted = state(1, 200)
    write(wanted, single_file_per_rank=False)
    most, check = [], fetch.damage_of_item

    def checked(*given: Any) -> Any:
        most.append(len(os.listdir("/proc/self/fd")))
        return check(*given)

    monkeypatch.setattr(fetch, "damage_of_item", checked)
    before = len(os.listdir("/proc/self/fd"))
    assert equal(found(state(0, 200)), wanted)
    assert max(most) - before < 80
    assert eventually(lambda: not fetchers())


@pytest.mark.parametrize("verify", [True, False])
def test_file_that_is_replaced_during_the_load_is_an_error(memory, monkeypatch, verify):
    """PyTorch's writer uses the same names again; fsspec's store in memory knows no versions."""
    stock.save(state(1), storage_writer=FsspecWriter(URL), no_dist=True)
    get = Store.get

    def replaced(store: Store, key: str, *rest: Any) -> Any:
        data = get(store, key, *rest)
        if key.endswith(".distcp"):
            memory.pipe("/bkt/c/__0_0.distcp", b"of another save")
        return data

    monkeypatch.setattr(Store, "get", replaced)
    new = state(0)
    with pytest.raises(CheckpointException, match=r"replaced while it was read.*__0_0\.distcp"):
        stock.load(new, storage_reader=Reader(URL, verify=verify), no_dist=True)
    assert equal(new, state(0)) == verify


@pytest.mark.parametrize("room", [1 << 30, 0])
def test_damaged_item_changes_no_state(memory, room, monkeypatch):
    monkeypatch.setattr(fetch.budget, "measure", lambda held: Budget(room, room))
    monkeypatch.setattr(fetch, "_STRETCH_BYTES", 1)
    save(state(1, 3))
    (name,) = memory.glob("/bkt/c/*.distcp")
    data = bytearray(memory.cat(name))
    data[data.rindex(torch.ones(1000).numpy().tobytes()) + 7] ^= 1
    memory.pipe(name, bytes(data))
    new = state(0, 3)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(
        CheckpointException, match=rf"memory:/{name}: w2 is damaged: archive/data/0"
    ):
        stock.load(new, storage_reader=Reader(URL), no_dist=True)
    assert equal(new, state(0, 3))
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_missing_and_truncated_files_are_named(memory):
    save(state(1, 3))
    (name,) = memory.glob("/bkt/c/*.distcp")
    data = memory.cat(name)
    memory.pipe(name, data[:-10])
    with pytest.raises(CheckpointException, match=f"w2 is damaged: .* ends at {len(data) - 10}"):
        found(state(0, 3))
    memory.rm(name)
    with pytest.raises(CheckpointException, match=f"{name} is missing: it holds w0 and 2 more"):
        found(state(0, 3))


def test_store_that_is_down_fails_a_load_with_its_reason(server):
    save(state(1), server.url("c"))
    server.fail(403, times=1, match="GET .*distcp")
    with pytest.raises(CheckpointException, match=r"403.*s3://bkt/c/__0_0\."):
        found(state(0), server.url("c"))
    with pytest.raises(CheckpointException, match=r"Errno 2.*s3://bkt/nothing/\.metadata"):
        found(state(0), server.url("nothing"))


def test_one_reader_loads_checkpoints_at_several_paths_and_urls(memory, tmp_path):
    save(state(1))
    save(state(2), str(tmp_path / "c"))
    reader, new = Reader(URL), state(0)
    for path, value in ((None, 1), (tmp_path / "c", 2), (URL, 1), (f"file://{tmp_path}/c", 2)):
        stock.load(new, checkpoint_id=path, storage_reader=reader, no_dist=True)
        assert equal(new, state(value))
    assert Reader.validate_checkpoint_id(URL) and not Reader.validate_checkpoint_id("")


# ---- two ranks ----


@pytest.fixture
def notes(server: Server, tmp_path: Path) -> Any:
    run_program(HERE / "url_ranks.py", tmp_path)
    return lambda scenario: notes_of(tmp_path, scenario)


def test_ranks_save_below_one_url(server, notes):
    for rank in notes("saves"):
        assert rank["good"] == [True] * 3
        assert rank["io_mode"] == "obstore"
    keys = [re.sub(r"\.\w{8}\.", ".ID.", key) for key in server.objects() if "saves" in key]
    assert keys == [f"saves/{name}" for name in (".metadata", "__0_0.ID.distcp", "__1_0.ID.distcp")]
    for rank in notes("one_fails"):
        assert "CheckpointException" in rank["failure"] and "not on this rank" in rank["failure"]
        assert rank["same objects"] and rank["old"] and rank["new"]
    for rank in notes("group_is_gone"):
        assert rank["good"]
