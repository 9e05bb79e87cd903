"""A group of tensors in the pool: what left a device, and where its bytes are now.

    LEAVING  its copies are queued, or run: `_Leaving` keeps the sources
    HERE     every byte is in the pool

Two may let the sources go. The completion thread does, when the copies have landed. And before that
whoever brings the next groups does, once the stream that the sources belong to waits for the
copies: what an allocator gives out again on that stream is then written after it was read. So few
groups' worth of sources exist at a time, though the host runs far ahead of the device.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time

import torch

from stillframe import _core
from stillframe._base.birth import Birth
from stillframe._base.timeouts import seconds
from stillframe._offload.layout import Layout, Source, leased
from stillframe._save import completion
from stillframe.errors import StillframeError, TornSnapshotError

log = logging.getLogger("stillframe")


class Leaving:
    """The copies of one group into the pool.

    Args:
        core: Not started yet.
        layout: Of the sources.
        stream: The handle of the stream that they belong to, and its device; None on the host.
    """

    def __init__(
        self, core: _core.Snapshot, layout: Layout, stream: tuple[int, int] | None
    ) -> None:
        self.core, self.stream = core, stream
        self.error: StillframeError | None = None
        self.over = False
        self.copy_s = 0.0  # once it is over
        self._layout: Layout | None = layout
        self._versions = layout.versions()
        # Re-entrant: a signal handler may wait in the middle of another wait.
        self._lock = threading.RLock()

    def storages(self) -> list[int]:
        """Which storages are still read, by torch's number of them."""
        layout = self._layout
        return [source.storage._cdata for source in layout.sources] if layout else []

    def start(self) -> None:
        """Queues the copies; on the host, makes them."""
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
            # Ctrl-C may come just after: what is being copied keeps its sources until that has
            # ended. Of a group without bytes nobody tells the end.
            if self.core.wait(0)[0]:
                completion.copying.pop(self.core.number, None)
        self.settle()
        if completion.completion.exiting:
            self.core.wait(None)
            self.settle()

    def order(self) -> None:
        """Has the sources' stream wait for the copies, and lets the sources go."""
        if self.stream is not None:
            self.core.gate((self.stream,))
        with self._lock:
            self._let_go()

    def after_copy(self) -> None:
        """On the completion thread."""
        self.settle()

    def settle(self) -> None:
        """Looks at what has become of the copies, where they have ended."""
        with self._lock:
            if self.over or not self.core.wait(0)[0]:
                return
            self.copy_s = self.core.copying_s
            self.over = True
            failed = self.core.error()
            if failed:
                self.error = StillframeError(f"the tensors could not be brought away: {failed}")
            self._let_go()

    def look(self) -> None:
        """Asks now whether the sources were written to, where they are still read."""
        with self._lock:
            self._compare()

    def _let_go(self) -> None:
        self._compare()
        layout, self._layout = self._layout, None
        if layout is not None:
            layout.let_go()

    def _compare(self) -> None:
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
    """A group of tensors in the pool's memory. Made by `Offloader.offload`.

    The memory is the ticket's as long as it lives and is not released, and its tensors' beyond
    that. In a child of fork every use raises `ForkError`.
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
        self._made: list[int] = []  # their versions, as they were made
        self._released = False
        self.device = device
        """Where the tensors were."""
        self.nbytes = layout.nbytes
        """Bytes that were copied: what several tensors share counts once."""

    def __repr__(self) -> str:
        state = "released" if self._released else "here" if self.done() else "leaving"
        return f"<Ticket {len(self._layout.views)} tensors of {self.nbytes} bytes, {state}>"

    def tensors(self) -> list[torch.Tensor]:
        """The group as CPU tensors over the pool's memory, in the order given: the same ones at
        every call. Waits until the copy has come. They keep the memory, whatever becomes of the
        ticket, and may be written to: what is brought to the device is what they hold then.

        Raises:
            TornSnapshotError: A source was written to before it was copied.
            StillframeError: The device failed, or the ticket was released.
        """
        self.wait()
        self._refuse_released()
        if self._tensors is None:
            self._tensors = self._layout.over_each([each.storage for each in self._sources()])
            self._made = [tensor._version for tensor in self._tensors]
        return list(self._tensors)

    def done(self) -> bool:
        """Whether every byte is in the pool, or never will be."""
        self._birth.refuse_child()
        return self._leaving.core.wait(0)[0]

    def wait(self, timeout: float | None = None) -> None:
        """Waits until every byte is in the pool. The sources may be written to from then on.

        Raises:
            TimeoutError: `timeout` seconds passed.
            TornSnapshotError, StillframeError: As `tensors`.
        """
        self._birth.refuse_child()
        if not self._leaving.core.wait(seconds(timeout))[0]:
            raise TimeoutError(f"the group after {timeout:g} s: not in the pool yet")
        self._leaving.settle()
        self._raise_error()

    def release(self) -> None:
        """Gives the memory back to the pool: at once, or once its tensors are gone and what is
        being copied to a device has come there.

        Raises:
            StillframeError: It was released before.
        """
        self._birth.refuse_child()
        self._refuse_released()
        self._released = True
        self._tensors = self._memory = None

    def _writes(self) -> list[int]:
        """How often each tensor was written to: nobody has, before they are made."""
        if self._tensors is None:
            return [0] * len(self._layout.views)
        return [now._version - then for now, then in zip(self._tensors, self._made, strict=True)]

    def _refuse_released(self) -> None:
        if self._released:
            raise StillframeError("this Ticket was released: its memory may be others' already")

    def _raise_error(self) -> None:
        error = self._leaving.error
        if error is not None:
            raise error

    def _sources(self) -> list[Source]:
        """Where its bytes are, for whoever brings them: they may still be coming.

        Raises:
            StillframeError, TornSnapshotError: They are of no use.
        """
        self._birth.refuse_child()
        self._refuse_released()
        self._leaving.look()
        self._raise_error()
        if self._memory is None:
            raise StillframeError("this Ticket was released: its memory may be others' already")
        return leased(self._memory, self._leaving.core.offsets(), self._layout)


def _finish_at_exit() -> None:
    """The driver reads tensors that the interpreter is about to free."""
    for leaving in list(completion.copying.values()):
        if isinstance(leaving, Leaving):
            with contextlib.suppress(Exception):
                leaving.core.wait(None)
                leaving.settle()


atexit.register(_finish_at_exit)
