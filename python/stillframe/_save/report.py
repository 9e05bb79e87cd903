"""`SaveReport`: what a save did, and what it cost."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Literal

from stillframe._base import sizes

IoMode = Literal["direct", "buffered", "obstore", "fsspec", "wrapped"]

# The process's last saves, for estimates: (bytes, seconds from the call to the durable file)
measured: deque[tuple[int, float]] = deque(maxlen=8)


@dataclass(frozen=True)
class SaveReport:
    """The figures of one save. Times are seconds from the call's entry, sizes are bytes. `str`
    gives the report in sentences.

    Attributes:
        path: The path as it was given.
        nbytes: Length of the file.
        num_tensors: Distinct tensor objects in the saved tree.
        captured_nbytes: Bytes copied during the call, including the pickled structure.
        deferred_nbytes: Bytes copied after the call, under forward and backward.
        blocked_s: How long the call took.
        gate_wait_s: How long `optimizer.step()` waited for the copies.
        backpressure_s: How much of `blocked_s` was spent waiting for a slot (`max_in_flight`) or
            for blocks of the pool.
        staged_after_s: When every byte was copied, and the copy found to be consistent.
        durable_after_s: When the file was durable (with `durable=False`: in place).
        peak_pool_bytes: Most pool memory the save held at one time.
        io_mode: How the file was written:
            - "direct" (with O_DIRECT) or "buffered"
            - "obstore" or "fsspec": by this client of a store
            - "wrapped": by another CheckpointIO
        fallbacks: One sentence for each thing that was slower than it could be.
    """

    path: str
    nbytes: int
    num_tensors: int
    captured_nbytes: int
    deferred_nbytes: int
    blocked_s: float
    gate_wait_s: float
    backpressure_s: float
    staged_after_s: float
    durable_after_s: float
    peak_pool_bytes: int
    io_mode: IoMode
    fallbacks: tuple[str, ...] = ()

    def __str__(self) -> str:
        tensors = "1 tensor" if self.num_tensors == 1 else f"{self.num_tensors:,} tensors"
        waits = [f"the call took {_format_duration(self.blocked_s)}"]
        if self.backpressure_s:
            waits.append(f"{_format_duration(self.backpressure_s)} of it for a slot or memory")
        waits.append(f"steps waited {_format_duration(self.gate_wait_s)}")
        lines = [
            f"{self.path}: {sizes.decimal(self.nbytes)} in {tensors}, done after"
            f" {_format_duration(self.durable_after_s)} ({self.io_mode}); {', '.join(waits)}",
            *self.fallbacks,
        ]
        return "\n  ".join(lines)


class Interval:
    """A time during which a caller or an optimizer step waited for a save. Until `end` is called,
    `seconds` counts up to now.

    Args:
        begun: `time.perf_counter()` at the beginning.
    """

    def __init__(self, begun: float) -> None:
        self._begun = begun
        self._ended: float | None = None

    def end(self) -> None:
        self._ended = time.perf_counter()

    @property
    def seconds(self) -> float:
        ended = self._ended
        return (time.perf_counter() if ended is None else ended) - self._begun


def _format_duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


# Pickles of reports have the module's public name.
SaveReport.__module__ = "stillframe"
