"""`async_save` with handles, reports, order, bounds and errors."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import logging
import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path

import pytest
import stillframe
import torch
from fix_holds import held_until_awaited
from stillframe._watch import gate
from stillframe.testing import fault, held, slow

STATE = {"w": torch.arange(100_000, dtype=torch.float32), "step": 3}


def loads_as(path: Path, w: torch.Tensor) -> bool:
    return torch.equal(torch.load(path)["w"], w)


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer, object]:
    model = torch.nn.Linear(600, 600)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.randn(2, 600)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        step()
    return model, optimizer, step


def test_save_returns_a_handle_with_a_report(tmp_path):
    path = tmp_path / "a.pt"
    handle = stillframe.async_save(STATE, path)
    report = handle.result()
    assert handle.done() and handle.state == "durable" and handle.path == str(path)
    assert report.path == str(path) and report.nbytes == path.stat().st_size
    assert report.num_tensors == 1 and report.deferred_nbytes == 0
    assert report.captured_nbytes > 400_000 and report.io_mode in ("direct", "buffered")
    assert 0 < report.blocked_s <= report.durable_after_s
    assert report.staged_after_s <= report.durable_after_s
    assert report.nbytes % 4096 == 0 and handle.progress() == (report.nbytes, report.nbytes)
    assert handle.result() == report and handle.exception() is None and not handle.cancel()
    assert loads_as(path, STATE["w"])


def test_optimizer_state_is_deferred_and_the_next_step_waits(tmp_path):
    model, optimizer, step = trained()
    expected = {k: v.clone() for k, v in model.state_dict().items()}
    with held_until_awaited("lane_copy"):
        handle = stillframe.async_save(
            {"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "a.pt"
        )
        assert handle.state == "staging"
        step()
        assert handle.state != "staging"
    report = handle.result()
    assert report.deferred_nbytes == 3 * 600 * 600 * 4 and report.gate_wait_s > 0
    saved = torch.load(tmp_path / "a.pt")["model"]
    assert all(torch.equal(saved[k], expected[k]) for k in expected)


def test_overlap_false_captures_everything(tmp_path):
    model, _, _ = trained()
    report = stillframe.async_save(model.state_dict(), tmp_path / "a.pt", overlap=False).result()
    assert report.deferred_nbytes == 0


def test_blocking_save_defers_nothing_and_syncs_by_default(tmp_path):
    model, optimizer, _ = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with slow("fdatasync", 0) as injected:
        assert stillframe.save(state, tmp_path / "a.pt", durable=False).deferred_nbytes == 0
        assert injected.calls("fdatasync") == 0
        stillframe.save(state, tmp_path / "a.pt")
        assert injected.calls("fdatasync") == 1


def test_exists_of_a_link_follows_the_log_of_its_target(tmp_path):
    (tmp_path / "link").symlink_to("a.pt")
    assert not stillframe.exists(tmp_path / "link")
    with held("rename"):
        handle = stillframe.async_save(STATE, tmp_path / "a.pt")
        assert stillframe.exists(tmp_path / "link")
    handle.result()


def test_captured_state_may_change_after_the_call(tmp_path):
    w = torch.full((1_000_000,), 5.0)
    with held("pwrite"):
        handle = stillframe.async_save({"w": w}, tmp_path / "a.pt")
        w.fill_(9.0)
    handle.result()
    assert loads_as(tmp_path / "a.pt", torch.full((1_000_000,), 5.0))


def test_change_after_wait_staged_is_allowed(tmp_path):
    model, _, _ = trained()
    expected = model.weight.detach().clone()
    with slow("lane_copy", 0.02):
        handle = stillframe.async_save({"w": model.weight}, tmp_path / "a.pt")
        handle.wait_staged()
        model.weight.data.zero_()
    assert handle.result().deferred_nbytes > 0
    assert torch.equal(torch.load(tmp_path / "a.pt")["w"], expected)


def test_change_before_the_copy_fails_the_save_and_names_the_tensor(tmp_path):
    model, _, _ = trained()
    stillframe.save({"m": {"w": torch.zeros(3)}}, tmp_path / "a.pt")
    with held_until_awaited("lane_copy"):
        handle = stillframe.async_save({"m": {"w": model.weight}}, tmp_path / "a.pt")
        with torch.no_grad():
            model.weight.view(-1)[77_777] += 1  # its version shows it, so no sample is needed
        with pytest.raises(stillframe.TornSnapshotError, match=r"m\.w.*wait_staged") as caught:
            handle.result()
    assert caught.value.tensors == ("m.w",)
    assert torch.equal(torch.load(tmp_path / "a.pt")["m"]["w"], torch.zeros(3))
    with pytest.raises(stillframe.TornSnapshotError):
        handle.wait_staged()
    # From now on that optimizer's state is captured.
    report = stillframe.async_save({"m": {"w": model.weight}}, tmp_path / "a.pt").result()
    assert report.deferred_nbytes == 0


def test_check_mutation_detects_a_change_without_a_version(tmp_path):
    model, _, _ = trained()
    with held_until_awaited("lane_copy"):
        handle = stillframe.async_save({"w": model.weight}, tmp_path / "a.pt", check_mutation=True)
        model.weight.data.view(-1)[77_777] += 1  # .data does not change the version
        assert isinstance(handle.exception(), stillframe.TornSnapshotError)
    assert not (tmp_path / "a.pt").exists()


def test_timeouts_raise_and_the_save_goes_on(tmp_path):
    with held("fdatasync"):
        handle = stillframe.async_save(STATE, tmp_path / "a.pt")
        for call in (handle.result, handle.exception):
            with pytest.raises(TimeoutError):
                call(timeout=0.01)
        with pytest.raises(TimeoutError):
            stillframe.wait_all(timeout=0.01)
        handle.wait_staged(timeout=60)
    assert handle.result(timeout=60).nbytes


def test_cancelled_save_leaves_the_old_file_and_every_wait_raises(tmp_path):
    path = tmp_path / "a.pt"
    stillframe.save({"w": torch.ones(3)}, path)
    with held("pwrite"):
        handle = stillframe.async_save(STATE, path)
        assert handle.cancel() and handle.cancel()
    for _ in range(2):
        with pytest.raises(CancelledError):
            handle.result()
        with pytest.raises(CancelledError):
            handle.exception()
    assert handle.state == "cancelled" and handle.upload_completion.cancelled()
    assert loads_as(path, torch.ones(3))
    stillframe.wait_all()  # a cancelled save is no error


def test_callbacks_run_on_their_thread_after_everything_is_settled(tmp_path):
    seen: list[object] = []
    over = threading.Event()

    def on_durable(path: object, report: stillframe.SaveReport) -> None:
        seen.append((path, report.nbytes, threading.current_thread().name))
        # Callbacks may save and wait.
        stillframe.save(STATE, tmp_path / "from-callback.pt")

    def done(h: stillframe.SaveHandle) -> None:
        seen.append((h.state, h.upload_completion.done()))
        over.set()

    path = tmp_path / "a.pt"
    with held("fdatasync", sticky=False):
        handle = stillframe.async_save(STATE, path, on_durable=on_durable)
        # the error is logged, and the next one still runs
        handle.add_done_callback(lambda h: 1 / 0)
        handle.add_done_callback(done)
    report = handle.result()
    assert over.wait(60)
    assert seen[0] == (path, report.nbytes, "sf-callbacks")
    assert seen[1] == ("durable", True)
    late: list[object] = []
    handle.add_done_callback(late.append)
    assert late == [handle]
    assert (tmp_path / "from-callback.pt").exists()


def test_handle_has_dcps_two_futures(tmp_path):
    with held("fdatasync"):
        handle = stillframe.async_save(STATE, tmp_path / "a.pt")
        assert isinstance(handle.staging_completion, Future)
        assert handle.staging_completion.result(60) is None
        assert not handle.upload_completion.done()
        assert handle.upload_completion is handle.upload_completion
    assert handle.upload_completion.result(60) == handle.result()
    assert handle.staging_completion.result() is None


def test_an_error_of_the_disk_has_phase_errno_and_path_and_later_saves_work(tmp_path):
    path = tmp_path / "a.pt"
    stillframe.save({"w": torch.ones(3)}, path)
    for call, number, phase in (
        ("open", errno.EACCES, "open"),
        ("fallocate", errno.ENOSPC, "allocate"),
        ("pwrite", errno.EIO, "write"),
        ("fdatasync", errno.EIO, "sync"),
        ("rename", errno.EDQUOT, "rename"),
        ("fsync", errno.EIO, "sync directory"),
    ):
        with fault(call, err=number) as injected:
            handle = stillframe.async_save(STATE, path)
            with pytest.raises(stillframe.SaveError) as caught:
                handle.result()
        assert injected.hits == 1
        error = caught.value
        assert isinstance(error, OSError) and error.errno == number
        assert error.filename == str(path) and error.phase == phase and phase in str(error)
        assert handle.state == "failed" and handle.exception() is error
        assert loads_as(path, STATE["w"] if phase == "sync directory" else torch.ones(3))
        stillframe.save({"w": torch.ones(3)}, path)


def test_wait_all_raises_uncollected_errors_once(tmp_path):
    with fault("rename", sticky=True):
        collected = stillframe.async_save(STATE, tmp_path / "a.pt")
        assert isinstance(collected.exception(), stillframe.SaveError)
        stillframe.async_save(STATE, tmp_path / "b.pt")
        stillframe.async_save(STATE, tmp_path / "c.pt")
        with pytest.raises(stillframe.SaveError, match=r"b\.pt"):
            stillframe.wait_all()
        with pytest.raises(stillframe.SaveError, match=r"c\.pt"):
            stillframe.wait_all()
    stillframe.wait_all()


@contextlib.contextmanager
def notices_stay_queued(directory: Path) -> Iterator[None]:
    """Stop the thread that takes notices while the block runs."""
    reached, go = threading.Event(), threading.Event()

    def block() -> None:
        reached.set()
        go.wait(60)

    with held("fdatasync"):
        first = stillframe.async_save(STATE, directory / "a.pt")
        assert first._outcome.call_directly_at_end(block)
    assert reached.wait(60)
    try:
        yield
    finally:
        go.set()


def test_wait_all_raises_an_error_whose_notice_is_still_queued(tmp_path):
    with notices_stay_queued(tmp_path), fault("rename"):
        stillframe.async_save(STATE, tmp_path / "b.pt")
        with pytest.raises(stillframe.SaveError, match=r"b\.pt"):
            stillframe.wait_all()


def test_uncollected_error_is_logged_when_its_handle_dies(tmp_path, caplog):
    with fault("rename"), caplog.at_level(logging.ERROR, "stillframe"):
        handle = stillframe.async_save(STATE, tmp_path / "a.pt")
        while not handle.done():
            time.sleep(0.01)
        del handle
        gc.collect()
        while "nobody asked" not in caplog.text:
            time.sleep(0.01)
    with pytest.raises(stillframe.SaveError):
        stillframe.wait_all()


def test_failed_save_collected_before_its_notices_is_freed(tmp_path):
    model, _, _ = trained()
    with notices_stay_queued(tmp_path), fault("pwrite", err=errno.ENOSPC):
        handle = stillframe.async_save(model.state_dict(), tmp_path / "b.pt")
        while not handle.done():
            time.sleep(0.001)
        assert handle not in gate._pendings.values()
    assert isinstance(handle.exception(), stillframe.SaveError)


def test_future_result_collects_the_error(tmp_path):
    with fault("rename"):
        future = stillframe.async_save(STATE, tmp_path / "a.pt").upload_completion
        with pytest.raises(stillframe.SaveError):
            future.result(60)
    stillframe.wait_all()


@pytest.mark.parametrize("call", [stillframe.async_save, stillframe.save])
def test_invalid_input_is_refused_by_the_call_and_keeps_the_file(tmp_path, call):
    path = tmp_path / "a.pt"
    stillframe.save(STATE, path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(TypeError, match=r"str or os\.PathLike"):
        call(STATE, 3)
    with pytest.raises(TypeError):
        call(STATE, b"bytes")
    with pytest.raises(ValueError, match="no object"):
        call(STATE, "memory://bucket")
    with pytest.raises(ValueError, match="local path"):
        call(STATE, path, storage_options={"key": "a"})
    with pytest.raises(ValueError, match="empty"):
        call(STATE, "")
    for bad, number in (
        (tmp_path, errno.EISDIR),
        (str(tmp_path) + "/", errno.EISDIR),
        ("/", errno.EISDIR),
        (f"{tmp_path}/new/", errno.EISDIR),
        (f"{tmp_path}/new/.", errno.EISDIR),
        (tmp_path / "no" / "parent.pt", errno.ENOENT),
        (path / "below.pt", errno.ENOTDIR),
        (tmp_path / "fifo", errno.EINVAL),
        ("/dev/null", errno.EINVAL),
    ):
        with pytest.raises(stillframe.SaveError) as caught:
            call(STATE, bad)
        assert caught.value.errno == number and caught.value.phase == "open"
        assert caught.value.filename == str(bad)
    with pytest.raises((AttributeError, TypeError)) as ours:
        call({"f": lambda: 0}, path)
    with pytest.raises((AttributeError, TypeError)) as theirs:
        torch.save({"f": lambda: 0}, tmp_path / "b.pt")
    assert type(ours.value) is type(theirs.value)
    with pytest.raises(TypeError):
        call(STATE, path, durable=True, nonsense=1)
    assert loads_as(path, STATE["w"])


def test_on_durable_must_be_callable(tmp_path):
    with pytest.raises(TypeError, match="on_durable"):
        stillframe.async_save(STATE, tmp_path / "a.pt", on_durable=3)
    assert not (tmp_path / "a.pt").exists()


def test_a_directory_that_cannot_be_synced_is_refused_in_the_call(tmp_path, monkeypatch):
    # Root may read every directory, so the system's answer is replaced.
    monkeypatch.setattr(os, "access", lambda path, mode, **_: path != os.path.realpath(tmp_path))
    refused = pytest.raises(stillframe.SaveError, match="durable=False")
    with fault("faccessat", err=errno.EACCES, sticky=True), refused as caught:
        stillframe.async_save(STATE, tmp_path / "a.pt")
    assert caught.value.errno == errno.EACCES and caught.value.phase == "open"
    assert os.listdir(tmp_path) == []
    stillframe.save(STATE, tmp_path / "a.pt", durable=False)
    assert loads_as(tmp_path / "a.pt", STATE["w"])


def test_permissions_are_those_of_open(tmp_path):
    old = os.umask(0o027)
    try:
        stillframe.save(STATE, tmp_path / "a.pt")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a.pt").stat().st_mode) == 0o640


def test_a_link_is_followed_and_stays(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link.pt").symlink_to("real/target.pt")
    # the link dangles, and torch.save creates its target
    stillframe.save(STATE, tmp_path / "link.pt")
    stillframe.save({"w": torch.ones(2)}, tmp_path / "link.pt")
    assert (tmp_path / "link.pt").is_symlink()
    assert loads_as(tmp_path / "real" / "target.pt", torch.ones(2))
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(stillframe.SaveError):
        stillframe.save(STATE, tmp_path / "loop")


def test_relative_path_is_resolved_at_the_save_call(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with held("open"):
        handle = stillframe.async_save(STATE, "a.pt")
        monkeypatch.chdir(tmp_path / "elsewhere")
    handle.result()
    assert (tmp_path / "a.pt").exists() and handle.path == "a.pt"


def test_file_with_a_name_outside_utf8_is_saved_and_loaded(tmp_path):
    name = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe.pt")
    stillframe.save(STATE, name)
    assert torch.equal(stillframe.load(name)["w"], STATE["w"])


def test_messages_about_names_outside_utf8_are_readable(tmp_path, caplog):
    stillframe.save(STATE, os.fsdecode(os.fsencode(tmp_path) + b"/a\xff.pt"))
    with fault("rename"), caplog.at_level(logging.WARNING, "stillframe"):
        handle = stillframe.async_save(STATE, tmp_path / "new.pt")
        stillframe.remove(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff.pt"))
        assert isinstance(handle.exception(), stillframe.SaveError)
        stillframe.wait_all()
        while "a\N{REPLACEMENT CHARACTER}.pt was not removed" not in caplog.text:
            time.sleep(0.01)


def test_load_sees_the_save_before_it(tmp_path):
    path = tmp_path / "a.pt"
    with slow("fdatasync", 0.1):
        stillframe.async_save(STATE, path)
        assert stillframe.exists(path)
        assert torch.equal(stillframe.load(path)["w"], STATE["w"])


def test_a_rotation_never_leaves_fewer_than_one_durable_file(tmp_path):
    paths = [tmp_path / f"{i}.pt" for i in range(6)]
    low = 99
    stop = threading.Event()

    def watch() -> None:
        nonlocal low
        while not stop.is_set():
            low = min(low, sum(path.exists() for path in paths))

    stillframe.save(STATE, paths[0])
    watcher = threading.Thread(target=watch)
    watcher.start()
    with slow("fdatasync", 0.03):
        for old, new in itertools.pairwise(paths):
            stillframe.async_save(STATE, new)
            stillframe.remove(old)
            assert stillframe.exists(new) and not stillframe.exists(old)
        stillframe.wait_all()
    stop.set()
    watcher.join()
    assert low >= 1
    assert [path.exists() for path in paths] == [False] * 5 + [True]


def test_a_remove_is_dropped_when_the_save_before_it_fails(tmp_path, caplog):
    stillframe.save(STATE, tmp_path / "old.pt")
    with fault("rename"), caplog.at_level(logging.WARNING, "stillframe"):
        handle = stillframe.async_save(STATE, tmp_path / "new.pt")
        stillframe.remove(tmp_path / "old.pt")
        assert isinstance(handle.exception(), stillframe.SaveError)
        stillframe.wait_all()
        while "old.pt was not removed" not in caplog.text:
            time.sleep(0.01)
    assert (tmp_path / "old.pt").exists()
    stillframe.save(STATE, tmp_path / "new.pt")


def test_max_in_flight_bounds_each_engine(tmp_path):
    with slow("fdatasync", 0.2):
        with stillframe.Engine(max_in_flight=1, when_busy="raise") as engine:
            with held("fdatasync"):
                engine_saves = stillframe.async_save(STATE, tmp_path / "a.pt", engine=engine)
                with pytest.raises(stillframe.BusyError):
                    stillframe.async_save(STATE, tmp_path / "b.pt", engine=engine)
            engine_saves.result()
        with stillframe.Engine(max_in_flight=1, when_busy="skip") as engine:
            with held("fdatasync"):
                first = stillframe.async_save(STATE, tmp_path / "c.pt", engine=engine)
                skipped = stillframe.async_save(STATE, tmp_path / "d.pt", engine=engine)
                assert skipped.state == "skipped" and skipped.done()
            assert skipped.result() is None and skipped.exception() is None
            called: list[object] = []
            skipped.add_done_callback(called.append)
            assert called == [skipped]
            assert skipped.upload_completion.result(1) is None and not skipped.cancel()
            skipped.wait_staged()
            first.result()
        with stillframe.Engine(max_in_flight=1) as engine:
            stillframe.async_save(STATE, tmp_path / "e.pt", engine=engine)
            second = stillframe.async_save(STATE, tmp_path / "f.pt", engine=engine)
            assert second.result().backpressure_s > 0.05
    assert not (tmp_path / "b.pt").exists() and not (tmp_path / "d.pt").exists()


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_save_works_with_a_pool_smaller_than_the_state(tmp_path, blocks):
    model, optimizer, step = trained()
    block = 64 << 10
    with stillframe.Engine(pool_bytes=blocks * block, block_bytes=block) as engine:
        for i in range(3):
            state = {"m": model.state_dict(), "o": optimizer.state_dict(), "w": STATE["w"]}
            expected = model.weight.detach().clone()
            handle = stillframe.async_save(state, tmp_path / f"{i}.pt", engine=engine)
            step()
            report = handle.result()
            assert report.deferred_nbytes > 0 and report.peak_pool_bytes <= blocks * block
            assert torch.equal(
                stillframe.load(tmp_path / f"{i}.pt", verify=True)["m"]["weight"], expected
            )
        assert engine.stats()["committed_bytes"] <= blocks * block


def test_engine_stats_show_what_it_holds(tmp_path):
    with stillframe.Engine(pool_bytes=64 << 20, block_bytes=1 << 20) as engine:
        before = engine.stats()
        assert before["committed_bytes"] == 0 and before["pool_bytes"] == 64 << 20
        engine.warm_up(8 << 20)
        assert engine.stats()["committed_bytes"] == 8 << 20
        stillframe.save(STATE, tmp_path / "a.pt", engine=engine)
        stats = engine.stats()
        assert stats["saves_total"] == 1 and stats["saves_in_flight"] == 0
        assert stats["leased_bytes"] == 0 and stats["retired_bytes"] == 0
        assert isinstance(stats["driver"], str) and "CUDA" in stats["driver"]
        engine.trim()
        assert engine.stats()["committed_bytes"] == 0


def test_warm_up_logs_its_progress(caplog, monkeypatch):
    monkeypatch.setattr("stillframe._save.engine._WARM_UP_STEP", 8 << 20)
    with (
        stillframe.Engine(pool_bytes=20 << 20, block_bytes=1 << 20) as engine,
        caplog.at_level(logging.INFO, "stillframe"),
    ):
        engine.warm_up("24MiB")  # more than the cap
        engine.warm_up("4MiB")
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(" (")[0] for line in lines] == [
        "stillframe: warm-up: the pool holds 8 MiB, 24 MiB were asked for",
        "stillframe: warm-up: the pool holds 16 MiB, 24 MiB were asked for",
        "stillframe: warm-up: the pool holds 20 MiB, 24 MiB were asked for",
        "stillframe: warm-up: the pool holds 20 MiB, 4 MiB were asked for",
    ]
    assert [line.endswith(" GB/s)") for line in lines] == [True, True, True, False]


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"pool_bytes": 1 << 20}, ValueError, "block_bytes"),
        ({"pool_bytes": 0}, ValueError, "at least 1"),
        ({"pool_bytes": 1.5}, TypeError, "int"),
        ({"block_bytes": 5000}, ValueError, "multiple of 4096"),
        ({"writer_threads": 0}, ValueError, "at least 1"),
        ({"max_in_flight": 0}, ValueError, "at least 1"),
        ({"max_in_flight": True}, TypeError, "int"),
        ({"when_busy": "never"}, ValueError, "when_busy"),
    ],
)
def test_invalid_options_are_refused(options, kind, words):
    with pytest.raises(kind, match=words):
        stillframe.Engine(**options)


def test_the_environment_sets_the_default_cap(monkeypatch):
    for text, nbytes in (
        ("33554432", 32 << 20),
        ("512MiB", 512 << 20),
        ("1 gib", 1 << 30),
    ):
        monkeypatch.setenv("STILLFRAME_POOL_BYTES", text)
        with stillframe.Engine() as engine:
            assert engine.stats()["pool_bytes"] == nbytes
        with stillframe.Engine(pool_bytes=16 << 20) as engine:
            assert engine.stats()["pool_bytes"] == 16 << 20
    for text in ("lots", "4 XB", "-1"):
        monkeypatch.setenv("STILLFRAME_POOL_BYTES", text)
        with pytest.raises(ValueError, match="STILLFRAME_POOL_BYTES"):
            stillframe.Engine()
    monkeypatch.setenv("STILLFRAME_POOL_BYTES", "1MiB")
    with pytest.raises(ValueError, match="STILLFRAME_POOL_BYTES"):
        stillframe.Engine()


def test_a_closed_engine_refuses_and_its_handles_still_answer(tmp_path):
    engine = stillframe.Engine(pool_bytes=32 << 20)
    with fault("rename"):
        failed = stillframe.async_save(STATE, tmp_path / "bad.pt", engine=engine)
        handle = stillframe.async_save(STATE, tmp_path / "a.pt", engine=engine)
        engine.close()  # raises no errors of saves
        engine.close()
    assert handle.done() and handle.result().nbytes
    assert isinstance(failed.exception(), stillframe.SaveError)
    with pytest.raises(stillframe.StillframeError, match="closed"):
        stillframe.async_save(STATE, tmp_path / "b.pt", engine=engine)
    with pytest.raises(stillframe.StillframeError, match="closed"):
        engine.warm_up(1)


def test_save_of_a_signal_handler_completes_while_the_interrupted_call_waits(tmp_path):
    """The nested save takes an extra slot and finishes while the interrupted call waits."""
    inner: list[stillframe.SaveReport] = []

    def handler(signum: int, frame: object) -> None:
        inner.append(stillframe.save({"w": torch.ones(7)}, tmp_path / "inner.pt", engine=engine))

    old = signal.signal(signal.SIGALRM, handler)
    try:
        with slow("fdatasync", 0.4, sticky=False), stillframe.Engine(max_in_flight=1) as engine:
            stillframe.async_save(STATE, tmp_path / "a.pt", engine=engine)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            # Waits for the slot of the first save; the handler runs during that wait.
            outer = stillframe.async_save(STATE, tmp_path / "b.pt", engine=engine)
            assert inner and any("beyond max_in_flight" in s for s in inner[0].fallbacks)
            outer.result()
    finally:
        signal.signal(signal.SIGALRM, old)
    assert loads_as(tmp_path / "inner.pt", torch.ones(7)) and loads_as(
        tmp_path / "b.pt", STATE["w"]
    )


def test_an_exception_from_a_signal_handler_ends_the_wait_and_gives_the_slot_back(tmp_path):
    class Stop(Exception):
        pass

    def handler(signum: int, frame: object) -> None:
        raise Stop

    old = signal.signal(signal.SIGALRM, handler)
    try:
        block = 16 << 10
        with stillframe.Engine(pool_bytes=block, block_bytes=block, max_in_flight=1) as engine:
            with slow("pwrite", 0.05):
                signal.setitimer(signal.ITIMER_REAL, 0.1)
                with pytest.raises(Stop):  # the captured bytes exceed the pool
                    stillframe.async_save(STATE, tmp_path / "a.pt", engine=engine)
            signal.setitimer(signal.ITIMER_REAL, 0)
            stillframe.save({"w": torch.ones(2)}, tmp_path / "b.pt", engine=engine)
            with held("fdatasync"):
                handle = stillframe.async_save(STATE, tmp_path / "c.pt", engine=engine)
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                with pytest.raises(Stop):
                    handle.result()
            handle.result()
    finally:
        signal.signal(signal.SIGALRM, old)
    assert not (tmp_path / "a.pt").exists() and loads_as(tmp_path / "c.pt", STATE["w"])


def test_many_threads_may_save_at_a_time(tmp_path):
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for k in range(5):
                w = torch.full((50_000,), float(10 * i + k))
                stillframe.async_save({"w": w}, tmp_path / f"{i}.pt").result()
                assert loads_as(tmp_path / f"{i}.pt", w)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_many_saves_leak_nothing(tmp_path):
    def figures() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    with stillframe.Engine(pool_bytes=32 << 20) as engine:
        for _ in range(20):
            stillframe.async_save(STATE, tmp_path / "a.pt", engine=engine, durable=False)
        engine.warm_up(32 << 20)
        stillframe.wait_all()
        before = figures(), engine.stats()["committed_bytes"]
        for _ in range(60):
            stillframe.async_save(STATE, tmp_path / "a.pt", engine=engine, durable=False)
        stillframe.wait_all()
        assert (figures(), engine.stats()["committed_bytes"]) == before


def test_saved_tensor_is_released_after_its_copy(tmp_path):
    import weakref

    model, optimizer, step = trained()
    with held("fdatasync"):
        handle = stillframe.async_save({"w": model.weight}, tmp_path / "a.pt")
        reference = weakref.ref(model.weight)
        handle.wait_staged()
        del model, optimizer, step
        while reference() is not None:
            gc.collect()
            time.sleep(0.01)
        assert not handle.done()
    handle.result()
