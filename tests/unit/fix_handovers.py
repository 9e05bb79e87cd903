"""Counts how often a thread releases the interpreter lock.

After each release, another thread that computes may take the lock and keep it for a switch interval
(5 ms). `count` works only in a process with handovers.c preloaded, which `start` creates.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_SOURCE = Path(__file__).with_name("handovers.c")
_SLICE_S = 0.05  # SFR_PY_SLICE_NS
_LIBRARY = "HANDOVERS_LIBRARY"


def start(script: Path, directory: Path, *args: object) -> Any:
    """Run a script that counts, and return the JSON that it prints."""
    library = directory / "handovers.so"
    if not library.exists():
        compiler = os.environ.get("CC", "cc").split()
        flags = ["-std=c11", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
        subprocess.run(
            [*compiler, *flags, "-o", str(library), str(_SOURCE), "-ldl", "-pthread"], check=True
        )
    preloaded = [*filter(None, [os.environ.get("LD_PRELOAD")]), str(library)]
    environment = {**os.environ, "LD_PRELOAD": " ".join(preloaded), _LIBRARY: str(library)}
    done = subprocess.run(
        [sys.executable, str(script), *map(str, args)],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    )
    return json.loads(done.stdout)


class Counter:
    """Counts releases in a process that `start` has created."""

    def __init__(self) -> None:
        sys.setswitchinterval(1000)  # no thread is forced to release the lock
        self._library = ctypes.PyDLL(os.environ[_LIBRARY])  # PyDLL keeps the lock during the call
        self._library.handovers_of.restype = ctypes.c_long
        self._library.handovers_set_learning(1)
        time.sleep(0)
        assert self._library.handovers_set_learning(0) == 0, "the interpreter's lock was not found"
        before = self.of(threading.get_native_id())
        for _ in range(7):
            time.sleep(0)
        assert self.of(threading.get_native_id()) - before == 7, "that was not the lock"

    def of(self, thread: int) -> int:
        """Return the releases so far of a thread, given by its `native_id`."""
        return int(self._library.handovers_of(thread))

    def count(self, function: Callable[[], T]) -> tuple[int, T]:
        """Return this thread's releases during a call, and the call's result.

        A waiting thread checks for signals once a slice. The number of these checks depends on the
        disk, so they are not counted.
        """
        mine = threading.get_native_id()
        before, entered = self.of(mine), time.monotonic()
        returned = function()
        looks = int((time.monotonic() - entered) / _SLICE_S)
        return max(0, self.of(mine) - before - looks), returned
