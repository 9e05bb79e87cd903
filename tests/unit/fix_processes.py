"""Runs Python programs in separate processes, also several ranks of one."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil

TORCH = ("torch",)
LIGHTNING = ("torch", "lightning.pytorch")

warm_sockets: set[int] = set()  # descriptors of this process that stay open for `start_python`

_WARM = Path(__file__).with_name("warm_python.py")
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
# The beginnings of variables that a library or the interpreter reads when it starts.
_READ_AT_START = ("PYTHON", "LD_", "MALLOC_", "OMP_", "MKL_", "TORCH", "KMP_")
_NOT_READ_AT_START = {"PYTHONPATH", "PYTHONFAULTHANDLER", "OMP_NUM_THREADS"}
# The options of Popen that need no exec.
_WITHOUT_EXEC = {"stdin", "stdout", "stderr", "text", "bufsize", "cwd", "env"}


def run_python(
    *arguments: object,
    timeout: float = 240,
    check: bool = False,
    imported: Sequence[str] = TORCH,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments; return its status and its output.

    Args:
        timeout: Seconds. A program that takes longer fails the test, with the stacks of all its
            threads and of the processes that it has started.
        check: The test fails unless the program exits with 0.
        imported: Modules that the process may have from its start, see `start_python`.
        options: Those of subprocess.Popen.
    """
    options["env"] = {**options.get("env", os.environ), "PYTHONFAULTHANDLER": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with start_python(*arguments, imported=imported, **pipes, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            out, err = _abort(process)
            command = process.args
            raise AssertionError(f"{command} took over {timeout:g} s\n{out}\n{err}") from None
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def start_python(
    *arguments: object, imported: Sequence[str] = TORCH, **options: Any
) -> subprocess.Popen[Any]:
    """Start Python with these arguments, faster than by `subprocess.Popen`.

    Args:
        imported: Modules that the process may have from its start. It is then forked by a process
            that has imported them (warm_python.py). Without modules, and if the program or its
            environment may notice the difference, a new interpreter is started.
        options: Those of subprocess.Popen.
    """
    command = [sys.executable, *map(str, arguments)]
    options_of_python = ("-W", "ignore") if arguments[:2] == ("-W", "ignore") else ()
    program = command[1 + len(options_of_python) :]
    is_known = program[0] in ("-c", "-m") or not program[0].startswith("-")
    can_fork = options.keys() <= _WITHOUT_EXEC and not _differs_at_start(options.get("env"))
    if imported and is_known and can_fork:
        warm = _warm_python(options_of_python, tuple(imported), os.getpid())
        return _WarmPopen(warm, program, command, **options)
    return subprocess.Popen(command, **options)


def _differs_at_start(env: dict[str, str] | None) -> bool:
    """Return whether a program with this environment has to be started in it."""
    if env is None:
        return False
    return any(
        env.get(name) != os.environ.get(name)
        for name in {*env, *os.environ} - _NOT_READ_AT_START
        if name.startswith(_READ_AT_START)
    )


class _WarmPython:
    """A process that has imported modules, and forks others."""

    def __init__(self, options: Sequence[str], modules: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        warm_sockets.add(self._socket.fileno())
        with other:
            self._process = subprocess.Popen(
                [sys.executable, *options, str(_WARM), str(other.fileno()), *modules],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONFAULTHANDLER": "1"},
            )
        atexit.register(self._end, os.getpid())

    def _end(self, owner: int) -> None:
        if owner == os.getpid():
            self._socket.close()
            self._process.wait()

    def fork(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        """Fork a process as a child of this one; return its number.

        Raises:
            RuntimeError: The process with the modules has ended. Its error is on stderr.
        """
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        with self._lock:
            prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
                number = self._socket.recv(20)
            except (BrokenPipeError, ConnectionResetError):
                number = b""
            finally:
                prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not number:
            raise RuntimeError(f"{self._process.args} has ended: its error is on stderr")
        return int(number)


@functools.cache
def _warm_python(options: tuple[str, ...], modules: tuple[str, ...], process: int) -> _WarmPython:
    """Return the process that was started with these options of Python and has these modules. Each
    process of the tests has its own."""
    return _WarmPython(options, modules)


class _WarmPopen(subprocess.Popen[Any]):
    """A process that `_WarmPython` has forked."""

    def __init__(
        self,
        warm: _WarmPython,
        program: Sequence[str],
        command: list[str],
        *,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        self._warm = warm
        self._request = {
            "arguments": program,
            "cwd": str(cwd or os.getcwd()),
            "env": {**(os.environ if env is None else env)},
        }
        super().__init__(command, **options)

    def _execute_child(self, *arguments: Any) -> None:  # in place of fork and exec
        given = inspect.signature(super()._execute_child).bind(*arguments).arguments
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        pipes = [given[name] for name in names]
        try:
            ours = (given["p2cread"], given["c2pwrite"], given["errwrite"])
            descriptors = [own if each == -1 else each for own, each in enumerate(ours)]
            self.pid = self._warm.fork(self._request, descriptors)
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)


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
    imported: Sequence[str] = TORCH,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run a program of the tests, which finds the modules beside it and all that this one finds.

    Args:
        ranks: torchrun starts so many of them.
        check: The test fails with all that was said, unless the program exits with 0.
        folders: More folders with modules that it imports.
        imported: Modules that it may have from its start, see `start_python`.
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
        imported=imported,
    )
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done
