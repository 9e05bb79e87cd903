"""A device, the pool of host memory that its groups are offloaded to, and the counters of both.

A *group* is a list of tensors that is copied as a whole. Copies leave the device in the *outward*
stream and come back in the *inward* stream.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypedDict

import torch

from stillframe import _core
from stillframe._base import device as _device
from stillframe._base import sizes
from stillframe._save.engine import Engine, core_of, describe_pool_usage, note_use
from stillframe.errors import PoolExhaustedError, StillframeError

HOST = torch.device("cpu")


class OffloadStats(TypedDict):
    """Counters of an `Offloader` since it was made."""

    groups_offloaded: int
    groups_onloaded: int
    groups_prefetched: int  # onloaded groups whose copy had started before the call
    groups_stale: int  # prefetched groups that were written to before use, and so copied twice
    bytes_offloaded: int
    bytes_onloaded: int
    bytes_staged: int  # onloaded bytes that the calling thread had to copy into the pool first
    offload_copy_s: float  # time that the outward stream spent copying
    onload_copy_s: float  # time that the inward stream spent copying
    offload_gb_per_s: float
    onload_gb_per_s: float
    stream_waited_s: float  # time that current streams waited for onloaded groups
    share_hidden: float  # share of onload_copy_s in which the device did other work as well
    # Waits of the calling thread: for memory of the pool, for copies at the end of a backward or a
    # step, and for copies that a stream cannot wait for.
    host_waits: int
    host_waited_s: float
    slots: int
    slots_in_use: int
    bytes_lingering: int  # bytes of released groups to which tensors still refer


def new_stats(slots: int) -> OffloadStats:
    return OffloadStats(
        groups_offloaded=0,
        groups_onloaded=0,
        groups_prefetched=0,
        groups_stale=0,
        bytes_offloaded=0,
        bytes_onloaded=0,
        bytes_staged=0,
        offload_copy_s=0.0,
        onload_copy_s=0.0,
        offload_gb_per_s=0.0,
        onload_gb_per_s=0.0,
        stream_waited_s=0.0,
        share_hidden=0.0,
        host_waits=0,
        host_waited_s=0.0,
        slots=slots,
        slots_in_use=0,
        bytes_lingering=0,
    )


def copy_stats_with_rates(counted: OffloadStats) -> OffloadStats:
    """Return a copy of the counters, with the rates and the share computed from them."""
    stats = counted.copy()
    out_s, in_s = stats["offload_copy_s"], stats["onload_copy_s"]
    stats["offload_gb_per_s"] = stats["bytes_offloaded"] / out_s / 1e9 if out_s else 0.0
    stats["onload_gb_per_s"] = stats["bytes_onloaded"] / in_s / 1e9 if in_s else 0.0
    stats["share_hidden"] = max(0.0, 1 - stats["stream_waited_s"] / in_s) if in_s else 0.0
    return stats


class DeviceWithPool:
    """A device, together with the pool that its groups use.

    Raises:
        ValueError: The device is neither a CUDA device nor the CPU.
        RuntimeError: There is no such device.
        StillframeError: The device's driver cannot be used.
    """

    def __init__(self, device: torch.device | str | int, engine: Engine, slots: int) -> None:
        self.device = _resolve_device(device)
        self.engine = engine
        self.core = core_of(engine)  # the core's engine, whose pool is used
        self.number = _device.device_number_of(self.device)  # 0: the host; n: CUDA device n - 1
        if self.number < 0:
            raise ValueError(f"an Offloader serves CUDA devices and the CPU, not {self.device}")
        if self.number:
            _device.ensure_cuda_context(self.number - 1)  # torch's context, which the core uses
            problem = self.core.use_device(self.number - 1)  # "": the device can be used
            if problem:
                raise StillframeError(f"nothing can be brought to {self.device}: {problem}")
        self.stats = new_stats(slots)  # without the rates that `copy_stats_with_rates` computes
        self._waits = threading.local()  # .inside: the thread is in a block of `waiting`
        self._counters_lock = threading.Lock()  # protects `host_waits` and `host_waited_s`

    def stream(self) -> tuple[int, int]:
        """Return the driver's number of the device and the handle of its current stream. Return
        -1 and 0 for the host."""
        if self.number == 0:
            return -1, 0
        return self.number - 1, _device.current_stream(self.number - 1)

    def lease(self, core: _core.Snapshot, nbytes: int) -> _core.SnapshotMemory:
        """Lease memory of the pool for a group of `nbytes`, whose snapshot in the core is `core`.
        Wait for memory that running saves return. Raise PoolExhaustedError if tickets and snapshots
        hold too much of the pool."""
        note_use(self.engine)
        try:
            return core.lease(0.0)  # without a wait
        except PoolExhaustedError:
            pass  # try again below, and wait
        with self.waiting():
            try:
                return core.lease(None)
            except PoolExhaustedError:
                raise PoolExhaustedError(
                    f"a group of {sizes.decimal(nbytes)} does not fit into the pool, where tickets"
                    f" count as snapshots. {describe_pool_usage(self.engine)}"
                ) from None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in the block as a wait of the host. Nested blocks count once."""
        outermost = not getattr(self._waits, "inside", False)
        self._waits.inside = True
        began = time.perf_counter()
        try:
            yield
        finally:
            if outermost:
                self._waits.inside = False
                with self._counters_lock:
                    self.stats["host_waits"] += 1
                    self.stats["host_waited_s"] += time.perf_counter() - began


def _resolve_device(device: torch.device | str | int) -> torch.device:
    """Return the device that an argument names, with an index if it is a CUDA device."""
    named = torch.device(device)
    if named.type != "cuda":
        return named
    found = _device.cuda_device_of_location(str(named))
    if found is None:
        raise RuntimeError(f"there is no {named} that tensors could be brought to")
    return found
