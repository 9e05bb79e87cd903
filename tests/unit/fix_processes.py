"""Runs Python programs in separate processes, also several ranks of one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def run_python(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments; return its status and its output.

    `options` are those of subprocess.run. A failure raises an error only with check=True.
    """
    given = {"capture_output": True, "text": True, "check": False, "timeout": 240, **options}
    return subprocess.run([sys.executable, *map(str, arguments)], **given)


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
