"""Runs Python programs in separate processes, also several ranks of one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil


def run_python(
    *arguments: object, timeout: float = 240, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments; return its status and its output.

    Args:
        timeout: Seconds. A program that takes longer fails the test, with the stacks of all its
            threads and of the processes that it has started.
        check: The test fails unless the program exits with 0.
        options: Those of subprocess.Popen.
    """
    command = [sys.executable, *map(str, arguments)]
    options["env"] = {**options.get("env", os.environ), "PYTHONFAULTHANDLER": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            out, err = _abort(process)
            raise AssertionError(f"{command} took over {timeout:g} s\n{out}\n{err}") from None
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def _abort(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Abort a process and those it has started. Each writes its stacks. Return their output."""
    family = [*psutil.Process(process.pid).children(recursive=True), process]
    for each in family:
        each.send_signal(signal.SIGABRT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.communicate(timeout=20)
    for each in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    return process.communicate()


def run_program(
    program: Path,
    *arguments: object,
    ranks: int = 0,
    check: bool = True,
    timeout: float = 280,
    cwd: Path | None = None,
    folders: Iterable[Path] = (),
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run a program of the tests, which finds the modules beside it and all that this one finds.

    Args:
        ranks: torchrun starts so many of them.
        check: The test fails with all that was said, unless the program exits with 0.
        folders: More folders with modules that it imports.
        environment: Is added to this process's.
    """
    paths = [str(program.parent), *map(str, folders), *sys.path]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = run_python(
        *("-W", "ignore", *(launcher if ranks else []), program, *arguments),
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
        stdin=subprocess.DEVNULL,
        timeout=timeout,
    )
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done
