"""Programs that a signal ends: each runs in a forked child, which leaves what it printed.

A child gets a process group of its own, and this process becomes the parent of its orphans. So a
test can tell whether a process is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # an optimizer's first step would import it in each child

PR_SET_CHILD_SUBREAPER = 36
LIMIT_S = 60.0
AT_ONCE = 3  # scenarios that run at the same time; each mostly waits


class Ended(NamedTuple):
    """How a child ended.

    Attributes:
        status: Its exit status; negative for the signal that killed it.
        seconds: From the first signal to its end.
        left: Processes of its group that still existed half a second later.
        output: What it printed.
    """

    status: int
    seconds: float
    left: list[int]
    output: str


def adopt_orphans() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def start(program: Callable[[Path], object], path: Path) -> int:
    """Fork a child that runs a program and then ends as any Python program does."""
    path.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    os.setpgid(0, 0)
    log = os.open(path / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    program(path)
    sys.exit(0)


def run_all(run: Callable[[str], object], names: list[str]) -> None:
    """Call `run` with each name, in a few processes at the same time.

    Raises:
        RuntimeError: One of the processes failed; it has printed why.
    """
    pids = []
    for first in range(AT_ONCE):
        pid = os.fork()
        if pid == 0:
            adopt_orphans()
            for name in names[first::AT_ONCE]:
                run(name)
            os._exit(0)  # not reached after an error, whose traceback Python prints
        pids.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    if any(statuses):
        raise RuntimeError("a scenario could not be run")


def wait_for(condition: Callable[[], object], what: str = "it") -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not happen")
        time.sleep(0.002)


def send(pid: int, number: int, *, group: bool = False) -> None:
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if group else os.kill)(pid, number)


def ended(pid: int, since: float, path: Path) -> Ended:
    """Wait for a child's end."""
    found: list[tuple[int, int]] = []
    wait_for(lambda: found.append(os.waitpid(pid, os.WNOHANG)) or found[-1][0], "the end")
    status, seconds = os.waitstatus_to_exitcode(found[-1][1]), time.monotonic() - since
    left = left_of(pid)
    output = path / "output.txt"
    return Ended(status, seconds, left, output.read_text() if output.exists() else "")


def left_of(group: int, within_s: float = 0.5) -> list[int]:
    """Return the processes of a group that do not end by themselves, and kill them."""
    end = time.monotonic() + within_s
    while (left := members(group)) and time.monotonic() < end:
        time.sleep(0.01)
    for pid in left:
        send(pid, signal.SIGKILL)
    return left


def members(group: int) -> list[int]:
    """Return the living processes of a group, after reaping our own."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            if fields[0] in "ZX":
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(int(name), os.WNOHANG)
            else:
                found.append(int(name))
    return found


class Training:
    """A small training whose state tells whether it is whole.

    Its weights are a function of the number of steps alone.
    """

    def __init__(self, width: int = 64) -> None:
        self.model = torch.nn.Linear(width, width)
        torch.nn.init.zeros_(self.model.weight)
        torch.nn.init.zeros_(self.model.bias)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, weight_decay=0)
        self.steps = 0

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, self.model.in_features)).sum().backward()
        self.optimizer.step()
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optim": self.optimizer.state_dict(),
            "steps": self.steps,
            "sum": self.model.weight.sum(dtype=torch.float64).item(),
        }


def steps_in(path: Path) -> int:
    """Return the step of the state in a file; -1 if there is none.

    Raises:
        AssertionError: The state is a mixture of two steps.
    """
    if not path.exists():
        return -1
    state = torch.load(path)
    assert state["model"]["weight"].sum(dtype=torch.float64).item() == state["sum"], path
    for each in state["optim"]["state"].values():
        assert each["step"].item() == state["steps"], path
    return int(state["steps"])
