"""The system refuses to start threads: the messages, and that everything works again later."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import pytest
import stillframe
import torch
from stillframe._base import threads
from stillframe._lightning.work import WaitProgressDisplay
from stillframe._save import completion
from stillframe.testing import fault

SAYS = "another thread: raise the limit on processes"


@contextmanager
def no_thread_of_python() -> Iterator[None]:
    """Refuse Python threads, as if the process had reached its limit."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        # the second one exists since 3.13
        for name in ("_start_new_thread", "_start_joinable_thread"):
            if hasattr(threading, name):
                patch.setattr(threading, name, refuse)
        yield


@contextmanager
def no_thread_of_the_core() -> Iterator[None]:
    with fault("thread_create", sticky=True, err=errno.EAGAIN):
        yield


def save(path: Path) -> None:
    with stillframe.Engine() as engine:
        stillframe.save({"n": 2}, path, engine=engine)


@pytest.mark.parametrize("call", [save, stillframe.load], ids=["save", "load"])
def test_refused_thread_is_reported_with_a_remedy(tmp_path, call):
    path = tmp_path / "last.pt"
    stillframe.save({"n": 1, "t": torch.ones(3)}, path)
    with no_thread_of_the_core(), pytest.raises(BlockingIOError, match=SAYS) as raised:
        call(path)
    assert raised.value.errno == errno.EAGAIN
    assert stillframe.load(path)["n"] == 1
    call(path)


def test_first_save_without_a_thread_raises_and_the_exit_takes_the_notices(monkeypatch):
    """The core's notices are those of the whole process, so this test takes none of them."""
    takers = []
    monkeypatch.setattr(completion._core, "notice_stop", lambda: None)
    monkeypatch.setattr(
        completion, "_process_notices", lambda: takers.append(threading.current_thread())
    )
    of_a_new_process = completion._CompletionThread()
    with no_thread_of_python(), pytest.raises(BlockingIOError, match=SAYS):
        of_a_new_process.start()
    of_a_new_process.stop()
    assert takers == [threading.current_thread()]


def test_starting_a_thread_twice_is_not_reported_as_refused():
    thread = threading.Thread(target=print, args=("",))
    threads.start(thread)
    with pytest.raises(RuntimeError, match="once"):
        threads.start(thread)
    thread.join()


def test_callbacks_that_get_no_thread_are_called_later(caplog):
    callbacks, called = completion._CallbackThread(), list[int]()
    with no_thread_of_python():
        callbacks.put(lambda: called.append(1))
    assert SAYS in caplog.text
    assert not called
    callbacks.put(lambda: called.append(2))
    callbacks.finish()
    assert called == [1, 2]


def test_callbacks_that_never_get_a_thread_are_called_at_the_end():
    callbacks, called = completion._CallbackThread(), list[int]()
    with no_thread_of_python():
        callbacks.put(lambda: called.append(1))
    callbacks.finish()
    assert called == [1]


def test_wait_returns_although_no_thread_can_print_its_line(tmp_path):
    handle = stillframe.async_save({"n": 1}, tmp_path / "last.pt")
    with no_thread_of_python(), WaitProgressDisplay([handle]):
        handle.result()


def test_hold_until_fails_if_no_thread_can_wait_for_the_process():
    writer = get_context("fork").Process(target=time.sleep, args=(60,))
    writer.start()
    try:
        with stillframe.Engine() as engine:
            snap = stillframe.snapshot({"t": torch.ones(3)}, engine=engine)
            descriptors = os.listdir("/proc/self/fd")
            with no_thread_of_python(), pytest.raises(BlockingIOError, match=SAYS):
                snap.hold_until(writer)
            assert os.listdir("/proc/self/fd") == descriptors
            snap.release()
            assert engine.stats()["leased_bytes"] == 0
    finally:
        writer.kill()
        writer.join()
