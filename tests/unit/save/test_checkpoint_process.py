"""`checkpoint` when the process exits, forks, or is interrupted at any line of it."""

from __future__ import annotations

import gc
import os
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import stillframe
from fix_directories import hidden, state, value_of, write
from fix_processes import run_python
from fix_waits import eventually
from stillframe._save import completion

LONG_S = 60
SOURCES = tuple(
    str(Path(stillframe.__file__).parent / "_save" / f"{name}.py")
    for name in ("checkpoint", "directory", "external", "ordered")
)

PRELUDE = f"""
import os, signal, sys, threading, time, stillframe
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from fix_directories import fill, write
from pathlib import Path
from stillframe.testing import fault, held, slow
signal.signal(signal.SIGINT, signal.default_int_handler)
"""


def run(code: str, cwd: Path, first: str = "") -> Any:
    return run_python("-c", first + PRELUDE + textwrap.dedent(code), cwd=cwd)


def test_checkpoint_in_flight_is_finished_at_exit(tmp_path):
    done = run(
        """
        block = slow("fsync", 0.02)
        block.__enter__()
        write(Path("c"), 1.0, on_durable=lambda path, report: print("durable", path))
        """,
        tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, "durable c\n"), done.stderr
    assert value_of(tmp_path / "c") == 1.0 and os.listdir(tmp_path) == ["c"]


def test_exit_inside_the_block_leaves_nothing(tmp_path):
    write(tmp_path / "c", 1.0).result(LONG_S)
    stillframe.wait_all(LONG_S)
    done = run(
        """
        with stillframe.checkpoint("c") as files:
            fill(files, 2.0)
            sys.exit(3)
        """,
        tmp_path,
    )
    assert (done.returncode, done.stderr) == (3, "")
    assert value_of(tmp_path / "c") == 1.0 and os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("engine", ["None", "stillframe.Engine()"])
def test_block_that_a_daemon_thread_never_leaves_does_not_hold_up_the_exit(tmp_path, engine):
    done = run(
        f"""
        engine = {engine}
        opened = threading.Event()
        def save():
            with stillframe.checkpoint("c", engine=engine) as files:
                fill(files, 1.0)
                opened.set()
                threading.Event().wait()
        threading.Thread(target=save, daemon=True).start()
        opened.wait()
        """,
        tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert os.listdir(tmp_path) == []


def test_checkpoint_made_by_an_exit_handler_is_durable(tmp_path):
    done = run(
        """
        def last():
            print(write(Path("c"), 1.0).state)
        """,
        tmp_path,
        first="import atexit; atexit.register(lambda: last())",  # it runs after stillframe's
    )
    assert (done.returncode, done.stdout) == (0, "durable\n"), done.stderr
    assert value_of(tmp_path / "c") == 1.0 and os.listdir(tmp_path) == ["c"]


def test_uncollected_error_is_printed_once_at_exit(tmp_path):
    done = run(
        """
        block = fault("fdatasync", nth=2)
        block.__enter__()
        write(Path("c"), 1.0)
        """,
        tmp_path,
    )
    assert done.returncode == 0
    assert done.stderr.count("a save failed") == 1 and "Input/output error" in done.stderr
    assert os.listdir(tmp_path) == []


def test_child_of_multiprocessing_finishes_its_checkpoint(tmp_path):
    done = run(
        """
        import multiprocessing
        def work():
            write(Path("c"), 1.0)
        child = multiprocessing.get_context("fork").Process(target=work)
        child.start()
        child.join()
        print(child.exitcode)
        """,
        tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
    assert value_of(tmp_path / "c") == 1.0 and os.listdir(tmp_path) == ["c"]


def test_processes_forked_inside_the_block_change_nothing(tmp_path):
    done = run(
        """
        import multiprocessing
        from torch.utils.data import DataLoader
        with stillframe.checkpoint("c") as files:
            fill(files, 1.0)
            for _ in DataLoader(range(4), num_workers=2, multiprocessing_context="fork"):
                pass
            child = os.fork()
            if child == 0:
                sys.exit(0)  # unwinds the block, runs exit handlers
            assert os.waitpid(child, 0)[1] == 0
        files.handle.result()
        """,
        tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert value_of(tmp_path / "c") == 1.0 and os.listdir(tmp_path) == ["c"]


# ---- at any line ----


class AtLine:
    """Call `action` once, before the n-th line of these sources that the main thread runs."""

    def __init__(self, number: int, action: Callable[[], object]) -> None:
        self.number, self.lines, self.where = number, 0, ""
        self._action = action

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename not in SOURCES or self.where:
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.number:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                self._action()
        return self

    def run(self, function: Callable[[], object]) -> None:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            function()
        finally:
            sys.settrace(before)


@pytest.fixture(autouse=True)
def small_heap():
    """Leave the objects of earlier tests out of collections, which these tests make hundreds of."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def interrupt() -> None:
    raise KeyboardInterrupt


def small(path: Path, value: float, engine: stillframe.Engine) -> stillframe.SaveHandle:
    with stillframe.checkpoint(path, engine=engine) as files:
        files.save(state(value), "a.pt")
    return files.handle


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_line_leaves_the_old_or_the_new_one(tmp_path):
    path, number, kept = tmp_path / "c", 0, 0
    with stillframe.Engine(pool_bytes="8MiB", block_bytes="1MiB", max_in_flight=1) as engine:
        small(path, 0.0, engine).result(LONG_S)
        there = 0.0
        while True:
            number += 1
            line = AtLine(number, interrupt)
            try:
                line.run(lambda: small(path, float(number), engine))  # noqa: B023
                raised = False
            except KeyboardInterrupt:
                raised = True
            gc.collect()
            stillframe.wait_all(LONG_S)
            assert eventually(lambda: not completion.in_flight, 20), line.where
            assert engine.stats()["saves_in_flight"] == 0, line.where
            assert not hidden(tmp_path), line.where
            found = float(stillframe.load(path / "a.pt")["w"][0])
            assert found in ((there, number) if raised else (number,)), line.where
            if raised and found == there:
                kept += 1
            there = found
            if not line.where:
                break
    assert number > 100 and kept > 50


def test_signal_handler_may_save_a_checkpoint_at_any_line(tmp_path):
    number = 0
    failed: list[BaseException] = []

    def handler(*_: object) -> None:
        try:
            small(tmp_path / "emergency", float(number), engine).result(LONG_S)
        except BaseException as error:
            failed.append(error)
            raise

    before = signal.signal(signal.SIGUSR2, handler)
    try:
        with stillframe.Engine(pool_bytes="8MiB", block_bytes="1MiB", max_in_flight=1) as engine:
            while True:
                number += 3
                line = AtLine(number, lambda: signal.raise_signal(signal.SIGUSR2))
                handles: list[stillframe.SaveHandle] = []
                line.run(lambda: handles.append(small(tmp_path / "c", float(number), engine)))  # noqa: B023
                handles[0].result(LONG_S)
                assert not failed, line.where
                if not line.where:
                    break
                assert stillframe.load(tmp_path / "emergency/a.pt")["w"][0] == number
                assert stillframe.load(tmp_path / "c/a.pt")["w"][0] == number
    finally:
        signal.signal(signal.SIGUSR2, before)
    stillframe.wait_all(LONG_S)
    assert sorted(os.listdir(tmp_path)) == ["c", "emergency"] and number > 100
