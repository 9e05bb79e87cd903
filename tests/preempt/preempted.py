"""The scenarios of test_preemption.py: trainings that a signal ends.

    python preempted.py DIRECTORY [NAME ...]

Each scenario is a program. It creates the file "ready" when it wants its signals, which follow
after the seconds that `signals` gives. torch is imported once, before the first fork.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import stillframe
import torch
from fix_preempt import LIMIT_S, Training, ended, run_all, send, start, wait_for
from stillframe.testing import slow
from torch.utils.data import DataLoader

Program = Callable[[Path], object]
scenarios: dict[str, tuple[Program, tuple[float, ...], bool]] = {}

BEFORE = signal.getsignal(signal.SIGTERM)  # importing stillframe has installed no handler


def signals(*after_s: float, group: bool = False) -> Callable[[Program], Program]:
    """Register a scenario and the seconds between its signals."""

    def register(program: Program) -> Program:
        scenarios[program.__name__] = program, after_s, group
        return program

    return register


def ready(path: Path) -> None:
    (path / "ready").touch()


def until_signalled(p: stillframe.Preemption) -> None:  # type: ignore[name-defined]
    wait_for(lambda: p.requested, "the signal")


def say(*words: object) -> None:
    print(*words, flush=True)


# ---- the boundary ----


@signals(0)
def own_save(path: Path) -> None:
    training = Training()
    atexit.register(say, "atexit")
    assert signal.getsignal(signal.SIGTERM) == BEFORE == signal.SIG_DFL
    with stillframe.preemption(deadline=20) as p:
        ready(path)
        while True:
            training.step()
            if p.should_stop():
                stillframe.save(training.state(), path / "last.pt")
                say("stopped at", training.steps)
                break
    say("after the block")


@signals(0)
def registered(path: Path) -> None:
    training = Training()
    with stillframe.preemption(deadline=20) as p:
        p.save(training.state, path / "last.pt")
        ready(path)
        while True:
            training.step()
            if p.should_stop():
                say("stopped at", training.steps, (path / "last.pt").exists())
                break


@signals(0)
def registered_in_a_loop_of_its_own(path: Path) -> None:
    """The loop knows nothing of preemption."""
    training = Training()
    training.step()
    with stillframe.preemption(deadline=20) as p:
        p.save(lambda: {**training.state(), "steps": len(steps) + 1}, path / "last.pt")
        steps: list[int] = []
        training.optimizer.register_step_post_hook(lambda *_: steps.append(1))
        ready(path)
        while True:
            training.step()


@signals(0)
def saved_at_each_step(path: Path) -> None:
    training = Training()
    with stillframe.preemption(deadline=20) as p:
        ready(path)
        while True:
            training.step()
            report = p.save(training.state, path / "last.pt")
            if report is not None:
                say("stopped at", training.steps)


@signals(0)
def signalled_behind_the_last_boundary(path: Path) -> None:
    training = Training()
    with stillframe.preemption(deadline=20) as p:
        p.save(training.state, path / "last.pt")
        for _ in range(5):
            training.step()
            assert not p.should_stop()
        ready(path)
        until_signalled(p)


@signals(0)
def saves_under_way(path: Path) -> None:
    training = Training()
    training.step()
    with slow("fdatasync", 0.3), stillframe.preemption(deadline=20) as p:
        for number in range(2):
            stillframe.async_save(training.state(), path / f"{number}.pt")
        ready(path)
        until_signalled(p)
        assert p.should_stop()


# ---- what is not made in time ----


def _with_an_old_file(path: Path) -> Training:
    training = Training(256)
    training.step()
    stillframe.save(training.state(), path / "last.pt")
    return training


@signals(0)
def too_slow(path: Path) -> None:
    training = _with_an_old_file(path)
    with slow("fdatasync", 3), stillframe.preemption(deadline=1) as p:
        p.save(training.state, path / "last.pt")
        ready(path)
        while not p.should_stop():
            training.step()


@signals(0)
def too_slow_own_save(path: Path) -> None:
    training = _with_an_old_file(path)
    with slow("fdatasync", 3), stillframe.preemption(deadline=1) as p:
        ready(path)
        while not p.should_stop():
            training.step()
        stillframe.save(training.state(), path / "last.pt")
        say("saved")


@signals(0)
def no_boundary(path: Path) -> None:
    training = _with_an_old_file(path)
    atexit.register(say, "atexit")
    with stillframe.preemption(deadline=1) as p:
        p.save(training.state, path / "last.pt")
        ready(path)
        time.sleep(LIMIT_S)


@signals(0)
def main_thread_never_returns_to_python(path: Path) -> None:
    """No line of Python runs on the main thread any more."""
    with stillframe.preemption(deadline=1):
        other = threading.Thread(target=time.sleep, args=(LIMIT_S,), daemon=True)
        other.start()  # it takes the signal
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        ready(path)
        ctypes.CDLL(None).pause()


@signals(0, 0.5)
def second_signal(path: Path) -> None:
    training = _with_an_old_file(path)
    with slow("fdatasync", LIMIT_S), stillframe.preemption(deadline=LIMIT_S) as p:
        p.save(training.state, path / "last.pt")
        ready(path)
        while not p.should_stop():
            training.step()


@signals(0, 0.02)
def signal_that_is_passed_on(path: Path) -> None:
    """A launcher repeats the signal that all have received."""
    os.environ["TORCHELASTIC_RUN_ID"] = "none"
    training = _with_an_old_file(path)
    with slow("fdatasync", 0.5), stillframe.preemption(deadline=20) as p:
        p.save(training.state, path / "last.pt")
        ready(path)
        while not p.should_stop():
            training.step()


# ---- how the process ends ----


@signals(0)
def previous_handler_returns(path: Path) -> None:
    signal.signal(signal.SIGTERM, lambda number, _: say("previous", number))
    _ends(path)


@signals(0)
def previous_handler_ends(path: Path) -> None:
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(7))
    _ends(path)


@signals(0)
def other_wakeups(path: Path) -> None:
    """Another part of the program has Python's wake-up descriptor."""
    _, theirs = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(theirs)
    try:
        _ends(path)
    finally:
        assert signal.set_wakeup_fd(-1) == theirs
        say("theirs")


