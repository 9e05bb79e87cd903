"""The Outcome of a save: how it ended, and which caller collects its error."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest
from stillframe._save import completion
from stillframe._save.outcome import Outcome, take_uncollected_failures


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    take_uncollected_failures(first_only=False)
    yield
    take_uncollected_failures(first_only=False)


def test_ended_save_has_its_outcome(monkeypatch):
    """Other threads may look as soon as the save counts as ended."""
    outcome, error = Outcome("a.pt", None), RuntimeError("no")
    seen: list[Any] = []

    class Watched(list[Any]):
        def append(self, end: Any) -> None:
            assert not outcome.settled
            super().append(end)
            uncollected = outcome.take_uncollected()
            seen.append((outcome.settled, outcome.report, outcome.error, uncollected))

    monkeypatch.setattr(outcome, "_ends", Watched())
    outcome.settle(None, error)
    assert seen == [(True, None, error, error)]


def test_collected_error_is_not_reported_again():
    outcome = Outcome("a.pt", None)
    outcome.settle(None, RuntimeError("no"))
    outcome.collect()
    outcome.collect()
    assert outcome.is_error_collected() and take_uncollected_failures(first_only=False) == []


@pytest.mark.parametrize("seen", [False, True])
def test_uncollected_error_is_logged_when_its_save_is_dropped(seen, caplog):
    outcome = Outcome("a.pt", None)
    outcome.settle(None, RuntimeError("no space"))
    if seen:
        outcome.collect()
    del outcome
    lines = [] if seen else ["stillframe: a save failed and nobody asked: no space"]
    assert [record.getMessage() for record in caplog.records] == lines


def test_cancelled_save_is_not_reported_as_an_error(caplog):
    outcome = Outcome("a.pt", None)
    outcome.settle(None, CancelledError("cancelled"))
    assert take_uncollected_failures(first_only=False) == []
    with caplog.at_level(logging.ERROR):
        del outcome
    assert not caplog.records


def test_failed_save_is_not_called_durable():
    durable: list[object] = []
    over = threading.Event()
    outcome = Outcome("a.pt", lambda path, report: durable.append(path))
    assert outcome.call_at_end(over.set)  # called after the other one
    outcome.settle(None, RuntimeError("no"))
    outcome.notify()
    assert over.wait(60) and durable == []


def test_thread_that_stopped_waiting_is_not_woken():
    woken: list[object] = []
    outcome = Outcome("a.pt", None)

    def wake() -> None:
        woken.append(outcome)

    assert outcome.call_directly_at_end(wake)
    outcome.cancel_direct_call(wake)
    outcome.settle(None, None)
    outcome.notify()
    assert woken == []


def test_error_raised_by_wait_all_is_not_logged(caplog):
    outcome = Outcome("a.pt", None)
    outcome.settle(None, RuntimeError("no space"))
    (failure,) = take_uncollected_failures(first_only=True)
    assert failure.collected and outcome.is_error_collected()
    del outcome
    assert not caplog.records


def test_asking_a_future_for_its_error_collects_it():
    outcome = Outcome("a.pt", None)
    future = outcome.upload_future(None)
    outcome.settle(None, RuntimeError("no space"))
    outcome.notify()
    assert not outcome.is_error_collected()
    assert str(future.exception()) == "no space"
    assert outcome.is_error_collected() and take_uncollected_failures(first_only=False) == []


def test_the_futures_of_a_save_that_was_cancelled_are_cancelled():
    outcome = Outcome("a.pt", None)
    futures = [outcome.upload_future(None), outcome.staging_future(None, lambda: False)]
    outcome.settle(None, CancelledError("cancelled"))
    outcome.notify()
    assert [future.cancelled() for future in futures] == [True, True]


def test_future_already_done_is_left_unchanged():
    outcome = Outcome("a.pt", None)
    staging, upload = outcome.staging_future(None, lambda: True), outcome.upload_future(None)
    assert staging.done() and upload.cancel()  # as its user may
    outcome.settle(None, RuntimeError("no space"))
    outcome.notify()
    assert staging.result() is None and upload.cancelled()


@pytest.mark.parametrize("over", [False, True])
def test_error_dropped_during_exit_is_logged_after_the_last_print(over, monkeypatch, caplog):
    monkeypatch.setattr(completion.thread, "_exit_thread", threading.current_thread())
    monkeypatch.setattr(completion.thread, "drain_is_over", over)
    outcome = Outcome("a.pt", None)
    outcome.settle(None, RuntimeError("no space"))
    del outcome
    assert len(caplog.records) == over


def test_save_does_not_keep_its_futures_alive():
    outcome = Outcome("a.pt", None)
    futures = [outcome.staging_future(None, lambda: False), outcome.upload_future(None)]
    known = [weakref.ref(future) for future in futures]
    assert outcome.staging_future(None, lambda: False) is futures[0]
    futures.clear()
    assert [future() for future in known] == [None, None]
