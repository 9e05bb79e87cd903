"""`RunOnceThread`: one thread runs the function, however many callers start it."""

from __future__ import annotations

import threading

import pytest
from stillframe._base import threads

LONG_S = 60


@pytest.fixture
def counted():
    """A thread whose function notes which thread ran it and waits for the end of the test."""
    runs: list[threading.Thread] = []
    over = threading.Event()

    def run():
        runs.append(threading.current_thread())
        over.wait(LONG_S)

    single = threads.RunOnceThread(run, "sf-test")
    single.runs, single.over = runs, over
    yield single
    over.set()


def end(single):
    """Let the function return and wait for its thread."""
    assert single.is_started and single.is_alive()
    single.over.set()
    single.join()
    assert not single.prevent() and not single.is_alive()


def test_two_callers_at_the_same_time_run_the_function_once(counted, monkeypatch):
    both = threading.Barrier(2)
    started: list[threading.Thread] = []
    start = threads.start

    def start_when_both_are_here(thread):
        both.wait(LONG_S)
        start(thread)
        started.append(thread)

    monkeypatch.setattr(threads, "start", start_when_both_are_here)
    callers = [threading.Thread(target=counted.start) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(LONG_S)
    counted.over.set()
    for thread in started:
        thread.join(LONG_S)
    assert len(started) == 2 and len(counted.runs) == 1


def test_signal_handler_may_start_the_thread_in_the_middle_of_a_start(counted, monkeypatch):
    start = threads.start
    started: list[threading.Thread] = []

    def start_within_a_start(thread):
        started.append(thread)
        if len(started) == 1:
            assert counted.start()
        start(thread)

    monkeypatch.setattr(threads, "start", start_within_a_start)
    assert counted.start()
    end(counted)
    for thread in started:
        thread.join(LONG_S)
    assert len(started) == 2 and len(counted.runs) == 1


def test_prevented_function_never_runs(counted):
    assert not counted.is_started and not counted.is_alive()
    assert counted.prevent() and counted.prevent()
    assert counted.start()
    assert counted.runs == []
    assert not any(thread.name == "sf-test" for thread in threading.enumerate())


def test_running_function_cannot_be_prevented_and_knows_its_thread(counted):
    assert not counted.is_current()
    assert counted.start() and counted.start()
    end(counted)
    assert [thread.name for thread in counted.runs] == ["sf-test"]
    assert not counted.is_current() and not counted.runs[0].is_alive()


def test_join_returns_after_its_timeout_while_the_function_runs(counted):
    counted.start()
    counted.join(0.01)
    assert counted.is_alive()
    end(counted)


def test_thread_is_alive_before_it_runs_the_function_and_join_waits_for_it(counted, monkeypatch):
    held = []
    start = threads.start
    monkeypatch.setattr(threads, "start", held.append)
    counted.start()
    counted.join(0.01)
    assert counted.is_alive() and counted.runs == []
    start(held[0])
    end(counted)


def test_refused_thread_raises_and_may_be_started_later(counted, monkeypatch):
    def refuse(thread):
        raise threads.thread_refused_error()

    with monkeypatch.context() as patch:
        patch.setattr(threads, "start", refuse)
        with pytest.raises(OSError, match="refused to start another thread"):
            counted.start()
    assert counted.start()
    end(counted)
    assert len(counted.runs) == 1


def test_start_returns_false_when_the_interpreter_starts_no_thread_any_more(counted, monkeypatch):
    def too_late(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threads, "start", too_late)
    assert not counted.start()
    assert counted.prevent()
