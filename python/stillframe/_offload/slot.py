"""A slot holds a group of tensors that is on the device or on its way there.

    COMING   the copies are queued; the slot owns the group's device memory
    TAKEN    the caller's tensors own the memory; the slot has a weak reference to the storage
    GONE     the storage was freed

A slot that is given up drops its memory if it is COMING. If it is TAKEN, the tensors keep the
memory. The sources stay alive until the copies have completed.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from stillframe import _core
from stillframe._base import device as _device
from stillframe._base import sizes
from stillframe._offload import layout as _layout
from stillframe._offload.device_pool import HOST, DeviceWithPool
from stillframe._offload.layout import Layout, Source
from stillframe._offload.ticket import Ticket
from stillframe.errors import StillframeError


class Slot:
    """One group on the device. The constructor starts the copies from `what`, a ticket or CPU
    tensors, or raises torch.OutOfMemoryError if the device has no room."""

    def __init__(self, pool: DeviceWithPool, what: Ticket | Sequence[torch.Tensor]) -> None:
        self.taken = False  # `take` was called
        self.given_up = False  # `give_up` was called
        self._pool = pool
        # The core's copies; None on the host, and once their times are in the statistics.
        self._core: _core.Onload | None = None
        self._ticket: weakref.ref[Ticket] | None = None
        self._given: list[torch.Tensor] = []  # the CPU tensors, if there is no ticket
        if isinstance(what, Ticket):
            self._ticket = weakref.ref(what)
            self._layout = what._layout
            sources = what._sources()
        else:
            self._given = _layout.check(what, HOST, "onload")
            self._layout = Layout(self._given)
            sources = self._layout.sources
        self._versions = self._source_versions(what)  # at the start of the copies
        self.nbytes = self._layout.nbytes
        self._stream = pool.stream()  # the stream on which the memory is allocated
        flat = _allocate(pool.device, self._layout.buffer_nbytes)
        storage = flat.untyped_storage()
        self.storage = storage._cdata  # the address of the StorageImpl
        self._weak_storage = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        # The device memory as a tensor of bytes; None once it is taken or given up.
        self._flat: torch.Tensor | None = flat
        if pool.number:
            self._start(what, sources, _device.address_of(storage))
        else:  # on the host the copies are made here
            began = time.perf_counter()
            for source, offset in zip(sources, self._layout.offsets, strict=True):
                flat[offset : offset + source.nbytes].copy_(source.bytes())
            took = time.perf_counter() - began
            pool.stats["onload_copy_s"] += took
            pool.stats["stream_waited_s"] += took

    def _start(
        self, what: Ticket | Sequence[torch.Tensor], sources: list[Source], base: int
    ) -> None:
        """Queue the copies of `sources` to the slot's device memory at address `base`."""
        pool = self._pool
        # The core's snapshot that owns the sources; None if the CPU tensors own them.
        core = what._copies.core if isinstance(what, Ticket) else None
        must_stage = core is None and any(map(self._is_pageable, self._given))
        if must_stage:
            core, sources = self._copy_sources_into_pool()
        number, stream = self._stream
        self._core = _core.Onload(
            pool.core,
            number,
            stream,
            _layout.copy_rows([source.address() for source in sources], base, self._layout),
            core,
        )

    def _is_pageable(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in memory that the device cannot read directly."""
        return not self._pool.core.has_pinned(tensor.data_ptr()) and not tensor.is_pinned()

    def _copy_sources_into_pool(self) -> tuple[_core.Snapshot, list[Source]]:
        """Copy the sources into the pool. Return the core's snapshot, which owns the copies, and
        the ranges of memory of the copies."""
        core = _core.Snapshot(
            self._pool.core, self._layout.pack_source_rows(device=0), _core.SNAPSHOT_LEAVES
        )
        memory = self._pool.lease(core, self.nbytes)
        core.start(())  # without a stream, the call makes the copies
        self._pool.stats["bytes_staged"] += self.nbytes
        return core, _layout.sources_over_pool_memory(memory, core.offsets(), self._layout)

    def is_made_from(self, what: Ticket | Sequence[torch.Tensor]) -> bool:
        """Return whether this slot was made from the given ticket or tensors."""
        if isinstance(what, Ticket):
            return self._ticket is not None and self._ticket() is what
        tensors = list(what)
        if self._ticket is not None or len(tensors) != len(self._given):
            return False
        return all(one is other for one, other in zip(tensors, self._given, strict=True))

    def is_made_from_or_has_returned(self, what: Ticket | Sequence[torch.Tensor]) -> bool:
        """Return whether the slot was made from `what`, or `what` has a tensor that `take` has
        returned. After `take`, CPU tensors no longer identify the slot that was made from them."""
        if isinstance(what, Ticket):
            return self.is_made_from(what)
        if not self.taken and self.is_made_from(what):
            return True
        for tensor in what:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata == self.storage:
                return True
        return False

    def is_stale(self) -> bool:
        """Return whether the sources were written to since the copies were started."""
        what = self._ticket() if self._ticket is not None else self._given
        if what is None:  # the ticket no longer exists
            return False
        return self._source_versions(what) != self._versions

    def is_gone(self) -> bool:
        """Return whether the device memory was freed."""
        return bool(self._weak_storage.expired())  # type: ignore[no-untyped-call]

    def is_orphan(self) -> bool:
        """Return whether the group was prefetched from a ticket that no longer exists."""
        return not self.taken and self._ticket is not None and self._ticket() is None

    def _source_versions(self, what: Ticket | Sequence[torch.Tensor]) -> list[Any]:
        """Return a list that differs after a write to the sources."""
        if isinstance(what, Ticket):
            return what._write_counts()
        return [
            (tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version)
            for tensor in self._given
        ]

    def take(self) -> list[torch.Tensor]:
        """Return the tensors, and have the current stream wait for the copies. Raise
        StillframeError if the copies have failed."""
        flat = self._flat
        assert flat is not None, "a group is taken once"
        self._make_stream_wait(self._pool.stream())
        failed = "" if self._core is None else self._core.error()
        if failed:
            raise StillframeError(f"the tensors could not be brought: {failed}")
        tensors = self._layout.views_on(flat.untyped_storage())
        self._record_stream_use(flat)
        self._flat, self.taken = None, True
        return tensors

    def _make_stream_wait(self, stream: tuple[int, int]) -> None:
        """Have a stream wait for the copies. If that fails, wait on the host."""
        core = self._core
        _, handle = stream
        if core is None:
            return  # there are no copies, or they have completed
        stream_waits = core.order(handle)
        if not stream_waits:
            with self._pool.waiting():
                core.wait(None)

    def _record_stream_use(self, flat: torch.Tensor) -> None:
        """If the memory was allocated on another stream, tell torch's allocator that the current
        stream uses it too."""
        if flat.device.type == "cuda" and self._pool.stream() != self._stream:
            flat.record_stream(torch.cuda.current_stream(flat.device))

    def give_up(self) -> None:
        """Give up the group. Work that is queued on the current stream so far may still use the
        group, later work may not."""
        flat, self._flat = self._flat, None
        self.given_up = True
        if flat is not None:  # the group was not taken
            self._make_stream_wait(self._pool.stream())
        elif self._pool.stream() != self._stream and not self.is_gone():
            # The caller's tensors own the memory. To record the current stream's use of it, make
            # another tensor over it.
            storage: Any = torch.UntypedStorage._new_with_weak_ptr(self._weak_storage.cdata)
            if storage is not None:  # the caller's tensors still exist
                flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        if flat is not None:
            self._record_stream_use(flat)

    def try_to_finish(self) -> bool:
        """Release the sources if the copies have completed, and count the time of the copies. Call
        this again if it returns False."""
        if self._core is not None and not self._core.wait(0.0):
            return False
        if self._ticket is None:
            self._layout.drop_tensors()  # frees the clones of tensors with gaps
        if self.taken:
            self._given = []
        return self._try_to_add_copy_times_to_stats()

    def _try_to_add_copy_times_to_stats(self) -> bool:
        """Add the times of the copies to the statistics. Return False if it is too early."""
        core = self._core
        if core is None:
            return True
        if not (self.taken or self.given_up):
            return False  # a stream may still have to wait for the copies
        times = core.times()
        if times is None:
            return False
        self._core = None
        copying_s, waiting_s = times
        self._pool.stats["onload_copy_s"] += copying_s
        self._pool.stats["stream_waited_s"] += waiting_s
        return True

    def finish(self) -> None:
        """Wait until the copies have completed, and do what `try_to_finish` does."""
        if self._core is not None:
            self._core.wait(None)
        self.try_to_finish()


def _allocate(device: torch.device, nbytes: int) -> torch.Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        error.add_note(f"{sizes.decimal(nbytes)} were to be brought to {device}")
        raise
