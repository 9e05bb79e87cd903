"""Handles in coroutines, futures, timeouts and exits."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import logging
import sys
import threading
import time
import weakref

import pytest
import stillframe
import torch
from fix_waits import eventually
from stillframe import _core
from stillframe._save import completion
from stillframe._save.handle import Deadline, wait_for_end
from stillframe.testing import fault, held, slow

STATE = {"w": torch.arange(1000.0)}


def test_a_coroutine_awaits_the_report_while_others_run(tmp_path):
    async def main() -> int:
        handle = stillframe.async_save(STATE, tmp_path / "a.pt")
        turns = 0
        waiting = asyncio.ensure_future(handle)
        while not waiting.done():
            await asyncio.sleep(0.001)
            turns += 1
            if turns == 4:
                hold.close()
        assert (await waiting).nbytes == (await handle).nbytes == (tmp_path / "a.pt").stat().st_size
        return turns

    threads = threading.active_count()
    with contextlib.ExitStack() as hold:
        hold.enter_context(held("fdatasync"))
        assert asyncio.run(main()) >= 4
    assert threading.active_count() <= threads + 2  # completion and callbacks; no thread polls


def test_several_coroutines_await_one_save_and_all_have_its_error(tmp_path):
    async def main() -> None:
        handle = stillframe.async_save(STATE, tmp_path / "a.pt")
        results = await asyncio.gather(handle, handle, handle, return_exceptions=True)
        assert len(results) == 3
        assert all(isinstance(each, stillframe.SaveError) for each in results)

    with slow("fdatasync", 0.1), fault("rename"):
        asyncio.run(main())
    stillframe.wait_all()  # the error was collected already


def test_a_cancelled_coroutine_leaves_the_save_alone(tmp_path):
    async def main() -> stillframe.SaveHandle:
        handle = stillframe.async_save(STATE, tmp_path / "a.pt")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(handle, 0.05)
        assert not handle.done()
        assert not handle._outcome._wakers  # the cancelled waiter is gone at once
        return handle

    with held("fdatasync"):
        handle = asyncio.run(main())
    assert handle.result().nbytes
    assert not handle.upload_completion.cancelled()


# caused by asyncio itself
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_save_awaited_in_a_closed_event_loop_still_calls_its_callbacks(tmp_path, caplog):
    called: list[object] = []
    loop = asyncio.new_event_loop()
    with held("fdatasync"):
        handle = stillframe.async_save(STATE, tmp_path / "a.pt")
        task = asyncio.ensure_future(handle, loop=loop)
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()
        handle.add_done_callback(called.append)
    assert handle.result().nbytes
    stillframe.wait_all()
    while not called:
        time.sleep(0.01)
    assert called == [handle]
    assert not [each for each in caplog.records if each.name == "stillframe"]
    task._log_destroy_pending = False  # the test has closed its loop on purpose


def test_awaiting_outside_asyncio_says_what_to_do(tmp_path):
    handle = stillframe.async_save(STATE, tmp_path / "a.pt")
    with pytest.raises(RuntimeError, match="needs a running asyncio loop"):
        handle.__await__().send(None)
    handle.result()


def test_callback_that_exits_does_not_stop_later_ones(tmp_path, caplog):
    called = threading.Event()
    with slow("fdatasync", 0.05):
        for function in (lambda handle: sys.exit(3), lambda handle: called.set()):
            handle = stillframe.async_save({}, tmp_path / "a.pt")
            handle.add_done_callback(function)
            handle.result()
    assert called.wait(60)
    assert [each.getMessage() for each in caplog.records] == ["stillframe: a callback failed"]


def test_a_callback_that_fails_is_logged_whether_the_save_has_ended_or_not(tmp_path, caplog):
    def fails(handle: stillframe.SaveHandle) -> None:
        raise ArithmeticError(handle.path)

    with held("fdatasync"):
        handle = stillframe.async_save(STATE, tmp_path / "a.pt")
        handle.add_done_callback(fails)
    assert handle.result().nbytes
    while not caplog.records:
        time.sleep(0.001)
    handle.add_done_callback(fails)
    assert [each.getMessage() for each in caplog.records] == ["stillframe: a callback failed"] * 2


def test_wait_for_end_does_not_collect_the_error(tmp_path):
    with fault("rename"):
        handle = stillframe.async_save(STATE, tmp_path / "a.pt")
        wait_for_end(handle)
    with pytest.raises(stillframe.SaveError):
        stillframe.wait_all()


def test_remaining_timeout_is_never_negative():
    deadline = Deadline(0.001)
    time.sleep(0.002)
    assert deadline.left() == 0


def test_an_ended_and_a_skipped_save_are_awaited_at_once(tmp_path):
    async def main() -> None:
        done = stillframe.async_save(STATE, tmp_path / "a.pt")
        done.result()
        assert (await done).nbytes
        with (
            stillframe.Engine(pool_bytes=32 << 20, max_in_flight=1, when_busy="skip") as engine,
            held("fdatasync"),
        ):
            stillframe.async_save(STATE, tmp_path / "b.pt", engine=engine)
            skipped = stillframe.async_save(STATE, tmp_path / "c.pt", engine=engine)
            assert skipped.state == "skipped"
            assert await skipped is None
            assert skipped.upload_completion.result() is None

    asyncio.run(main())


def test_a_cancelled_save_raises_in_its_coroutine(tmp_path):
    async def main() -> None:
        with held("fdatasync"):
            handle = stillframe.async_save(STATE, tmp_path / "a.pt")
            assert handle.cancel()
        with pytest.raises(concurrent.futures.CancelledError):
            await handle

    asyncio.run(main())


@pytest.mark.parametrize("when_busy", ["wait", "skip", "raise"])
def test_save_always_saves_and_returns_its_report(tmp_path, when_busy):
    with (
        slow("fdatasync", 0.2),
        stillframe.Engine(pool_bytes=32 << 20, max_in_flight=1, when_busy=when_busy) as engine,
    ):
        first = stillframe.async_save(STATE, tmp_path / "a.pt", engine=engine)
        report = stillframe.save(STATE, tmp_path / "b.pt", engine=engine)
        assert first.done()
    assert isinstance(report, stillframe.SaveReport)
    assert report.nbytes == (tmp_path / "b.pt").stat().st_size


def test_timeout_message_has_the_time_and_the_progress(tmp_path):
    with held("fdatasync"):
        handle = stillframe.async_save(STATE, tmp_path / "a.pt")
        handle.wait_staged()
        with pytest.raises(TimeoutError, match=r"a\.pt after 0\.01 s: \w+, not durable yet"):
            handle.result(0.01)
        with pytest.raises(TimeoutError, match=r"not durable yet"):
            handle.exception(timeout=0)
        with pytest.raises(TimeoutError, match=r"after 0\.02 s: 1 save .*a\.pt: \w+"):
            stillframe.wait_all(0.02)
    handle.result()


def test_a_timeout_of_a_copy_says_that_it_is_not_staged(tmp_path):
    parameter = torch.nn.Parameter(torch.zeros(100_000))
    optimizer = torch.optim.AdamW([parameter])
    for _ in range(5):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    with held("lane_copy"):
        handle = stillframe.async_save(
            {"p": parameter.data, "o": optimizer.state_dict()}, tmp_path / "a.pt"
        )
        with pytest.raises(TimeoutError, match="after 0 s: staging, not staged yet"):
            handle.wait_staged(0)
        with pytest.raises(TimeoutError, match="the snapshot after 0 s: not copied yet"):
            stillframe.snapshot({"o": optimizer.state_dict()}, overlap=True).wait(0)
    handle.result()


def test_a_report_reads_as_sentences(tmp_path):
    path = tmp_path / "a.pt"
    report = stillframe.save({"x": torch.zeros(250_000), "y": torch.zeros(3)}, path)
    text = str(report)
    assert text.startswith(f"{path}: 1.01 MB in 2 tensors, done after ")
    assert "the call took" in text and "steps waited 0 ms" in text
    lines = str(stillframe.SaveReport(**{**vars(report), "fallbacks": ("One.", "Two.")})).split(
        "\n"
    )
    assert [line.strip() for line in lines[1:]] == ["One.", "Two."]


def test_a_failure_that_was_logged_is_raised_once_more_by_wait_all(tmp_path, caplog):
    with fault("rename"), caplog.at_level(logging.ERROR, "stillframe"):
        stillframe.async_save(STATE, tmp_path / "a.pt")
        with pytest.raises(stillframe.SaveError):
            stillframe.wait_all()
    stillframe.wait_all()


def test_slow_callback_of_a_future_delays_no_other_save(tmp_path):
    go_on, called = threading.Event(), threading.Event()

    def slowly(_: object) -> None:
        called.set()
        assert go_on.wait(60)

    with slow("fdatasync", 0.1):
        first = stillframe.async_save(STATE, tmp_path / "a.pt").upload_completion
        first.add_done_callback(slowly)
        second = stillframe.async_save(STATE, tmp_path / "b.pt").upload_completion
    assert called.wait(60)
    try:
        assert second.result(60) is not None
    finally:
        go_on.set()


def test_notice_without_memory_does_not_stop_later_ones(monkeypatch):
    waited, logged = list[int](), list[int]()

    def notice_wait() -> tuple[int, int, str]:
        waited.append(1)
        if len(waited) < 3:
            raise MemoryError
        what = _core.NOTICE_TEXT if len(waited) < 5 else _core.NOTICE_STOP
        return what, 0, ""

    def refuse(*_: object) -> None:
        logged.append(1)
        if len(logged) != 4:
            raise MemoryError

    monkeypatch.setattr(_core, "notice_wait", notice_wait)
    monkeypatch.setattr(completion.log, "warning", refuse)
    monkeypatch.setattr(completion.log, "exception", refuse)
    completion._process_notices()
    assert (len(waited), len(logged)) == (5, 4)


def test_callback_that_has_run_is_not_kept_until_the_next_one(tmp_path):
    class Kept:
        def durable(self, path, report):
            seen.append(path)

    seen, kept = [], Kept()
    alive = weakref.ref(kept)
    stillframe.async_save(STATE, tmp_path / "c.pt", on_durable=kept.durable).result(60)
    assert eventually(lambda: seen)
    del kept

    def is_freed():
        gc.collect()
        return alive() is None

    assert eventually(is_freed, 10)
