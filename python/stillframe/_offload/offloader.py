"""`Offloader`: tensors leave a device for the pool and come back, beside what the device computes.

    current stream   layer l+1 E ............ E' layer l ...... waits D  layer l-1
    outward                      waits E | gradients of l+1 leave
    inward                                        waits E' | weights of l-1 come | D

Each way has a stream of its own; the core queues and watches (`snapshot/device.c` outward,
`offload/onload.c` inward). Events order them against the stream that is current at the call: E
before the sources are read, E' before the memory that a group comes to is written, D before it is
used. The host waits for none of them.

What is brought comes into one piece of the device's memory, a slot, from torch's allocator: so it
is freed when the last tensor over it dies, in the order of the stream it was made on, and no group
can be written over while something can still read it. A slot that is released early counts no
longer; its memory is the device's again once nothing refers to it. There are never more than
`slots` groups in use or on their way, and never more than `slots` groups whose sources wait to be
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
from stillframe._base.birth import Birth
from stillframe._base.calls import inside
from stillframe._offload import layout as _layout
from stillframe._offload.layout import Layout
from stillframe._offload.place import HOST, OffloadStats, Place, summed
from stillframe._offload.slot import Slot
from stillframe._offload.ticket import Leaving, Ticket
from stillframe._save.api import engine_or_default
from stillframe._save.engine import Engine, core_of
from stillframe.errors import StillframeError

log = logging.getLogger("stillframe")


class Offloader:
    """Moves groups of tensors between a device and the memory of a pool.

    Args:
        device: A CUDA device, or the CPU: there everything works by copying, slower and right.
        slots: How many groups may be on the device at a time, brought or being brought; and how
            many may be leaving before the current stream waits for the first of them. Two let one
            be computed with while the next comes.
        engine: The engine whose pool is used, `default_engine()` by default.

    A context manager that closes itself. Any thread may use it. The engine stays open.

    Raises:
        TypeError: `slots` is no number.
        ValueError: `slots` below 1; a device that is neither.
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
        self._place = Place(device, engine_or_default(engine), slots)
        self.device = self._place.device
        """Where groups come from, and go to."""
        self.engine = self._place.engine
        """Whose pool is used."""
        self._stats = self._place.stats
        self._most = slots
        self._birth = Birth("this Offloader")
        self._closed = False
        # Re-entrant: a signal handler may come in the middle of another call.
        self._lock = threading.RLock()
        self._slots: list[Slot] = []
        self._released: list[Slot] = []  # as long as their memory is referred to
        self._coming: list[Slot] = []  # something is still copied, whatever became of them
        self._leaving: deque[Leaving] = deque()
        self._sent: list[Leaving] = []  # whose time is to be counted yet
        self._warned: set[str] = set()

    def __enter__(self) -> Offloader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._slots)} of {self._most} slots in use"
        return f"<Offloader of {self.device}, {state}>"

    # ---- out -------------------------------------------------------------------------

    def offload(self, tensors: Sequence[torch.Tensor], *, reuse: bool = False) -> Ticket:
        """Copies tensors of the device into the pool, behind the current stream's work so far.

        They may be dropped at once: their memory is kept until it is read. What writes to them in
        place before that gives a torn copy; torch's version counters tell, and then the ticket
        raises `TornSnapshotError`.

        Args:
            tensors: On `device`, with plain strided memory; parameters are taken as tensors. What
                several of them share is copied once.
            reuse: The current stream waits for the copies, so that work put on it from now on may
                write to the tensors.

        Returns:
            The group. The host has not waited, unless the pool was full.

        Raises:
            PoolExhaustedError: The group does not fit beside what tickets and snapshots hold.
            TypeError, ValueError: Something is no such tensor.
            StillframeError: The offloader or its engine is closed; the device failed; a CUDA graph
                is being captured.
            ForkError: In a child of fork.
        """
        with inside(), self._lock:
            self._refuse()
            layout = Layout(_layout.check(tensors, self.device, "offload"))
            ticket = self._leave(layout, self._place.number)
            leaving = ticket._leaving
            self._sent.append(leaving)
            if not leaving.over:
                if reuse:
                    leaving.order()
                else:
                    self._leaving.append(leaving)
            self._bound()
            self._stats["groups_offloaded"] += 1
            self._stats["bytes_offloaded"] += layout.nbytes
            return ticket

    def adopt(self, tensors: Sequence[torch.Tensor]) -> Ticket:
        """Copies CPU tensors into the pool: a group that is brought to the device from there, with
        no copy in between. The copy is made in the call.

        Args:
            tensors: As for `offload`, but on the CPU.

        Raises:
            PoolExhaustedError, TypeError, ValueError, StillframeError, ForkError: As `offload`.
        """
        with inside(), self._lock:
            self._refuse()
            return self._leave(Layout(_layout.check(tensors, HOST, "adopt")), 0)

    def _leave(self, layout: Layout, number: int) -> Ticket:
        core = _core.Snapshot(self._place.core, layout.rows(number), _core.SNAPSHOT_LEAVES)
        memory = self._place.lease(core, layout.nbytes)
        leaving = Leaving(core, layout, self._place.stream() if number else None)
        leaving.start()
        failed = core.error()
        if failed:
            raise StillframeError(f"the tensors could not be brought away: {failed}")
        return Ticket(layout, leaving, memory, self.device)

    def _bound(self) -> None:
        """Lets the sources of early groups go."""
        while self._leaving and self._leaving[0].over:
            self._leaving.popleft()
        for leaving in [each for each in self._sent if each.over]:
            self._sent.remove(leaving)
            self._stats["offload_copy_s"] += leaving.copy_s
        while len(self._leaving) > self._most:
            # One of another stream stays until it is copied: this stream's order is not its.
            early = self._leaving.popleft()
            if early.stream == self._place.stream():
                early.order()

    # ---- in ---------------------------------------------------------------------------

    def onload(self, what: Ticket | Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Brings a group to the device: takes one that `prefetch` has begun to bring, or starts
        now.

        The current stream waits for the copies, the host does not. The tensors are new, require no
        gradient, and share one piece of memory; they take a slot until they are all gone, or given
        to `release`.

        Args:
            what: A ticket; or CPU tensors, whose order is kept. Those in pinned memory, or in the
                pool, go straight to the device; others are copied into the pool first, in the call.

        Raises:
            StillframeError: Every slot is taken by a group in use; the ticket was released; closed;
                the device failed.
            TornSnapshotError: A ticket whose sources were written to before they were copied.
            torch.OutOfMemoryError: The device has no room for the group.
            PoolExhaustedError, TypeError, ValueError, ForkError: As `offload`.
        """
        with inside(), self._lock:
            self._refuse()
            slot = self._prefetched(what)
            if slot is not None:
                self._stats["groups_prefetched"] += 1
            else:
                slot = self._bring(what)
            try:
                tensors = slot.take()
            except BaseException:
                slot.given_up = True
                self._slots.remove(slot)  # its memory stays until nothing is copied there
                raise
            self._stats["groups_onloaded"] += 1
            self._stats["bytes_onloaded"] += slot.nbytes
            return tensors

    def prefetch(self, what: Ticket | Sequence[torch.Tensor]) -> bool:
        """Begins to bring a group, if a slot is free and the device has room. Doing so again
        changes nothing.

        Returns:
            Whether it is on its way.

        Raises:
            StillframeError: As `onload`, but not when every slot is taken.
            TornSnapshotError, PoolExhaustedError, TypeError, ValueError, ForkError: As `onload`.
        """
        with inside(), self._lock:
            self._refuse()
            if self._prefetched(what) is not None:
                return True
            self._reap()
            if len(self._slots) >= self._most:
                return False
            try:
                self._bring(what)
            except torch.OutOfMemoryError:
                return False
            return True

    def release(self, what: Ticket | Sequence[torch.Tensor]) -> None:
        """A group on the device is no longer used: work put on the current stream so far is the
        last that reads it. Its slot is free, and its memory is the device's again once nothing
        refers to it: let the tensors go (`stats()["bytes_lingering"]` tells). A group that was
        only prefetched is given up.

        Args:
            what: The ticket that was brought (all of its groups), or tensors as `onload` gave them.

        Raises:
            StillframeError: It has no slot: it was released before, or never brought.
        """
        with inside(), self._lock:
            self._refuse()
            self._reap()
            found = [slot for slot in self._slots if slot.is_of(what)]
            if not found:
                raise StillframeError(
                    "what was given to release() is not on the device: it was released before, or"
                    " was not brought by this Offloader"
                )
            for slot in found:
                self._give_up(slot)

    def _give_up_ahead(self, what: Ticket | Sequence[torch.Tensor]) -> None:
        """What was prefetched is not wanted any more, if it is still on its way: it may have given
        way to what was asked for."""
        with inside(), self._lock:
            self._refuse()
            for slot in [slot for slot in self._slots if not slot.taken and slot.is_for(what)]:
                self._give_up(slot)

    def _give_up(self, slot: Slot) -> None:
        slot.give_up()
        self._slots.remove(slot)
        self._released.append(slot)

    def _reap(self) -> None:
        """Forgets groups whose tensors or tickets are gone, and sources that are copied."""
        for slot in [slot for slot in self._slots if slot.is_orphan()]:
            self._give_up(slot)
        self._coming = [slot for slot in self._coming if not slot.landed()]
        self._slots = [slot for slot in self._slots if not slot.is_gone()]
        self._released = [slot for slot in self._released if not slot.is_gone()]
        self._bound()

    def _prefetched(self, what: Ticket | Sequence[torch.Tensor]) -> Slot | None:
        """The group that was prefetched, and is still what it would be now."""
        for slot in self._slots:
            if slot.taken or not slot.is_for(what):
                continue
            if not slot.is_stale():
                return slot
            self._stats["groups_stale"] += 1
            self._warn(
                "a group was written to between prefetch() and onload(): it is brought to"
                f" {self.device} again. Prefetch it after the write"
            )
            self._give_up(slot)
            return None
        return None

    def _bring(self, what: Ticket | Sequence[torch.Tensor]) -> Slot:
        """Starts to bring a group into a slot."""
        self._make_room()
        try:
            slot = Slot(self._place, what)
        except torch.OutOfMemoryError:
            waiting = [slot for slot in self._slots if not slot.taken]
            if not waiting:
                raise
            for each in waiting:
                self._give_up(each)
            slot = Slot(self._place, what)
        self._slots.append(slot)
        self._coming.append(slot)
        return slot

    def _make_room(self) -> None:
        """Sees to it that a slot is free. What was only prefetched gives way, the latest first."""
        self._reap()
        if len(self._slots) >= self._most and all(slot.taken for slot in self._slots):
            gc.collect()  # tensors may be gone but for a circle of references
            self._reap()
        if len(self._released) > self._most:
            self._warn(
                f"{len(self._released)} groups on {self.device} were released while something"
                " still refers to their tensors: the device's memory is not bounded by slots"
            )
        while len(self._slots) >= self._most:
            waiting = [slot for slot in self._slots if not slot.taken]
            if not waiting:
                raise StillframeError(
                    f"all {self._most} slots on {self.device} hold groups in use, and nothing gives"
                    " one back: call release() when a group has been used, let its tensors go, or"
                    " make the Offloader with more slots"
                )
            self._give_up(waiting[-1])

    def _warn(self, text: str) -> None:
        """Once of each kind."""
        kind = text[-30:]
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("stillframe: %s", text)

    def _count_stale(self) -> None:
        """The caller has found that what it had prefetched was of another time."""
        self._stats["groups_stale"] += 1

    def wait_read(self) -> None:
        """Returns when nothing that comes in is read any more: the tensors given to `onload` and
        `prefetch` so far may be written to."""
        with inside(), self._lock:
            self._coming = [slot for slot in self._coming if not slot.landed()]
            if self._coming:
                self._refuse()
                with self._waiting():
                    for slot in self._coming:
                        slot.finish()
            self._coming = []

    def _is_reading(self) -> bool:
        """Whether something may still be read that was given to `onload` or `prefetch`."""
        return bool(self._coming)

    def _waiting(self) -> AbstractContextManager[None]:
        """Counts what is done inside as one wait of the host's."""
        return self._place.waiting()

    # ---- the rest -----------------------------------------------------------------------

    def stats(self) -> OffloadStats:
        """What it has done so far."""
        with self._lock:
            self._birth.refuse_child()
            self._reap()
            stats = summed(self._stats)
            stats["slots_in_use"] = len(self._slots)
            stats["bytes_lingering"] = sum(slot.nbytes for slot in self._released)
            return stats

    def close(self) -> None:
        """Waits for the copies that still run, and gives up what was only prefetched. Tickets stay
        as they are, and so do tensors on the device. May be called again.

        Raises:
            ForkError: In a child of fork.
        """
        self._birth.refuse_child()
        with inside(), self._lock:
            if self._closed:
                return
            self._closed = True
            for slot in [slot for slot in self._slots if not slot.taken]:
                self._give_up(slot)
            for slot in self._coming:
                slot.finish()
            self._coming, self._slots, self._released = [], [], []
            while self._leaving:
                leaving = self._leaving.popleft()
                leaving.core.wait(None)
                leaving.settle()

    def _refuse(self) -> None:
        self._birth.refuse_child()
        if self._closed:
            raise StillframeError("this Offloader was closed")
        core_of(self.engine)
