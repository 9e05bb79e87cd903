"""Saves to URLs: what the store holds at every moment, and what becomes of the pool."""

import contextlib
import errno
import gc
import io
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
import stillframe
import torch
from fix_processes import start_python
from fix_store import submit_after_cancel
from fix_waits import eventually, leased
from stillframe._remote import obstore_client, store
from stillframe._save.core_save import CoreSave
from stillframe._save.engine import core_of
from stillframe.testing import held

HERE = Path(__file__).parent
MIB = 1 << 20


@pytest.fixture
def small(monkeypatch):
    """Return an engine whose pool holds an eighth of `STATE`; a store takes parts of two blocks."""
    monkeypatch.setattr(store, "PART_BYTES", 2 * MIB)
    monkeypatch.setattr(obstore_client, "ONE_REQUEST_BYTES", 4096)
    with stillframe.Engine(pool_bytes=2 * MIB, block_bytes=MIB // 4) as engine:
        yield engine


STATE = {
    "weight": torch.arange(4 * MIB, dtype=torch.float32),
    "small": [torch.full((3,), float(i)) for i in range(50)],
    "text": "x" * 10_000,
}


def same(data, state=STATE):
    loaded = torch.load(io.BytesIO(data))
    assert torch.equal(loaded["weight"], state["weight"])
    assert all(map(torch.equal, loaded["small"], state["small"]))
    assert loaded["text"] == state["text"]
    return True


def trained():
    """Return a model and an optimizer whose state is deferred."""
    torch.manual_seed(0)
    model = torch.nn.Linear(512, 2048)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(6):
        step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    model(torch.ones(2, 512)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


# ---- what is saved ----


def test_object_has_the_bytes_of_the_file(server, tmp_path):
    report = stillframe.save(STATE, server.url("run/a.pt"))
    stillframe.save(STATE, tmp_path / "a.pt")
    data = server.objects()["run/a.pt"]
    assert same(data)
    assert report.nbytes == len(data) == (tmp_path / "a.pt").stat().st_size
    assert report.path == server.url("run/a.pt") and report.io_mode == "obstore"
    assert stillframe.exists(server.url("run/a.pt"))
    assert not server.unfinished_uploads()


def test_pool_of_an_eighth_of_the_state_is_enough(memory_files, small):
    report = stillframe.save(STATE, "memory://run/a.pt", engine=small)
    assert same(memory_files.cat("run/a.pt"))
    assert report.peak_pool_bytes <= 2 * MIB < report.nbytes / 8
    assert small.stats()["leased_bytes"] == 0


@pytest.mark.parametrize("part", [MIB, MIB + 1000])
def test_pool_of_one_block_is_enough(part, bucket, monkeypatch):
    """Whether or not a part ends where a block does."""
    monkeypatch.setattr(store, "PART_BYTES", part)
    monkeypatch.setattr(obstore_client, "ONE_REQUEST_BYTES", 1 << 10)
    model, optimizer = trained()
    want = {name: value.clone() for name, value in model.state_dict().items()}
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "other": torch.ones(99)}
    with stillframe.Engine(pool_bytes=MIB // 4, block_bytes=MIB // 4) as engine:
        handle = stillframe.async_save(state, bucket.url("a.pt"), engine=engine)
        step(model, optimizer)
        assert handle.result(60).deferred_nbytes > 0
    got = stillframe.load(bucket.url("a.pt"))["model"]
    assert all(torch.equal(got[name], value) for name, value in want.items())


def test_client_gets_the_pools_blocks_without_a_copy_in_whole_parts(monkeypatch):
    """A copy of each block would take the memory and the time that the pool is to save."""
    kinds, sizes = [], []
    monkeypatch.setattr(store, "PART_BYTES", 2 * MIB)

    class Client(store.Store):
        client = "fsspec"

        def __init__(self):
            pass

        _put = _get = _find = _list = _delete = _remove_stale_uploads = None

        def put(self, key, pieces, nbytes=None):
            for piece in pieces:
                kinds.append(type(piece.obj).__name__)
                sizes.append(len(piece))

    monkeypatch.setattr("stillframe._save.remote.open_store", lambda url, options: (Client(), "a"))
    with stillframe.Engine(pool_bytes=32 * MIB, block_bytes=MIB // 4) as engine:
        stillframe.save(STATE, "memory://run/a.pt", engine=engine)
    assert kinds.count("Piece") > len(kinds) / 2
    part = 0
    for size in sizes:
        part += size
        assert part <= 2 * MIB
        part %= 2 * MIB


def test_file_holds_the_state_at_the_call_while_training_goes_on(server, small):
    model, optimizer = trained()
    want = {name: value.clone() for name, value in model.state_dict().items()}
    handle = stillframe.async_save(
        {"model": model.state_dict(), "optim": optimizer.state_dict()},
        server.url("a.pt"),
        engine=small,
    )
    for _ in range(3):
        step(model, optimizer)
    report = handle.result()
    assert report.deferred_nbytes > 0
    loaded = torch.load(io.BytesIO(server.objects()["a.pt"]))
    assert all(torch.equal(loaded["model"][name], want[name]) for name in want)


def test_torn_copy_leaves_the_old_object(memory_files):
    model, _ = trained()
    stillframe.save({"n": 1}, "memory://run/a.pt")
    with held("lane_copy"):
        handle = stillframe.async_save(model.state_dict(), "memory://run/a.pt")
        with torch.no_grad():
            model.weight.add_(1)
    with pytest.raises(stillframe.TornSnapshotError, match=r"memory://run/a\.pt"):
        handle.result()
    assert torch.load(io.BytesIO(memory_files.cat("run/a.pt"))) == {"n": 1}
    assert handle.state == "failed"


@pytest.mark.parametrize("client", ["obstore", "fsspec"])
def test_safetensors_file_goes_up_as_the_library_writes_it(server, memory_files, client):
    url = server.url("m.safetensors") if client == "obstore" else "memory://run/m.safetensors"
    tensors = {"b": torch.arange(5.0), "a": torch.ones(70_000, dtype=torch.bfloat16)}
    stillframe.save(tensors, url, metadata={"format": "pt"})
    if client == "obstore":
        data = server.objects()["m.safetensors"]
    else:
        data = memory_files.cat("run/m.safetensors")
    safetensors = pytest.importorskip("safetensors.torch")
    loaded = safetensors.load(data)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


# ---- order ----


def test_saves_and_removes_of_one_url_take_effect_in_order(server):
    for n in range(4):
        stillframe.async_save({"n": n}, server.url("a.pt"))
    stillframe.async_save({"n": 9}, server.url("b.pt"))
    stillframe.remove(server.url("a.pt"))
    assert not stillframe.exists(server.url("a.pt"))
    assert stillframe.exists(server.url("b.pt"))
    stillframe.wait_all()
    assert list(server.objects()) == ["b.pt"]


def test_object_becomes_visible_only_after_the_saves_before_it(server, tmp_path):
    with held("fdatasync"):
        first = stillframe.async_save({"n": 1}, tmp_path / "a.pt")
        second = stillframe.async_save(STATE, server.url("b.pt"))
        second.wait_staged(60)
        eventually(lambda: server.lines("partNumber"))
        assert "b.pt" not in server.objects() and not second.done()
    second.result(60)
    assert first.done() and same(server.objects()["b.pt"])


def test_remove_after_a_failed_save_keeps_the_old_checkpoint(server, caplog):
    stillframe.save({"n": 1}, server.url("old.pt"))
    server.fail(403, match="new")
    handle = stillframe.async_save({"n": 2}, server.url("new.pt"))
    stillframe.remove(server.url("old.pt"))
    assert isinstance(handle.exception(), stillframe.SaveError)
    stillframe.wait_all()
    assert list(server.objects()) == ["old.pt"]
    assert "old.pt was not removed" in caplog.text


def test_remove_takes_all_objects_below_a_url_and_the_marker_first(server, memory_files):
    for name in ("run/.metadata", "run/__0_0.distcp", "run/x/y", "runner"):
        server.put(name, b"a")
    stillframe.save({}, "memory://good/a")  # a remove runs after a good save
    stillframe.remove(server.url("run"))
    stillframe.wait_all()
    assert list(server.objects()) == ["runner"]
    assert ".metadata" in server.lines("DELETE|POST")[0] or len(server.lines("POST")) > 1


# ---- failures ----


def test_store_that_stays_down_fails_the_save_and_keeps_the_old_object(server):
    stillframe.save({"n": 1}, server.url("a.pt"))
    server.fail(503)
    handle = stillframe.async_save(STATE, server.url("a.pt"))
    with pytest.raises(stillframe.SaveError, match=r"s3://bkt/a\.pt") as caught:
        handle.result(60)
    assert caught.value.phase == "upload" and caught.value.errno == errno.EIO
    assert handle.state == "failed"
    server._faults.clear()
    assert torch.load(io.BytesIO(server.objects()["a.pt"])) == {"n": 1}
    stillframe.save({"n": 2}, server.url("a.pt"))  # the engine goes on
    assert torch.load(io.BytesIO(server.objects()["a.pt"])) == {"n": 2}


def test_part_that_fails_is_sent_again(server):
    server.fail(500, times=2, match="partNumber=1&")
    stillframe.save(STATE, server.url("a.pt"))
    assert same(server.objects()["a.pt"])


def test_cancelled_save_aborts_the_upload(server):
    stillframe.save({"n": 1}, server.url("a.pt"))
    with server.held("partNumber") as hold:
        handle = stillframe.async_save(STATE, server.url("a.pt"))
        hold.wait_for()
        assert handle.cancel() and handle.cancel()
    with pytest.raises(CancelledError):
        handle.result(60)
    assert handle.state == "cancelled"
    assert torch.load(io.BytesIO(server.objects()["a.pt"])) == {"n": 1}
    assert not server.unfinished_uploads()


def test_call_that_raises_leaves_no_object_and_no_upload(server):
    class Unpicklable:
        def __reduce__(self):
            raise RuntimeError("not me")

    with pytest.raises(RuntimeError, match="not me"):
        stillframe.async_save({"a": Unpicklable()}, server.url("a.pt"))
    stillframe.wait_all()
    assert server.objects() == {} and not server.unfinished_uploads()
    assert stillframe.default_engine().stats()["saves_in_flight"] == 0


def test_upload_that_fails_before_the_save_is_submitted_fails_the_save(server, monkeypatch):
    """The thread that sends the bytes runs before their save has a slot."""
    submit_after_cancel(monkeypatch)
    server.fail(403, match="a.pt")
    with pytest.raises(stillframe.SaveError, match=r"a\.pt"):
        stillframe.async_save(STATE, server.url("a.pt")).result(60)


@pytest.mark.parametrize("before_submit", [True, False])
def test_interrupted_call_ends_its_upload(server, monkeypatch, before_submit):
    def interrupted(save):
        if not before_submit:  # as Ctrl-C while the call waits for a slot
            core_of(engine).close(0)
            save._ticket.submit()
        raise KeyboardInterrupt

    with stillframe.Engine(pool_bytes="64MiB") as engine:
        with monkeypatch.context() as patched:
            patched.setattr(CoreSave, "launch", interrupted)
            with pytest.raises((KeyboardInterrupt, stillframe.StillframeError)):
                stillframe.async_save(STATE, server.url("a.pt"), engine=engine)
        assert eventually(lambda: not [t for t in threading.enumerate() if t.name == "sf-upload"])
        assert engine.stats()["saves_in_flight"] == 0
    assert server.objects() == {} and not server.unfinished_uploads()


def test_save_to_a_url_counts_as_one_save_in_stats(server):
    with stillframe.Engine(pool_bytes="64MiB") as engine:
        with server.held("a.pt") as hold:
            handle = stillframe.async_save(STATE, server.url("a.pt"), engine=engine)
            hold.wait_for()
            assert engine.stats()["saves_in_flight"] == 1
        handle.result(60)
        stats = engine.stats()
        assert stats["saves_total"] == 1 and stats["saves_in_flight"] == 0


def test_full_engine_skips_or_refuses_a_save_to_a_url(server):
    with stillframe.Engine(pool_bytes="64MiB", max_in_flight=1, when_busy="skip") as engine:
        with server.held("b.pt") as hold:
            handle = stillframe.async_save(STATE, server.url("b.pt"), engine=engine)
            hold.wait_for()
            other = stillframe.async_save(STATE, server.url("c.pt"), engine=engine)
            assert other.state == "skipped"
        handle.result(60)
    with stillframe.Engine(pool_bytes="64MiB", max_in_flight=1, when_busy="raise") as engine:
        with server.held("b.pt") as hold:
            handle = stillframe.async_save(STATE, server.url("b.pt"), engine=engine)
            hold.wait_for()
            with pytest.raises(stillframe.BusyError):
                stillframe.async_save(STATE, server.url("c.pt"), engine=engine)
        handle.result(60)
    assert list(server.objects()) == ["b.pt"]


@pytest.mark.parametrize(
    "url, words", [("s3://bkt", "no object"), ("s3://bkt/run/", "no object"), ("s3://", "bucket")]
)
def test_url_that_names_no_object_is_refused(url, words):
    with pytest.raises(ValueError, match=words):
        stillframe.async_save({}, url)


def test_options_of_a_store_are_refused_for_a_local_path(tmp_path):
    for call in (
        lambda: stillframe.async_save({}, tmp_path / "a", storage_options={"key": "a"}),
        lambda: stillframe.remove(tmp_path / "a", storage_options={"key": "a"}),
        lambda: stillframe.exists(tmp_path / "a", storage_options={"key": "a"}),
    ):
        with pytest.raises(ValueError, match="local path"):
            call()


def test_file_url_is_a_local_path(tmp_path):
    stillframe.save({"n": 1}, f"file://{tmp_path}/a%20b.pt")
    assert torch.load(tmp_path / "a b.pt") == {"n": 1}


# ---- handles ----


def test_callbacks_and_futures_get_the_end_of_a_save_to_a_url(server):
    heard = queue.SimpleQueue()
    handle = stillframe.async_save(
        {"n": 1}, server.url("a.pt"), on_durable=lambda *each: heard.put(each)
    )
    handle.staging_completion.result(60)
    report = handle.upload_completion.result(60)
    assert heard.get(timeout=60) == (server.url("a.pt"), report)
    assert handle.progress() == (report.nbytes, report.nbytes)
    assert handle.state == "durable" and handle.result() is report


def test_error_that_nobody_collected_is_raised_once_by_wait_all(server):
    server.fail(403)
    stillframe.async_save({"n": 1}, server.url("a.pt"))
    with pytest.raises(stillframe.SaveError, match=r"a\.pt"):
        stillframe.wait_all()
    stillframe.wait_all()


def test_no_credential_is_in_a_report_or_error(server):
    server.fail(403)
    secret = "do-not-show-this"
    options = {**server.options, "secret": secret}
    handle = stillframe.async_save({"n": 1}, server.url("a.pt"), storage_options=options)
    error = handle.exception(60)
    with pytest.raises(ValueError, match="not in the URL") as caught:
        stillframe.async_save({"n": 1}, f"s3://user:{secret}@bkt/a.pt")
    for text in (str(error), repr(error), repr(handle), handle.path, str(caught.value)):
        assert secret not in text


def test_ended_saves_to_urls_leave_no_thread_and_no_memory(server):
    with stillframe.Engine(pool_bytes="64MiB") as engine:  # earlier tests use the default one
        for n in range(3):
            stillframe.save({"n": n}, server.url("a.pt"), engine=engine)
        assert eventually(lambda: not [t for t in threading.enumerate() if t.name == "sf-upload"])
        gc.collect()
        # The client's own threads may still have to give back the last piece.
        assert eventually(lambda: leased(engine) == 0)


# ---- processes ----


def script(server, text):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    code = textwrap.dedent(text)
    return start_python("-W", "ignore", "-c", code, server.url("a.pt"), env=env, **pipes)


def test_exit_waits_for_the_upload(server):
    child = script(
        server,
        """
        import sys, torch, stillframe
        stillframe.async_save({"a": torch.arange(3_000_000.0)}, sys.argv[1])
        """,
    )
    _, errors = child.communicate(timeout=100)
    assert child.returncode == 0, errors
    assert len(torch.load(io.BytesIO(server.objects()["a.pt"]))["a"]) == 3_000_000


def test_killed_process_leaves_the_old_object(server):
    stillframe.save({"n": 1}, server.url("a.pt"))
    with server.held("partNumber=2") as hold:
        child = script(
            server,
            """
            import sys, torch, stillframe
            stillframe.save({"a": torch.arange(12_000_000.0)}, sys.argv[1])
            """,
        )
        hold.wait_for()
        child.send_signal(signal.SIGKILL)
        child.communicate(timeout=60)
    assert torch.load(io.BytesIO(server.objects()["a.pt"])) == {"n": 1}


def test_forked_child_cannot_wait_for_its_parents_save(server):
    with server.held("a.pt") as hold:
        handle = stillframe.async_save(STATE, server.url("a.pt"))
        hold.wait_for()
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                try:
                    handle.result(1)
                except stillframe.ForkError:
                    code = 0
            os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
    handle.result(60)
    assert same(server.objects()["a.pt"])
