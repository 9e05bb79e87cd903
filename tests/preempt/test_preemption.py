"""`stillframe.preemption` in one process. preempted.py has the scenarios."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path

import pytest
import stillframe
import torch
from fix_preempt import Ended, steps_in
from fix_processes import run_program
from stillframe._preemption import agreement, in_time
from stillframe._preemption.agreement import NEVER, Counts
from stillframe._save import report
from stillframe.testing import slow

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("preempted")
    run_program(HERE / "preempted.py", directory, timeout=600)
    return directory


@pytest.fixture
def ended(directory):
    """Return a function that tells how a scenario ended."""

    def end_of(name):
        return Ended(*json.loads((directory / name / "ended.json").read_text()))

    return end_of


def stopped_at(output):
    """Return the step at which a scenario says that it stopped."""
    return int(output.rpartition("stopped at ")[2].split()[0])


# ---- the boundary ----


@pytest.mark.parametrize("name", ["own_save", "registered", "saved_at_each_step", "workers"])
def test_last_boundary_is_durable_and_the_process_ends_with_143(directory, ended, name):
    end = ended(name)
    assert (end.status, end.left) == (143, []), end.output
    assert steps_in(directory / name / "last.pt") == stopped_at(end.output) > 0


def test_atexit_functions_run_and_the_code_after_the_block_does_not(ended):
    assert "atexit" in ended("own_save").output
    assert "after the block" not in ended("own_save").output


def test_registered_state_is_durable_when_should_stop_is_true(ended):
    assert "True" in ended("registered").output


def test_latest_finds_the_checkpoint_of_a_preempted_process(directory, ended):
    assert ended("registered").status == 143
    assert stillframe.latest(directory / "registered") == directory / "registered/last.pt"


def test_unchanged_loop_stops_at_the_end_of_a_step(directory, ended):
    end = ended("registered_in_a_loop_of_its_own")
    assert (end.status, end.left) == (143, []), end.output
    assert torch.load(directory / "registered_in_a_loop_of_its_own/last.pt")["steps"] > 1


def test_end_of_the_loop_is_a_boundary(directory, ended):
    assert ended("signalled_behind_the_last_boundary").status == 143
    assert steps_in(directory / "signalled_behind_the_last_boundary/last.pt") == 5


def test_saves_under_way_become_durable(directory, ended):
    assert ended("saves_under_way").status == 143
    for number in range(2):
        assert steps_in(directory / f"saves_under_way/{number}.pt") == 1


# ---- what is not made in time ----


@pytest.mark.leaves_temporaries
@pytest.mark.parametrize("name", ["too_slow", "too_slow_own_save"])
def test_save_that_takes_too_long_is_given_up_with_one_line(directory, ended, name):
    end = ended(name)
    assert (end.status, end.left) == (143, []), end.output
    assert end.output.count("last.pt is given up, and the old file stays: 795 kB of 799 kB") == 1
    assert "saved" not in end.output
    assert steps_in(directory / name / "last.pt") == 1


@pytest.mark.parametrize("name", ["no_boundary", "main_thread_never_returns_to_python"])
def test_process_without_a_boundary_ends_at_the_deadline(directory, ended, name):
    end = ended(name)
    assert (end.status, end.left) == (143, []), end.output
    assert end.output.count("no step boundary was reached within") == 1
    if name == "no_boundary":
        assert steps_in(directory / name / "last.pt") == 1
        assert "atexit" in end.output


@pytest.mark.leaves_temporaries
def test_second_signal_ends_the_process_at_once(directory, ended):
    end = ended("second_signal")
    assert (end.status, end.left) == (143, []), end.output
    assert "a second signal came" in end.output
    assert steps_in(directory / "second_signal/last.pt") == 1


def test_signal_that_a_launcher_repeats_does_not_count_as_a_second_one(directory, ended):
    end = ended("signal_that_is_passed_on")
    assert (end.status, end.output) == (143, "")
    assert steps_in(directory / "signal_that_is_passed_on/last.pt") > 1


# ---- how the process ends ----


@pytest.mark.parametrize(
    ("name", "status", "says"),
    [
        ("previous_handler_returns", 143, "previous 15"),
        ("previous_handler_ends", 7, ""),
        ("other_wakeups", 143, "theirs"),
        ("plain_exit_in_the_block", 143, ""),
        ("exit_with_a_status_in_the_block", 3, ""),
        ("error_in_the_block", 1, "ValueError: of the training"),
    ],
)
def test_block_ends_with_the_expected_status_once_its_saves_are_durable(
    directory, ended, name, status, says
):
    end = ended(name)
    assert (end.status, end.left) == (status, []), end.output
    assert says in end.output
    assert steps_in(directory / name / "last.pt") >= 0  # the signal may come before a step


def test_signal_before_any_line_of_ours_saves_the_last_boundary(ended):
    end = ended("before_any_line")
    assert end.status == 0, end.output
    tried, outside = (int(word) for word in end.output.split()[1::2])
    assert tried > 1000  # otherwise the tracing saw nothing
    assert outside < tried / 10


# ---- children ----


def test_workers_that_got_no_signal_are_ended_too(ended):
    assert (ended("workers_without_the_signal").status, ended("workers").left) == (143, [])


@pytest.mark.parametrize(
    ("name", "status"), [("workers_of_a_killed_parent", -9), ("workers_at_the_deadline", 143)]
)
def test_workers_end_with_their_parent(ended, name, status):
    end = ended(name)
    assert (end.status, end.left) == (status, []), end.output


def test_children_have_the_handlers_installed_before_the_block(ended):
    end = ended("other_children")
    assert (end.status, end.left) == (0, []), end.output
    assert end.output.split("\n")[:3] == ["daemon -15", "process -15", "forked -15"]


# ---- the block itself ----


def test_block_restores_the_handlers_and_its_thread_ends():
    def handler(*_):
        raise AssertionError("nothing is signalled")

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with stillframe.preemption((signal.SIGUSR1, signal.SIGUSR2)) as p:
            assert signal.getsignal(signal.SIGUSR1) != handler
            assert not p.requested and not p.should_stop()
        assert signal.getsignal(signal.SIGUSR1) is handler
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
        assert signal.set_wakeup_fd(-1) == -1
        watching = [each for each in threading.enumerate() if each.name == "sf-preempt"]
        for thread in watching:
            thread.join(10)
            assert not thread.is_alive()
        with pytest.raises(stillframe.StillframeError, match="entered before"):
            p.__enter__()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_exit_status_is_128_plus_the_signal_of_the_block():
    with (
        pytest.raises(SystemExit) as end,
        stillframe.preemption((signal.SIGUSR1,), deadline=20) as p,
    ):
        signal.raise_signal(signal.SIGUSR1)
        assert p.requested and p.should_stop() and p.should_stop()
    assert end.value.code == 128 + signal.SIGUSR1


def test_nested_blocks_restore_the_handlers_in_order():
    """The inner one's previous handler is the outer one's."""
    before = signal.getsignal(signal.SIGUSR1)
    with (
        pytest.raises(SystemExit),
        stillframe.preemption((signal.SIGUSR1,)) as outer,
        stillframe.preemption((signal.SIGUSR1,)) as inner,
    ):
        signal.raise_signal(signal.SIGUSR1)
        assert inner.should_stop()
    assert outer.requested
    assert signal.getsignal(signal.SIGUSR1) == before


def test_only_the_main_thread_may_enter_the_block():
    errors = []

    def enter():
        try:
            stillframe.preemption().__enter__()
        except stillframe.StillframeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "in the main thread" in errors[0]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"signals": signal.SIGTERM}, TypeError),
        ({"signals": "TERM"}, TypeError),
        ({"signals": ("TERM",)}, TypeError),
        ({"signals": ()}, ValueError),
        ({"signals": (signal.SIGKILL,)}, ValueError),
        ({"signals": (99,)}, ValueError),
        ({"deadline": None}, TypeError),
        ({"deadline": "25"}, TypeError),
        ({"deadline": 0}, ValueError),
        ({"deadline": float("nan")}, ValueError),
    ],
)
def test_invalid_arguments_are_refused(arguments, error):
    with pytest.raises(error):
        stillframe.preemption(**arguments)


def test_unusable_registrations_are_refused(tmp_path):
    with stillframe.preemption((signal.SIGUSR1,)) as p:
        with pytest.raises(TypeError, match="callable"):
            p.save({"w": torch.zeros(1)}, tmp_path / "a.pt")
        with pytest.raises(ValueError, match="remote"):
            p.save(dict, "s3://bucket/a.pt")


def test_failed_save_is_logged_and_the_process_ends_as_planned(tmp_path, caplog):
    def fails():
        raise KeyError("no state")

    with (
        pytest.raises(SystemExit) as end,
        stillframe.preemption((signal.SIGUSR1,), deadline=20) as p,
    ):
        p.save(dict, tmp_path / "missing" / "a.pt")
        p.save(fails, tmp_path / "b.pt")
        p.save(lambda: {"n": 1}, tmp_path / "c.pt")
        signal.raise_signal(signal.SIGUSR1)
        assert p.should_stop()
    assert end.value.code == 128 + signal.SIGUSR1
    assert [each.message.partition(" was not saved")[0][-4:] for each in caplog.records] == [
        "a.pt",
        "b.pt",
    ]
    assert stillframe.load(tmp_path / "c.pt") == {"n": 1}


# ---- what is made in time ----


def test_newest_save_gets_the_time_first_and_older_ones_what_is_left():
    assert in_time.chosen([2, 2, 2], 10) == [True, True, True]
    assert in_time.chosen([2, 2, 2], 5) == [True, True, False]
    assert in_time.chosen([9, 2, 2], 5) == [False, True, True]
    assert in_time.chosen([9, 8, 7], 5) == [False, False, True]
    assert in_time.chosen([0, 0], -1) == [True, False]
    assert in_time.chosen([], 5) == []


@pytest.fixture
def measured():
    """Return the list of measured saves, empty; restore it afterwards."""
    before = list(report.measured)
    report.measured.clear()
    yield report.measured
    report.measured.clear()
    report.measured.extend(before)


def test_duration_is_estimated_from_saves_of_a_similar_size(measured):
    assert in_time.estimate_save_seconds(1000) is None
    measured.append((10, 1.0))
    assert in_time.estimate_save_seconds(1000) is None
    measured.append((500, 2.0))
    assert in_time.estimate_save_seconds(1000) == 4.0
    assert in_time.estimate_save_seconds(5) == 1.5


def test_duration_of_a_save_is_recorded(measured, tmp_path):
    done = stillframe.save({"w": torch.zeros(1000)}, tmp_path / "a.pt")
    assert list(measured) == [(done.nbytes, done.durable_after_s)]


def test_older_saves_are_given_up_for_the_newest_state(measured, tmp_path, caplog):
    state = {"w": torch.zeros(100_000)}
    with slow("fdatasync", 1):
        older = [stillframe.async_save(state, tmp_path / f"{n}.pt") for n in range(2)]
        measured.append((400_000, 1000.0))
        made = in_time.save(lambda: state, tmp_path / "new.pt", time.monotonic() + 1500)
    assert made is not None and (tmp_path / "new.pt").exists()
    assert [each.state for each in older] == ["cancelled"] * 2
    assert len(caplog.records) == 2
    assert "0.pt is given up, and the old file stays: " in caplog.text


def test_new_save_that_would_take_too_long_gives_up_no_older_save(measured, tmp_path, caplog):
    small, large = {"w": torch.zeros(50_000)}, {"w": torch.zeros(150_000)}
    with slow("fdatasync", 1):
        older = stillframe.async_save(small, tmp_path / "old.pt")
        measured.append((200_000, 1000.0))
        made = in_time.save(lambda: large, tmp_path / "new.pt", time.monotonic() + 1500)
    assert made is None and not (tmp_path / "new.pt").exists()
    assert older.result().nbytes > 200_000
    assert "new.pt is given up, and the old file stays: 600 kB need about 3e+03 s" in caplog.text


# ---- which boundary ----


@pytest.mark.parametrize(
    ("counts", "limit"),
    [
        ([Counts(3, 3, 0, -1), Counts(5, 6, 0, -1)], Counts(6, NEVER, NEVER, -1)),
        ([Counts(0, 3, 1, 0), Counts(0, 4, 0, -1)], Counts(1, 5, 2, -1)),
        ([Counts(0, 0, 1, 0), Counts(0, 1, 0, -1)], Counts(1, 2, 2, -1)),
        ([Counts(0, 7, 1, 7)], Counts(1, 9, 2, -1)),
        ([Counts(0, 3, 0, -1)], Counts(1, NEVER, 2, -1)),
        ([Counts(0, 4, 4, 4), Counts(0, 3, 3, 3)], Counts(1, NEVER, 5, -1)),
    ],
)
def test_next_boundary_is_the_first_that_no_rank_has_passed(counts, limit):
    assert agreement.next_boundary(counts) == limit
    assert not any(each.reaches(limit) for each in counts)
