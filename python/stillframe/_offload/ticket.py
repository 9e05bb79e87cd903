"""Holds a group of tensors that was copied, or is being copied, from a device into the pool.

    LEAVING  the copies are queued or running; `CopiesToPool` keeps the sources alive
    HERE     every byte is in the pool

The completion thread releases the sources when the copies have completed. An `Offloader` may
release them earlier (`CopiesToPool.make_stream_wait`): the sources' stream then waits for the
copies, so later work on the stream may get the memory. This bounds the memory of the sources,
although the host runs far ahead of the device.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time

import torch

from stillframe import _core
from stillframe._base.arguments import seconds
from stillframe._base.birth import ForkGuard
from stillframe._offload.layout import Layout, Source, sources_over_pool_memory
from stillframe._save import completion
from stillframe.errors import StillframeError, TornSnapshotError

log = logging.getLogger("stillframe")


class CopiesToPool:
    """The copies of one group into the pool.

    Args:
        core: The core's snapshot, not started yet.
        stream: The sources' device and the handle of their stream; None on the host.
    """

    def __init__(
        self, core: _core.Snapshot, layout: Layout, stream: tuple[int, int] | None
    ) -> None:
        self.core, self.stream = core, stream
        self.error: StillframeError | None = None  # why the copies are unusable
        self.is_over = False  # the end of the copies is recorded
        self.copy_s = 0.0  # the seconds that the copies took
        self._layout: Layout | None = layout  # None once the sources are released
        self._versions = layout.versions()
        # Re-entrant, because a signal handler may interrupt a wait and wait too.
        self._lock = threading.RLock()

    def start(self) -> None:
        """Queue the copies; on the host, make them."""
        if self.stream is None:
            began = time.perf_counter()
            self.core.start(())  # without a stream, the call makes the copies
            self.record_if_ended()
            self.copy_s = time.perf_counter() - began
            return
        completion.thread.start()
        completion.copying[self.core.number] = self
        try:
            self.core.start((self.stream,))
        finally:
            # The entry in `copying` keeps the sources alive until the core's notice of the end,
            # even after Ctrl-C. There is no notice if the copies have ended already.
            if self.has_ended():
                completion.copying.pop(self.core.number, None)
        self.record_if_ended()
        if completion.thread.is_exiting:  # the completion thread may end before the copies
            self.core.wait(None)
            self.record_if_ended()

    def has_ended(self) -> bool:
        """Return whether the copies have ended, without waiting."""
        ended, _ = self.core.wait(0)
        return ended

    def make_stream_wait(self) -> None:
        """Have the sources' stream wait for the copies, and release the sources."""
        if self.stream is not None:
            self.core.gate((self.stream,))
        with self._lock:
            self._release_sources()

    def on_copy_ended(self) -> None:
        """Handle the end of the copies, on the completion thread."""
        self.record_if_ended()

    def record_if_ended(self) -> None:
        """Record the result of the copies if they have ended."""
        with self._lock:
            if self.is_over or not self.has_ended():
                return
            self.copy_s = self.core.copying_s
            self.is_over = True
            failed = self.core.error()
            if failed:
                self.error = StillframeError(
                    f"the tensors could not be copied off the device: {failed}"
                )
            self._release_sources()

    def poll(self) -> None:
        """Look for writes to the sources, unless the sources are released."""
        with self._lock:
            self._set_error_if_written()

    def _release_sources(self) -> None:
        """Drop the references to the sources, after a last look for writes to them."""
        self._set_error_if_written()
        layout, self._layout = self._layout, None
        if layout is not None:
            layout.drop_tensors()

    def _set_error_if_written(self) -> None:
        """Set and log an error if the version of a source has changed since the start."""
        if self._layout is None:
            return  # the sources are released
        changed = self._layout.changed(self._versions)
        if changed and self.error is None:
            self.error = TornSnapshotError(
                f"tensors {changed} of a group were written to while it was on its way into the"
                " pool. Drop what was given to offload(), or have it ordered with"
                " offload(..., reuse=True)",
                [str(index) for index in changed],
            )
            log.error("stillframe: %s", self.error)


