"""A program in a process that has imported torch runs as in a new interpreter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import fix_processes
import psutil
import pytest
from fix_processes import TORCH, run_python, start_python

# A program that prints its surroundings. It imports torch first, which may change warning filters.
SEEN = """
import atexit, json, os, signal, sys, threading, warnings, torch
atexit.register(print, "the exit handler ran")
print(json.dumps({
    "argv": sys.argv,
    "path": sys.path,
    "name": __name__,
    "globals": sorted(set(globals()) - {"atexit", "json", "os", "signal", "sys", "threading",
                                        "torch", "warnings"}),
    "main": sys.modules["__main__"].__dict__ is globals(),
    "cwd": os.getcwd(),
    "environment": dict(os.environ),
    "parent": os.getppid(),
    "group": os.getpgid(0),
    "session": os.getsid(0),
    "descriptors": sorted(os.listdir("/proc/self/fd"))[:3],
    "more": len(os.listdir("/proc/self/fd")),
    "threads": len(os.listdir("/proc/self/task")),
    "main thread": threading.current_thread() is threading.main_thread(),
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "filters": [(each[0], each[2].__name__) for each in warnings.filters],
    "streams": [(each.encoding, each.errors, each.line_buffering, each.isatty())
                for each in (sys.stdout, sys.stderr)],
    "stdin": sys.stdin.read(),
    "file": "__file__" in globals() and __file__,
    "doc": __doc__,
}))
"""


def seen(arguments: list[object], imported: tuple[str, ...], path: Path) -> tuple[int, object, str]:
    (path / "stdin").write_text("some input")
    with open(path / "stdin") as stdin:
        done = run_python(*arguments, cwd=path, stdin=stdin, imported=imported)
    first, last = done.stdout.splitlines()
    assert last == "the exit handler ran"
    return done.returncode, json.loads(first), done.stderr


@pytest.mark.parametrize("options", [[], ["-W", "ignore"]])
@pytest.mark.parametrize("kind", ["-c", "-m", "file"])
def test_program_sees_what_it_sees_in_a_new_interpreter(kind, options, tmp_path, monkeypatch):
    run_python(*options, "-c", "")  # the process with torch begins with today's environment
    monkeypatch.delenv("PATH")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "more"))
    monkeypatch.setenv("A_VARIABLE", "its value")
    (tmp_path / "program.py").write_text(SEEN)
    program = {"-c": ["-c", SEEN], "-m": ["-m", "program"], "file": [tmp_path / "program.py"]}[kind]
    new, warm = (seen([*options, *program, "1", "two"], each, tmp_path) for each in ((), TORCH))
    assert warm == new


@pytest.mark.parametrize(
    "code",
    [
        "raise SystemExit(7)",
        "raise SystemExit('a message')",
        "raise KeyboardInterrupt",
        "import os; os._exit(3)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import warnings; warnings.warn('a warning')",
        "import torch; print(torch.ones(2).sum().item())",
        "import threading; threading.Timer(0.2, print, ['the exit waits']).start()",
        "print('no end of line', end='')",
        "from multiprocessing import Process; Process(target=print, args=[1]).start()",
    ],
)
def test_program_ends_as_in_a_new_interpreter(code):
    ends = []
    for imported in ((), TORCH):
        done = run_python("-c", code, imported=imported)
        last = done.stderr.splitlines()[-1:]  # a traceback has one frame more
        ends.append((done.returncode, done.stdout, last))
    assert ends[0] == ends[1]


def test_process_is_a_child_that_takes_signals_and_is_waited_for():
    process = start_python("-c", "input()", stdin=subprocess.PIPE)
    assert psutil.Process(process.pid).ppid() == os.getpid()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM
    process.stdin.close()


@pytest.mark.parametrize(
    "environment", [{"PYTHONOPTIMIZE": "1"}, {"MALLOC_PERTURB_": "1"}, {"LD_BIND_NOW": "1"}]
)
def test_environment_that_counts_at_the_start_gets_a_new_interpreter(environment):
    code = "import sys; print('torch' in sys.modules)"
    done = run_python("-c", code, env={**os.environ, **environment})
    assert done.stdout == "False\n"
    assert run_python("-c", code).stdout == "True\n"


def test_end_of_the_process_that_has_the_modules_is_reported(capfd):
    warm = fix_processes._WarmPython([], ["no_such_module"])
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"warm_python\.py.* has ended"):
            warm.fork({}, [0, 1, 2])
    assert "No module named 'no_such_module'" in capfd.readouterr().err


def test_other_processes_get_new_parents_as_before():
    """This process adopts processes only while it forks one."""
    run_python("-c", "")
    code = "import os; os.fork() or (os.setsid(), print(os.getpid(), flush=True), input())"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        number = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
        os.waitpid(process.pid, 0)
        assert psutil.Process(number).ppid() != os.getpid()
        process.returncode = 0
