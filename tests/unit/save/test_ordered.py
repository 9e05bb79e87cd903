"""External work in the log's order: Ctrl-C, exit, nested calls, and work that starts early."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest
from fix_waits import eventually
from stillframe import _core
from stillframe._base import paths
from stillframe._save import completion, ordered
from stillframe.errors import StillframeError

KEY = b"/test-of-ordered"
LONG_S = 30.0


def test_work_that_reaches_the_head_during_its_submission_is_done(monkeypatch):
    done, made = threading.Event(), _core.LogWork

    class Entry:
        def __init__(self, key: bytes, kind: int) -> None:
            self._entry = made(key, kind)
            self.number, self.end = self._entry.number, self._entry.end

        def append(self) -> None:
            self._entry.append()
            assert done.wait(LONG_S), "its turn came, and nobody knew the work"

    ordered.submit(KEY, _core.WORK_SAVE, lambda _: True)  # starts the thread
    monkeypatch.setattr(_core, "LogWork", Entry)
    ordered.submit(KEY, _core.WORK_SAVE, lambda _: not done.set())
    assert _core.log_drain(LONG_S)


def test_ctrl_c_in_a_submission_leaves_no_entry_that_blocks_the_log(monkeypatch):
    def interrupt() -> bool:
        raise KeyboardInterrupt

    worker = ordered._Worker()
    monkeypatch.setattr(worker, "_start", interrupt)
    with pytest.raises(KeyboardInterrupt):
        worker.submit(KEY, _core.WORK_SAVE, lambda _: True)
    assert not worker._waiting
    assert _core.log_drain(LONG_S)


def submits_from_another_thread() -> bool:
    """Return whether another thread can submit work, and has done so after some time."""
    arguments = (KEY, _core.WORK_SAVE, lambda _: True)
    other = threading.Thread(target=ordered.submit, args=arguments, daemon=True)
    other.start()
    other.join(LONG_S)
    return not other.is_alive()


@pytest.mark.parametrize("handler_raises", [False, True])
def test_signal_in_a_submission_that_starts_the_thread_blocks_no_other(handler_raises):
    """The handler runs at each line of `_start`. It waits for another submission, or raises."""
    start = ordered._Worker._start.__code__
    lines_left = 0
    others: list[bool] = []

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines_left
        if frame.f_code is start and event == "line":
            lines_left -= 1
            if lines_left == 0 and handler_raises:
                raise KeyboardInterrupt
            if lines_left == 0:
                others.append(submits_from_another_thread())
        return trace

    def submit_traced() -> None:
        old = sys.gettrace()
        sys.settrace(trace)
        try:
            ordered.submit(KEY, _core.WORK_SAVE, lambda _: True)
        finally:
            sys.settrace(old)

    line = 0
    while lines_left <= 0:  # until a submission has fewer lines
        line += 1
        lines_left = line
        if handler_raises and line > 1:
            others.append(submits_from_another_thread())
        with contextlib.suppress(KeyboardInterrupt):
            submit_traced()
        assert all(others), f"line {line} of _start"
    assert line > 2 and others
    assert _core.log_drain(LONG_S)


def test_thread_that_did_work_at_exit_may_wait_for_the_log():
    child = os.fork()  # the child has no thread for external work
    if child == 0:
        inside: list[bool] = []
        worker = ordered._worker
        worker._start = lambda: False  # it is too late to start a thread
        worker.submit(KEY, _core.WORK_SAVE, lambda _: not inside.append(worker.is_current()))
        os._exit(0 if inside == [True] and not worker.is_current() else 1)
    assert os.waitpid(child, 0)[1] == 0


def exit_status_of_child(code: Callable[[], bool]) -> int:
    """Fork, run `code` in the child, which has none of our threads; return its exit status."""
    child = os.fork()
    if child == 0:
        status = 2
        try:
            status = 0 if code() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_forked_child_starts_its_own_thread_for_external_work():
    ordered.submit(KEY, _core.WORK_SAVE, lambda _: True)
    assert _core.log_drain(LONG_S)  # the parent's thread runs
    done: list[bool] = []

    def work_of_the_child() -> bool:
        ordered.submit(KEY, _core.WORK_SAVE, lambda _: not done.append(True))
        return _core.log_drain(LONG_S) and done == [True]

    assert exit_status_of_child(work_of_the_child) == 0


def test_exit_without_a_thread_does_earlier_work_first():
    def two() -> bool:
        done: list[int] = []
        worker = ordered._worker
        worker._start = lambda: True  # the thread never runs
        worker.submit(KEY, _core.WORK_SAVE, lambda _: not done.append(1))
        worker._start = lambda: False
        worker.submit(KEY, _core.WORK_SAVE, lambda _: not done.append(2))
        return done == [1, 2]

    assert exit_status_of_child(two) == 0


def test_work_submitted_as_the_thread_ends_gets_another():
    def again() -> bool:
        done: list[bool] = []
        take, ends = _core.log_work_next, [None]
        _core.log_work_next = lambda: ends.pop() if ends else take()
        ordered.submit(KEY, _core.WORK_SAVE, lambda _: not done.append(True))
        return _core.log_drain(LONG_S) and done == [True]

    assert exit_status_of_child(again) == 0


def test_work_submitted_while_the_thread_leaves_gets_another():
    """The submission still finds the thread that ends, so that thread has to see the work."""

    def again() -> bool:
        done: list[bool] = []
        take, ends = _core.log_work_next, [None]

        class Leaving(dict[str, Any]):
            def clear(self) -> None:
                if not done and not ordered._worker._waiting:
                    ordered.submit(KEY, _core.WORK_SAVE, lambda _: not done.append(True))
                super().clear()

        ordered._worker._thread = Leaving()
        _core.log_work_next = lambda: ends.pop() if ends else take()
        ordered._worker._start()
        return eventually(lambda: done == [True], LONG_S) and _core.log_drain(LONG_S)

    assert exit_status_of_child(again) == 0


def test_cancelled_work_is_dropped_before_it_runs():
    go, done = threading.Event(), list[bool]()
    ordered.submit(KEY, _core.WORK_SAVE, lambda _: go.wait(LONG_S))
    entry = ordered.submit(KEY, _core.WORK_SAVE, lambda _: not done.append(True))
    ordered.end(entry, True)
    assert entry.number not in ordered._worker._waiting
    go.set()
    assert _core.log_drain(LONG_S) and done == []


def test_work_is_refused_once_the_exit_has_begun_on_another_thread(monkeypatch):
    monkeypatch.setattr(completion.thread, "_exit_thread", threading.Thread())
    with pytest.raises(StillframeError, match="the interpreter is exiting"):
        ordered.submit(KEY, _core.WORK_SAVE, lambda _: True)
    assert not ordered._worker._waiting and _core.log_drain(LONG_S)


def test_failed_remove_is_named_and_the_next_one_runs(caplog):
    gone: list[str] = []

    def fails(path: str) -> None:
        raise OSError(30, "read-only")

    with caplog.at_level(logging.WARNING, "stillframe"):
        ordered.submit(KEY, _core.WORK_SAVE, lambda _: True)
        ordered.submit_remove("/one", b"/one", fails)
        ordered.submit_remove("/two", b"/two", gone.append)
        assert _core.log_drain(LONG_S)
    assert gone == ["/two"]
    (line,) = (each.getMessage() for each in caplog.records)
    assert line.startswith("stillframe: /one could not be removed: ") and "read-only" in line


def test_work_that_waits_for_its_own_name_is_refused():
    answers: list[Any] = []

    def work(after_good: bool) -> bool:
        for wait in (
            ordered.wait_for_saves_of_key,
            lambda key: ordered.wait_for_saves_of_path(os.fsdecode(key)),
        ):
            with pytest.raises(StillframeError) as refused:
                wait(KEY)
            answers.append(refused)
        return True

    ordered.submit(KEY, _core.WORK_SAVE, work)
    assert _core.log_drain(LONG_S) and len(answers) == 2


def test_load_through_a_link_waits_for_its_new_target(tmp_path):
    link, go = tmp_path / "last", threading.Event()
    for name in ("old", "new"):
        (tmp_path / name).write_text(name)
    link.symlink_to("old")

    def relink(after_good: bool) -> bool:
        assert go.wait(LONG_S)
        link.unlink()
        link.symlink_to("new")
        return True

    ordered.submit(paths.key(link, follow_link=False), _core.WORK_LINK, relink)
    with ThreadPoolExecutor(1) as reader:
        opened = reader.submit(ordered.open_after_earlier_saves, link)
        threading.Timer(0.2, go.set).start()
        with open(opened.result(LONG_S).fileno(), closefd=False) as file:
            assert file.read() == "new"