class Ticket:
    """A group of tensors in the pool's memory, made by `Offloader.offload`.

    The memory is kept until the ticket is released or freed and the tensors are gone. In a child of
    fork every use raises `ForkError`.
    """

    def __init__(
        self,
        layout: Layout,
        copies: CopiesToPool,
        memory: _core.SnapshotMemory | None,
        device: torch.device,
    ) -> None:
        self._layout, self._copies, self._memory = layout, copies, memory
        self._birth = ForkGuard("this Ticket")
        self._tensors: list[torch.Tensor] | None = None
        self._versions_at_creation: list[int] = []  # the versions of `_tensors` when they were made
        self._released = False
        self.device = device
        """The device that the tensors were on."""
        self.nbytes = layout.nbytes
        """The bytes that were copied. Shared bytes count once."""

    def __repr__(self) -> str:
        state = "here" if self.done() else "leaving"
        if self._released:
            state = "released"
        return f"<Ticket {len(self._layout.views)} tensors of {self.nbytes} bytes, {state}>"

    def tensors(self) -> list[torch.Tensor]:
        """Return the group as CPU tensors over the pool's memory, in the order given.

        Wait until the copies have completed. Every call returns the same tensors. They keep the
        memory alive even without the ticket. You may write to them: a later copy to the device
        reads the new values.

        Raises:
            TornSnapshotError: A source was written to before it was copied.
            StillframeError: The device failed, or the ticket was released.
        """
        self.wait()
        self._refuse_released()
        if self._tensors is None:
            self._tensors = self._layout.views_on_each([each.storage for each in self._sources()])
            self._versions_at_creation = [tensor._version for tensor in self._tensors]
        return list(self._tensors)

    def done(self) -> bool:
        """Return whether the copies have ended, successfully or not."""
        self._birth.refuse_forked_child()
        return self._copies.has_ended()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every byte is in the pool. Then the sources may be written to.

        Raises:
            TimeoutError: `timeout` seconds passed.
            TornSnapshotError, StillframeError: As `tensors`.
        """
        self._birth.refuse_forked_child()
        ended, _ = self._copies.core.wait(seconds(timeout))
        if not ended:
            raise TimeoutError(f"the group is not in the pool after {timeout:g} s")
        self._copies.record_if_ended()
        self._raise_if_failed()

    def release(self) -> None:
        """Give the memory back to the pool, once the tensors are gone and no copy to a device reads
        the memory.

        Raises:
            StillframeError: The ticket was released before.
        """
        self._birth.refuse_forked_child()
        self._refuse_released()
        self._released = True
        self._tensors = self._memory = None

    def _write_counts(self) -> list[int]:
        """Return how often each tensor of `tensors()` was written to since it was made."""
        if self._tensors is None:
            return [0] * len(self._layout.views)
        pairs = zip(self._tensors, self._versions_at_creation, strict=True)
        return [tensor._version - first for tensor, first in pairs]

    def _refuse_released(self) -> None:
        if self._released:
            raise StillframeError("this Ticket was released: its memory may be others' already")

    def _raise_if_failed(self) -> None:
        error = self._copies.error
        if error is not None:
            raise error

    def _sources(self) -> list[Source]:
        """Return the group's bytes in the pool. Some of them may still be on their way there. For
        the errors raised see `tensors`."""
        self._birth.refuse_forked_child()
        self._refuse_released()
        self._copies.poll()
        self._raise_if_failed()
        if self._memory is None:  # released since the check above
            raise StillframeError("this Ticket was released: its memory may be others' already")
        return sources_over_pool_memory(self._memory, self._copies.core.offsets(), self._layout)


def _wait_for_copies_at_exit() -> None:
    """Wait for running copies, because the interpreter is about to free the sources."""
    for copies in list(completion.copying.values()):
        if isinstance(copies, CopiesToPool):
            with contextlib.suppress(Exception):
                copies.core.wait(None)
                copies.record_if_ended()


atexit.register(_wait_for_copies_at_exit)
