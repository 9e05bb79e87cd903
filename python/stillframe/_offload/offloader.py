"""Implements `Offloader`: copies tensors between a device and the pool while the device computes.

    current stream   layer l+1 E ............ E' layer l ...... waits D  layer l-1
    outward                      waits E | gradients of l+1 are copied
    inward                                        waits E' | weights of l-1 are copied | D

Each direction has a stream of its own, on which the core queues the copies (`snapshot/device.c`
outward, `offload/onload.c` inward). Three events order the streams, so the host does not wait:

    E     the outward stream waits for it before it reads the sources
    E'    the inward stream waits for it before it writes to the destination
    D     the current stream waits for it before it uses the group

A *group*, the tensors of one call, is copied into a *slot*: one allocation of torch's allocator.
The memory is freed when the last tensor over it is freed, also if the slot is released earlier. At
most `slots` groups are in use or on their way in. The sources of at most `slots` groups wait to be
copied out.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from stillframe import _core
from stillframe._base.birth import ForkGuard
from stillframe._base.calls import inside_call
from stillframe._offload import layout as _layout
from stillframe._offload.device_pool import (
    HOST,
    DeviceWithPool,
    OffloadStats,
    copy_stats_with_rates,
)
from stillframe._offload.layout import Layout
from stillframe._offload.slot import Slot
from stillframe._offload.ticket import CopiesToPool, Ticket
from stillframe._save.api import engine_or_default
from stillframe._save.engine import Engine, core_of
from stillframe.errors import StillframeError

log = logging.getLogger("stillframe")


class Offloader:
    """Moves groups of tensors between a device and the memory of a pool.

    Args:
        device: A CUDA device, or the CPU. On the CPU everything is copied by the calling thread,
            with the same results.
        slots: How many groups may be on the device or on their way there. With two, the device can
            compute with one group while the next is copied. Also, how many groups may be on their
            way out before the current stream waits for the first of them.
        engine: The engine whose pool is used, `default_engine()` by default.

    As a context manager it closes itself on exit, but not the engine. Any thread may use it.

    Raises:
        TypeError: `slots` is not an integer.
        ValueError: `slots` is below 1, or the device is neither a CUDA device nor the CPU.
        RuntimeError: There is no such device.
        StillframeError: The device's driver cannot be used; the engine is closed.
    """

    def __init__(
        self, device: torch.device | str | int, *, slots: int = 2, engine: Engine | None = None
    ) -> None:
        if isinstance(slots, bool) or not isinstance(slots, int):
            raise TypeError(f"slots takes a number of groups, not a {type(slots).__name__}")
        if slots < 1:
            raise ValueError(f"slots counts groups on the device: 1 at least, got {slots}")
        self._pool = DeviceWithPool(device, engine_or_default(engine), slots)
        self.device = self._pool.device
        """The device that groups are copied from and to."""
        self.engine = self._pool.engine
        """The engine whose pool is used."""
        self._stats = self._pool.stats
        self._max_slots = slots
        self._birth = ForkGuard("this Offloader")  # refuses calls in a forked child
        self._closed = False
        # Re-entrant, because a signal handler may interrupt a call and make another.
        self._lock = threading.RLock()
        self._slots: list[Slot] = []  # at most `_max_slots`: prefetched, or in use
        self._released: list[Slot] = []  # released slots whose memory is still in use
        self._copying_in: list[Slot] = []  # slots whose copies still run, released or not
        # Groups on their way out whose sources are kept until they are copied, oldest first.
        self._copying_out: deque[CopiesToPool] = deque()
        self._not_in_stats: list[CopiesToPool] = []  # their copying time is not in `_stats` yet
        self._warned: set[str] = set()  # the kinds of warnings that were logged

    def __enter__(self) -> Offloader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"{len(self._slots)} of {self._max_slots} slots in use"
        if self._closed:
            state = "closed"
        return f"<Offloader of {self.device}, {state}>"

    # ---- out -------------------------------------------------------------------------

    def offload(self, tensors: Sequence[torch.Tensor], *, reuse: bool = False) -> Ticket:
        """Copy tensors of the device into the pool, after the work queued on the current stream.

        You may drop the tensors at once: their memory is kept until it is read. A write in place
        before that makes the copy torn. torch's version counters detect the write, and the ticket
        raises `TornSnapshotError`.

        Args:
            tensors: Tensors or parameters on `device`, with plain strided memory. Shared bytes are
                copied once.
            reuse: Make the current stream wait for the copies. Then work that is queued on the
                stream from now on may write to the tensors.

        Returns:
            The group's ticket. The host waits only if the pool is full.

        Raises:
            PoolExhaustedError: Tickets and snapshots hold too much of the pool.
            TypeError, ValueError: An element is no tensor with plain memory on `device`.
            StillframeError: The offloader or its engine is closed; the device failed; a CUDA graph
                is being captured.
            ForkError: In a child of fork.
        """
        with inside_call(), self._lock:
            self._check_usable()
            layout = Layout(_layout.check(tensors, self.device, "offload"))
            ticket = self._start_to_offload(layout, self._pool.number)
            copies = ticket._copies
            self._not_in_stats.append(copies)
            if not copies.is_over:
                if reuse:
                    copies.make_stream_wait()
                else:
                    self._copying_out.append(copies)
            self._release_old_sources()
            self._stats["groups_offloaded"] += 1
            self._stats["bytes_offloaded"] += layout.nbytes
            return ticket

    def adopt(self, tensors: Sequence[torch.Tensor]) -> Ticket:
        """Copy CPU tensors into the pool, where the device can read them directly. The call makes
        the copy. The ticket takes no slot and is not in the statistics.

        Args:
            tensors: As for `offload`, but on the CPU.

        Raises:
            PoolExhaustedError, TypeError, ValueError, StillframeError, ForkError: As `offload`.
        """
        with inside_call(), self._lock:
            self._check_usable()
            layout = Layout(_layout.check(tensors, HOST, "adopt"))
            return self._start_to_offload(layout, number=0)

    def _start_to_offload(self, layout: Layout, number: int) -> Ticket:
        """Start to copy a group into the pool. `number` is 0 for the host, n for CUDA device
        n - 1."""
        core = _core.Snapshot(
            self._pool.core, layout.pack_source_rows(number), _core.SNAPSHOT_LEAVES
        )
        memory = self._pool.lease(core, layout.nbytes)
        copies = CopiesToPool(core, layout, self._pool.stream() if number else None)
        copies.start()
        failed = core.error()
        if failed:
            raise StillframeError(f"the tensors could not be copied off the device: {failed}")
        return Ticket(layout, copies, memory, self.device)

    def _release_old_sources(self) -> None:
        """Release the sources of the oldest groups, so that at most `slots` groups keep theirs. Add
        the time of copies that have ended to the statistics."""
        while self._copying_out and self._copying_out[0].is_over:
            self._copying_out.popleft()
        for copies in [each for each in self._not_in_stats if each.is_over]:
            self._not_in_stats.remove(copies)
            self._stats["offload_copy_s"] += copies.copy_s
        while len(self._copying_out) > self._max_slots:
            oldest = self._copying_out.popleft()
            # Sources of another stream stay until they are copied: a wait of the current stream
            # would not keep that stream's work from getting their memory.
            if oldest.stream == self._pool.stream():
                oldest.make_stream_wait()

    # ---- in ---------------------------------------------------------------------------

    def onload(self, what: Ticket | Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy a group to the device, or take a group that `prefetch` has started to copy.

        The current stream waits for the copies, the host does not. The returned tensors are new,
        require no gradient, and share one allocation. They take a slot until all of them are gone
        or given to `release`.

        Args:
            what: A ticket, or CPU tensors. Tensors in pinned memory or in the pool are copied
                directly. If any tensor is elsewhere, the call copies all into the pool first.

        Raises:
            StillframeError: Every slot is in use; the ticket was released; the offloader or its
                engine is closed; the device failed.
            TornSnapshotError: A source of the ticket was written to before it was copied.
            torch.OutOfMemoryError: The device has no room for the group.
            PoolExhaustedError, TypeError, ValueError, ForkError: As `offload`.
        """
        with inside_call(), self._lock:
            self._check_usable()
            slot = self._find_prefetch(what)
            if slot is not None:
                self._stats["groups_prefetched"] += 1
            else:
                slot = self._start_onload(what)
            try:
                tensors = slot.take()
            except BaseException:
                # Not `slot.give_up()`, which frees the memory: copies may still run. `_copying_in`
                # keeps the slot until they have ended.
                slot.given_up = True
                self._slots.remove(slot)
                raise
            self._stats["groups_onloaded"] += 1
            self._stats["bytes_onloaded"] += slot.nbytes
            return tensors

    def prefetch(self, what: Ticket | Sequence[torch.Tensor]) -> bool:
        """Start to copy a group to the device, if a slot is free and the device has room.

        A second call for the same group has no effect.

        Returns:
            Whether the group is on its way.

        Raises:
            StillframeError: As `onload`, except if every slot is in use.
            TornSnapshotError, PoolExhaustedError, TypeError, ValueError, ForkError: As `onload`.
        """
        with inside_call(), self._lock:
            self._check_usable()
            if self._find_prefetch(what) is not None:
                return True
            self._drop_finished_slots()
            if len(self._slots) >= self._max_slots:
                return False
            try:
                self._start_onload(what)
            except torch.OutOfMemoryError:
                return False
            return True

    def release(self, what: Ticket | Sequence[torch.Tensor]) -> None:
        """Free the slot of a group. Work that is queued on the current stream so far may still use
        the group.

        Drop the tensors too: the device's memory is freed once nothing refers to them.
        `stats()["bytes_lingering"]` shows how many bytes are still referred to. If the group was
        only prefetched, the prefetch is given up.

        Args:
            what: A ticket, to free the slots of all groups that were copied from it; or tensors
                that `onload` returned.

        Raises:
            StillframeError: The group has no slot: it was released before, or never onloaded.
        """
        with inside_call(), self._lock:
            self._check_usable()
            self._drop_finished_slots()
            found = [slot for slot in self._slots if slot.is_made_from_or_has_returned(what)]
            if not found:
                raise StillframeError(
                    "what was given to release() is not on the device: it was released before, or"
                    " was not brought by this Offloader"
                )
            for slot in found:
                self._give_up(slot)

    def _give_up_prefetch(self, what: Ticket | Sequence[torch.Tensor]) -> None:
        """Give up the prefetch of a group, if it still has a slot."""
        with inside_call(), self._lock:
            self._check_usable()
            for slot in [
                slot for slot in self._slots if not slot.taken and slot.is_made_from(what)
            ]:
                self._give_up(slot)

    def _give_up(self, slot: Slot) -> None:
        """Make a slot free for another group."""
        slot.give_up()
        self._slots.remove(slot)
        self._released.append(slot)

    def _drop_finished_slots(self) -> None:
        """Forget slots whose memory was freed, and sources that are copied. Give up prefetches
        whose ticket no longer exists."""
        for slot in [slot for slot in self._slots if slot.is_orphan()]:
            self._give_up(slot)
        self._copying_in = [slot for slot in self._copying_in if not slot.try_to_finish()]
        self._slots = [slot for slot in self._slots if not slot.is_gone()]
        self._released = [slot for slot in self._released if not slot.is_gone()]
        self._release_old_sources()

    def _find_prefetch(self, what: Ticket | Sequence[torch.Tensor]) -> Slot | None:
        """Return the slot with a prefetch of the group; None if there is none. Give up the prefetch
        if the group has changed since."""
        for slot in self._slots:
            if slot.taken or not slot.is_made_from(what):
                continue
            if not slot.is_stale():
                return slot
            self._stats["groups_stale"] += 1
            self._warn_once_per_kind(
                "a group was written to between prefetch() and onload(): it is brought to"
                f" {self.device} again. Prefetch it after the write"
            )
            self._give_up(slot)
            return None
        return None

    def _start_onload(self, what: Ticket | Sequence[torch.Tensor]) -> Slot:
        """Start to copy a group into a new slot. If the device has no memory, give up all
        prefetches and try again."""
        self._ensure_free_slot()
        try:
            slot = Slot(self._pool, what)
        except torch.OutOfMemoryError:
            prefetched = [slot for slot in self._slots if not slot.taken]
            if not prefetched:
                raise
            for each in prefetched:
                self._give_up(each)
            slot = Slot(self._pool, what)
        self._slots.append(slot)
        self._copying_in.append(slot)
        return slot

    def _ensure_free_slot(self) -> None:
        """Free a slot if all are taken, by giving up the latest prefetch.

        Raises:
            StillframeError: All slots have groups in use.
        """
        self._drop_finished_slots()
        if len(self._slots) >= self._max_slots and all(slot.taken for slot in self._slots):
            gc.collect()  # frees tensors that only reference cycles keep alive
            self._drop_finished_slots()
        if len(self._released) > self._max_slots:
            self._warn_once_per_kind(
                f"{len(self._released)} groups on {self.device} were released while something"
                " still refers to their tensors: the device's memory is not bounded by slots"
            )
        while len(self._slots) >= self._max_slots:
            prefetched = [slot for slot in self._slots if not slot.taken]
            if not prefetched:
                raise StillframeError(
                    f"all {self._max_slots} slots on {self.device} hold groups in use, and nothing"
                    " gives one back: call release() when a group has been used, let its tensors"
                    " go, or make the Offloader with more slots"
                )
            self._give_up(prefetched[-1])

    def _warn_once_per_kind(self, text: str) -> None:
        """Log a warning, but only the first of each kind."""
        kind = text[-30:]  # the end: the beginning has numbers that differ
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("stillframe: %s", text)

    def _count_stale_prefetch(self) -> None:
        self._stats["groups_stale"] += 1

    def wait_read(self) -> None:
        """Wait until the tensors given to `onload` and `prefetch` so far are read. Then they may be
        written to."""
        with inside_call(), self._lock:
            self._copying_in = [slot for slot in self._copying_in if not slot.try_to_finish()]
            if self._copying_in:
                self._check_usable()  # not above: without copies, this is allowed after `close`
                with self._waiting():
                    for slot in self._copying_in:
                        slot.finish()
            self._copying_in = []

    def _is_reading(self) -> bool:
        """Return whether copies may still read tensors given to `onload` or `prefetch`."""
        return bool(self._copying_in)

    def _waiting(self) -> AbstractContextManager[None]:
        """Count the time in the block as a wait of the host."""
        return self._pool.waiting()

    # ---- the rest -----------------------------------------------------------------------

    def stats(self) -> OffloadStats:
        """Return counters of what the offloader has done so far."""
        with self._lock:
            self._birth.refuse_forked_child()
            self._drop_finished_slots()
            stats = copy_stats_with_rates(self._stats)
            stats["slots_in_use"] = len(self._slots)
            stats["bytes_lingering"] = sum(slot.nbytes for slot in self._released)
            return stats

    def close(self) -> None:
        """Wait for the copies that still run, and give up groups that were only prefetched.

        Tickets and tensors on the device stay valid. May be called again.

        Raises:
            ForkError: In a child of fork.
        """
        self._birth.refuse_forked_child()
        with inside_call(), self._lock:
            if self._closed:
                return
            self._closed = True
            for slot in [slot for slot in self._slots if not slot.taken]:
                self._give_up(slot)
            for slot in self._copying_in:
                slot.finish()
            self._copying_in, self._slots, self._released = [], [], []
            while self._copying_out:
                copies = self._copying_out.popleft()
                copies.core.wait(None)
                copies.record_if_ended()

    def _check_usable(self) -> None:
        """Raise if the offloader or its engine is closed, or belongs to a parent process."""
        self._birth.refuse_forked_child()
        if self._closed:
            raise StillframeError("this Offloader was closed")
        core_of(self.engine)  # raises if the engine is closed
