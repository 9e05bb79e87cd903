"""Measures the peak memory of a call, as the kernel counts it."""

from __future__ import annotations

import ctypes
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import torch


def resident(field: str) -> int:
    (line,) = [each for each in Path("/proc/self/status").read_text().splitlines() if field in each]
    return int(line.split()[1]) << 10


def peak_of(call: Callable[[], object]) -> int:
    """Return the bytes that a call adds at its peak; it runs in a child that then ends."""

    def measured() -> int:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the present memory
        before = resident("VmRSS")
        kept = call()
        peak = resident("VmHWM") - before
        del kept
        return peak

    return in_a_child(measured)


def in_a_child(call: Callable[[], int]) -> int:
    """Run the call in a forked child and return its result."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer: object = None
        try:
            torch.set_num_threads(1)  # the parent's threads do not exist here
            ctypes.CDLL(None).malloc_trim(0)  # so that the call does not reuse freed memory
            answer = call()
        except BaseException as error:
            answer = repr(error)
        os.write(writes, pickle.dumps(answer))
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        sent = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, f"the child ended with {status}"
    answer = pickle.loads(sent)
    assert isinstance(answer, int), answer
    return answer