@signals(0)
def plain_exit_in_the_block(path: Path) -> None:
    _ends(path, sys.exit)


@signals(0)
def exit_with_a_status_in_the_block(path: Path) -> None:
    _ends(path, lambda: sys.exit(3))


@signals(0)
def error_in_the_block(path: Path) -> None:
    def fail() -> None:
        raise ValueError("of the training")

    _ends(path, fail)


def _ends(path: Path, end: Callable[[], object] = lambda: None) -> None:
    training = Training()
    with slow("fdatasync", 0.2), stillframe.preemption(deadline=20) as p:
        ready(path)
        while not p.should_stop():
            training.step()
        stillframe.async_save(training.state(), path / "last.pt")
        end()


# ---- any moment ----


class AtLine:
    """Raises SIGTERM once, before the n-th line of the package that the main thread runs."""

    package = str(Path(stillframe.__file__).parent)

    def __init__(self, number: int) -> None:
        self.number, self.lines, self.where = number, 0, ""

    def __call__(self, frame: Any, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(self.package):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.number:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGTERM)
        return self


@signals()
def before_any_line(path: Path) -> None:
    """Send a signal before each line; where no handler is installed, this one takes its place."""
    outside: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: outside.append(number))
    nr, lost = 0, 0
    while True:
        nr += 1 if os.environ.get("STILLFRAME_FULL") else 211
        training, line, status, asked = Training(), AtLine(nr), None, False
        outside.clear()
        (path / "last.pt").unlink(missing_ok=True)
        sys.settrace(line)
        try:
            with stillframe.preemption(deadline=20) as p:
                p.save(training.state, path / "last.pt")
                for _ in range(3):
                    training.step()
                    stillframe.async_save(training.state(), path / "other.pt")
                    if p.should_stop():
                        break
        except SystemExit as end:
            status = end.code
        finally:
            sys.settrace(None)
            asked = p.requested
        if not line.where:
            break
        if asked:
            # The previous handler is called once at the end, which goes on because it returns.
            assert (status, outside) == (143, [15]), (line.where, status, outside)
            assert torch.load(path / "last.pt")["steps"] == training.steps, line.where
        else:
            assert (status, outside) == (None, [15]), (line.where, status, outside)
            lost += 1
    say("tried", nr, "outside", lost)


# ---- children ----


class Numbers(torch.utils.data.Dataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.01)
        return torch.full((2,), float(index))


def _workers(path: Path, deadline: float) -> None:
    training = Training()
    with stillframe.preemption(deadline=deadline) as p:
        p.save(training.state, path / "last.pt")
        for number, _ in enumerate(DataLoader(Numbers(100_000), num_workers=2)):
            if number == 5:
                ready(path)
            if number % 40 == 39:  # far more batches than the workers have made in advance
                training.step()
                if p.should_stop():
                    say("stopped at", training.steps)
                    break


@signals(0, group=True)
def workers(path: Path) -> None:
    _workers(path, 20)


@signals(0)
def workers_without_the_signal(path: Path) -> None:
    _workers(path, 20)


@signals(0, group=True)
def workers_of_a_killed_parent(path: Path) -> None:
    with stillframe.preemption(deadline=20) as p:
        for number, _ in enumerate(DataLoader(Numbers(100_000), num_workers=2)):
            if number == 5:
                ready(path)
            if p.requested:
                time.sleep(0.2)
                os.kill(os.getpid(), signal.SIGKILL)


@signals(0, group=True)
def workers_at_the_deadline(path: Path) -> None:
    with stillframe.preemption(deadline=1):
        for number, _ in enumerate(DataLoader(Numbers(100_000), num_workers=2)):
            if number == 5:
                ready(path)


@signals()
def other_children(path: Path) -> None:
    """Processes that the block forks are ended by SIGTERM as usual, if the parent sends it."""
    context = multiprocessing.get_context("fork")
    with stillframe.preemption(deadline=20) as p:
        for daemon in (True, False):
            child = context.Process(target=time.sleep, args=(LIMIT_S,), daemon=daemon)
            child.start()
            time.sleep(0.2)
            child.terminate()
            child.join()
            say("daemon" if daemon else "process", child.exitcode)
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
                assert signal.set_wakeup_fd(-1) == -1
                assert not p.should_stop()
                assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
                os.kill(os.getpid(), signal.SIGTERM)
            os._exit(1)
        say("forked", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        assert not p.requested
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def main(directory: Path, names: list[str]) -> None:
    def run(name: str) -> None:
        program, after_s, group = scenarios[name]
        path = directory / name
        pid = start(program, path)
        if after_s:
            wait_for((path / "ready").exists, f"{name}: ready")
        since = time.monotonic()
        for seconds in after_s:
            time.sleep(seconds)
            send(pid, signal.SIGTERM, group=group)
        (path / "ended.json").write_text(json.dumps(ended(pid, since, path)))

    gc.freeze()  # the children end sooner
    run_all(run, names or list(scenarios))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
