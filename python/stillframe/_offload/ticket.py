"""Holds a group of tensors that was copied, or is being copied, from a device into the pool.

    LEAVING  the copies are queued or running; `Leaving` keeps the sources alive
    HERE     every byte is in the pool

The sources are released in one of two ways. The completion thread releases them when the copies
have completed. An `Offloader` that offloads further groups may release them before: it has the
sources' stream wait for the copies. If the allocator then gives the memory to later work of that
stream, this work writes only after the copies have read. So the memory of the sources is bounded,
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
from stillframe._base.birth import Birth
from stillframe._offload.layout import Layout, Source, sources_in
from stillframe._save import completion
from stillframe.errors import StillframeError, TornSnapshotError

log = logging.getLogger("stillframe")


class Leaving:
    """The copies of one group into the pool.

    Args:
        core: The core's snapshot, not started yet.
        layout: The layout of the sources.
        stream: The sources' device and the handle of their stream; None on the host.

    Attributes:
        error: Why the copies are unusable; None if nothing is known against them.
        is_over: The copies have ended.
        copy_s: How long they took, in seconds; 0 before they have ended.
    """

    def __init__(
        self, core: _core.Snapshot, layout: Layout, stream: tuple[int, int] | None
    ) -> None:
        self.core, self.stream = core, stream
        self.error: StillframeError | None = None
        self.is_over = False
        self.copy_s = 0.0
        self._layout: Layout | None = layout  # None once the sources are released
        self._versions = layout.versions()
        # Re-entrant, because a signal handler may wait in the middle of another wait.
        self._lock = threading.RLock()

    def start(self) -> None:
        """Queue the copies; on the host, make them."""
        if self.stream is None:
            began = time.perf_counter()
            self.core.start(())
            self.settle()
            self.copy_s = time.perf_counter() - began
            return
        completion.completion.start()
        completion.copying[self.core.number] = self
        try:
            self.core.start((self.stream,))
        finally:
            # The entry in `copying` keeps the sources alive until the core's notice of the end,
            # even if Ctrl-C ends this call. There is no notice if the copies have ended already.
            if self.core.wait(0)[0]:
                completion.copying.pop(self.core.number, None)
        self.settle()
        if completion.completion.is_exiting:  # the completion thread may end before the copies
            self.core.wait(None)
            self.settle()

    def order(self) -> None:
        """Have the sources' stream wait for the copies, and release the sources."""
        if self.stream is not None:
            self.core.gate((self.stream,))
        with self._lock:
            self._let_go()

    def after_copy(self) -> None:
        """Handle the end of the copies; called on the completion thread."""
        self.settle()

    def settle(self) -> None:
        """Record the result of the copies if they have ended."""
        with self._lock:
            if self.is_over or not self.core.wait(0)[0]:
                return
            self.copy_s = self.core.copying_s
            self.is_over = True
            failed = self.core.error()
            if failed:
                self.error = StillframeError(
                    f"the tensors could not be copied off the device: {failed}"
                )
            self._let_go()

    def poll(self) -> None:
        """Look for writes to the sources, unless these are released."""
        with self._lock:
            self._compare()

    def _let_go(self) -> None:
        """Look for writes to the sources, and release them."""
        self._compare()
        layout, self._layout = self._layout, None
        if layout is not None:
            layout.let_go()

    def _compare(self) -> None:
        """Set and log an error if the version of a source has changed since the start."""
        changed = self._layout.changed(self._versions) if self._layout is not None else []
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

    The memory is kept until the ticket is released or freed and its tensors are gone. In a child
    of fork every use raises `ForkError`.
    """

    def __init__(
        self,
        layout: Layout,
        leaving: Leaving,
        memory: _core.SnapshotMemory | None,
        device: torch.device,
    ) -> None:
        self._layout, self._leaving, self._memory = layout, leaving, memory
        self._birth = Birth("this Ticket")
        self._tensors: list[torch.Tensor] | None = None
        self._made: list[int] = []  # the versions of `_tensors` when they were made
        self._released = False
        self.device = device
        """The device that the tensors were on."""
        self.nbytes = layout.nbytes
        """Bytes that were copied; bytes that several tensors share count once."""

    def __repr__(self) -> str:
        state = "here" if self.done() else "leaving"
        if self._released:
            state = "released"
        return f"<Ticket {len(self._layout.views)} tensors of {self.nbytes} bytes, {state}>"

    def tensors(self) -> list[torch.Tensor]:
        """Return the group as CPU tensors over the pool's memory, in the order given.

        Wait until the copies have completed. Every call returns the same tensors. They keep the
        memory alive even without the ticket. They may be written to: a later copy to the device
        reads the values that they have then.

        Raises:
            TornSnapshotError: A source was written to before it was copied.
            StillframeError: The device failed, or the ticket was released.
        """
        self.wait()
        self._refuse_released()
        if self._tensors is None:
            self._tensors = self._layout.views_on_each([each.storage for each in self._sources()])
            self._made = [tensor._version for tensor in self._tensors]
        return list(self._tensors)

    def done(self) -> bool:
        """Return whether the copies have ended, successfully or not."""
        self._birth.refuse_child()
        return self._leaving.core.wait(0)[0]

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every byte is in the pool; the sources may be written to from then on.

        Raises:
            TimeoutError: `timeout` seconds passed.
            TornSnapshotError, StillframeError: As `tensors`.
        """
        self._birth.refuse_child()
        if not self._leaving.core.wait(seconds(timeout))[0]:
            raise TimeoutError(f"the group after {timeout:g} s: not in the pool yet")
        self._leaving.settle()
        self._raise_if_failed()

    def release(self) -> None:
        """Give the memory back to the pool, once its tensors are gone and no copy to a device
        reads it.

        Raises:
            StillframeError: The ticket was released before.
        """
        self._birth.refuse_child()
        self._refuse_released()
        self._released = True
        self._tensors = self._memory = None

    def _writes(self) -> list[int]:
        """Return how often each tensor that `tensors` returns was written to since it was made."""
        if self._tensors is None:
            return [0] * len(self._layout.views)
        return [now._version - then for now, then in zip(self._tensors, self._made, strict=True)]

    def _refuse_released(self) -> None:
        if self._released:
            raise StillframeError("this Ticket was released: its memory may be others' already")

    def _raise_if_failed(self) -> None:
        error = self._leaving.error
        if error is not None:
            raise error

    def _sources(self) -> list[Source]:
        """Return the group's bytes in the pool, for a copy to a device. Some of them may still be
        on their way from the device.

        Raises:
            StillframeError: The ticket was released, or its copies failed.
            TornSnapshotError: A source was written to before it was copied.
        """
        self._birth.refuse_child()
        self._refuse_released()
        self._leaving.poll()
        self._raise_if_failed()
        if self._memory is None:
            raise StillframeError("this Ticket was released: its memory may be others' already")
        return sources_in(self._memory, self._leaving.core.offsets(), self._layout)


def _finish_at_exit() -> None:
    """Wait for running copies, because the interpreter is about to free their sources."""
    for leaving in list(completion.copying.values()):
        if isinstance(leaving, Leaving):
            with contextlib.suppress(Exception):
                leaving.core.wait(None)
                leaving.settle()


atexit.register(_finish_at_exit)
