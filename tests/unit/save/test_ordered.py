"""Work in the order of the log, where it meets Ctrl-C, the exit, its own calls or an early turn."""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from stillframe import _core
from stillframe._base import paths
from stillframe._save import ordered
from stillframe.errors import StillframeError

KEY = b"/test-of-ordered"
LONG_S = 30.0


def test_work_whose_turn_comes_before_its_submission_is_over_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done, made = threading.Event(), _core.LogWork

    class Entry:
        def __init__(self, key: bytes, kind: int) -> None:
            self._entry = made(key, kind)
            self.number, self.end = self._entry.number, self._entry.end

        def append(self) -> None:
            self._entry.append()
            assert done.wait(LONG_S), "its turn came, and nobody knew the work"

    ordered.submit(KEY, _core.WORK_SAVE, lambda _: True)  # so that the thread runs
    monkeypatch.setattr(_core, "LogWork", Entry)
    ordered.submit(KEY, _core.WORK_SAVE, lambda _: not done.set())
    assert _core.log_drain(LONG_S)


def test_ctrl_c_in_a_submission_leaves_nothing_that_the_log_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt() -> bool:
        raise KeyboardInterrupt

    worker = ordered._Worker()
    monkeypatch.setattr(worker, "_start", interrupt)
    with pytest.raises(KeyboardInterrupt):
        worker.submit(KEY, _core.WORK_SAVE, lambda _: True)
    assert not worker._waiting
    assert _core.log_drain(LONG_S)


def test_who_has_done_work_at_exit_may_wait_for_the_log_again() -> None:
    child = os.fork()  # in which no thread of ours takes the turn
    if child == 0:
        inside: list[bool] = []
        worker = ordered._worker
        worker._start = lambda: False  # type: ignore[method-assign]  # too late for a thread
        worker.submit(KEY, _core.WORK_SAVE, lambda _: not inside.append(worker.is_current()))
        os._exit(0 if inside == [True] and not worker.is_current() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_remove_that_fails_is_named_and_the_next_one_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gone: list[str] = []

    def fails(path: str) -> None:
        raise OSError(30, "read-only")

    with caplog.at_level(logging.WARNING, "stillframe"):
        ordered.submit(KEY, _core.WORK_SAVE, lambda _: True)
        ordered.submit_remove("/one", b"/one", fails)
        ordered.submit_remove("/two", b"/two", gone.append)
        assert _core.log_drain(LONG_S)
    assert gone == ["/two"]
    (said,) = (each.getMessage() for each in caplog.records)
    assert said.startswith("stillframe: /one could not be removed: ") and "read-only" in said


def test_work_that_waits_for_its_own_name_is_refused() -> None:
    answers: list[Any] = []

    def work(after_good: bool) -> bool:
        for wait in (ordered.wait_for_key, lambda key: ordered.wait_for_path(os.fsdecode(key))):
            with pytest.raises(StillframeError) as refused:
                wait(KEY)
            answers.append(refused)
        return True

    ordered.submit(KEY, _core.WORK_SAVE, work)
    assert _core.log_drain(LONG_S) and len(answers) == 2


def test_a_link_that_is_about_to_be_made_anew_is_read_as_the_new_one(tmp_path: Path) -> None:
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
        opened = reader.submit(ordered.open_in_order, link)
        threading.Timer(0.2, go.set).start()
        with open(opened.result(LONG_S).fileno(), closefd=False) as file:
            assert file.read() == "new"
