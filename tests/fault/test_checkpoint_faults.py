"""When system calls fail or its process is killed, `checkpoint` leaves the old or the new one."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import stillframe
from fix_directories import hidden, value_of, write
from fix_processes import run_python, start_python
from stillframe import SaveError
from stillframe.testing import fault, slow

LONG_S = 60


@pytest.fixture
def engine() -> Iterator[stillframe.Engine]:
    with stillframe.Engine(pool_bytes="8MiB", block_bytes="1MiB", max_in_flight=1) as engine:
        yield engine


@contextlib.contextmanager
def no_exchange(refused: bool) -> Iterator[None]:
    if not refused:
        yield
        return
    with fault("exchange", err=errno.EINVAL, sticky=True):
        yield


@pytest.mark.leaves_temporaries
@pytest.mark.parametrize("refused", [False, True], ids=["exchange", "two renames"])
def test_any_failing_call_leaves_the_old_or_the_new_checkpoint(tmp_path, engine, refused):
    path, there, value = tmp_path / "c", 1.0, 1.0
    write(path, there, engine=engine).result(LONG_S)
    with slow("free", 0) as injected, no_exchange(refused):
        write(path, there, engine=engine).result(LONG_S)
        stillframe.wait_all(LONG_S)
        nr_calls = injected.calls()
    failed = 0
    for nth in range(1, nr_calls + 1):
        value += 1.0
        with no_exchange(refused), fault("*", nth=nth, err=errno.EIO):
            try:
                write(path, value, engine=engine).result(LONG_S)
                there = value
            except (OSError, MemoryError, stillframe.StillframeError) as error:
                failed += 1
                if isinstance(error, SaveError) and error.phase == "sync directory":
                    there = value
            with contextlib.suppress(OSError, MemoryError, stillframe.StillframeError):
                stillframe.wait_all(LONG_S)
        assert value_of(path) == there, nth
        stillframe.save(1, tmp_path / "other.pt", durable=False, engine=engine)
        assert not hidden(tmp_path), nth  # what could not be removed
        assert value_of(path) == there, nth
    assert failed > nr_calls // 4


CHILD = """
import itertools, sys
sys.path.insert(0, sys.argv[2])
from fix_directories import write
from pathlib import Path
import stillframe
for value in itertools.count(1):
    handle = write(Path(sys.argv[1]), float(value))
    print(value, flush=True)
    handle.result()
    print(value, "durable", flush=True)
"""


@pytest.mark.leaves_temporaries
def test_killed_process_leaves_the_last_durable_checkpoint_or_a_later_one(tmp_path):
    path, dice = tmp_path / "c", random.Random(1)
    helpers = str(Path(__file__).parents[1] / "unit")
    for _ in range(4):
        child = start_python("-c", CHILD, path, helpers, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        lines = []
        for _ in range(2 * dice.randrange(2, 12)):
            lines.append(child.stdout.readline())
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(dice.random() * 0.01)
        child.send_signal(signal.SIGKILL)
        lines += child.communicate()[0].splitlines()
        told = [line.split() for line in lines]
        durable = max(int(words[0]) for words in told if words[1:] == ["durable"])
        begun = max(int(words[0]) for words in told) + 1
        found = value_of(path)
        assert found is not None and durable <= found <= begun
        write(path, 0.0).result(LONG_S)  # mends what is left
        stillframe.wait_all(LONG_S)
        assert value_of(path) == 0.0 and os.listdir(tmp_path) == ["c"]


@pytest.mark.leaves_temporaries
@pytest.mark.parametrize("reader", ["load", "exists", "save"])
def test_directory_moved_aside_by_a_dead_process_comes_back(tmp_path, reader):
    path = tmp_path / "c"
    write(path, 1.0).result(LONG_S)
    stillframe.wait_all(LONG_S)
    code = textwrap.dedent(
        """
        import errno, os, signal, sys, threading
        sys.path.insert(0, sys.argv[2])
        from fix_directories import write
        from pathlib import Path
        from stillframe.testing import fault, held
        with fault("exchange", err=errno.EINVAL), held("rename", nth=5) as injected:
            handle = write(Path(sys.argv[1]), 2.0)
            while injected.calls("rename") < 5:  # three files, the old one, the new one
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    helpers = Path(__file__).parents[1] / "unit"
    done = run_python("-c", code, path, helpers)
    assert done.returncode == -signal.SIGKILL and not path.exists()
    if reader == "load":
        assert stillframe.load(path / "optimizer.pt")["w"][0] == 1.0
    elif reader == "exists":
        assert stillframe.exists(path)
    else:
        stillframe.save(1, tmp_path / "other.pt")
    assert value_of(path) == 1.0 and not hidden(tmp_path)


@pytest.mark.leaves_temporaries
def test_temporary_directory_of_a_living_process_is_left_alone(tmp_path):
    with stillframe.checkpoint(tmp_path / "c") as files:
        files.save(1, "a.pt")
        code = f"import stillframe; stillframe.save(1, {str(tmp_path / 'b.pt')!r})"
        run_python("-c", code, check=True)
        stillframe.save(1, tmp_path / "c.pt")
        assert len(hidden(tmp_path)) == 2
    files.handle.result(LONG_S)
    assert os.listdir(tmp_path / "c") == ["a.pt"]
