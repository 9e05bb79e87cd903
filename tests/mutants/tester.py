"""pytest in processes that have imported already what is no part of the tree.

To import torch and Lightning takes longer than most tests do. A process that has, and has imported
nothing of the tree, is forked for each run: `Tester` keeps it, and as a script this file is it. It
reads a line of JSON for each run (pytest's arguments, and a file for what is printed), and answers
with the number of the process and, once that has ended, its exit status.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import selectors
import subprocess
import sys
import tempfile
from pathlib import Path

OURS = "stillframe"


class Tester:
    """Not for two threads at once.

    Args:
        imports: What is imported ahead; what is not installed is left out.
    """

    def __init__(self, place: Path, environment: dict[str, str], imports: list[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *imports], cwd=place, env=environment, bufsize=0,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def start(self, arguments: list[str]) -> Run:
        with tempfile.NamedTemporaryFile(prefix="tester", delete=False) as output:
            request = json.dumps({"arguments": arguments, "output": output.name})
        assert self._process.stdin is not None
        self._process.stdin.write(request.encode() + b"\n")
        return Run(self, Path(output.name), self.answer(None))

    def answer(self, timeout_s: float | None) -> int:
        """
        Raises:
            subprocess.TimeoutExpired: There is none yet.
            RuntimeError: The process has ended.
        """
        stdout = self._process.stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise subprocess.TimeoutExpired("pytest", timeout_s or 0)
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"what forks tests has ended: {self._process.wait()}")
        return int(line)

    def close(self) -> None:
        self._process.communicate()  # closes its input, which ends it


class Run:
    """One run of pytest, as `subprocess.Popen` has it."""

    def __init__(self, tester: Tester, output: Path, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._tester, self._output = tester, output

    def communicate(self, timeout: float | None = None) -> tuple[bytes, None]:
        self.returncode = self._tester.answer(timeout)
        output = self._output.read_bytes()
        self._output.unlink()
        return output, None


def serve(imports: list[str]) -> None:
    sys.path[0] = os.getcwd()  # as `python -m pytest` has it
    for name in imports:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    assert OURS not in sys.modules
    gc.freeze()
    for line in iter(sys.stdin.buffer.readline, b""):
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become(request["output"])
            import pytest

            sys.argv = ["pytest", *request["arguments"]]
            sys.exit(pytest.main(request["arguments"]))
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _become(output: str) -> None:
    """A process of its own, which prints to a file."""
    os.setsid()
    for path, flags, targets in ((os.devnull, os.O_RDONLY, (0,)), (output, os.O_WRONLY, (1, 2))):
        opened = os.open(path, flags)
        for target in targets:
            os.dup2(opened, target)
        os.close(opened)


if __name__ == "__main__":
    serve(sys.argv[1:])
