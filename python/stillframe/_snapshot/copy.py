"""Tracks the copy of a snapshot: its sources, its end, and the verdict on torn sources.

    started -> copying -> ended -> settled: the verdict of the two detectors, given once

The first caller that needs the verdict gives it: an optimizer's step, `Snapshot.wait()`, the
completion thread, a fork, or the end of the process.

`ordinary_copy` makes a copy like `snapshot`'s in ordinary memory, for a full pool.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import mmap
import os
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from stillframe import _core
from stillframe._base import device as _device
from stillframe._base.calls import inside
from stillframe._save import completion
from stillframe._save.verdict import Verdict
from stillframe._tree.walk import Tree
from stillframe._watch.gate import Deferral
from stillframe.errors import StillframeError, TornSnapshotError

log = logging.getLogger("stillframe")

T = TypeVar("T")

_ALIGN = 64  # bytes; alignment of each storage, as in the pool


class Owner(Protocol):
    """The Snapshot of a copy."""

    def _names(self, index: int) -> list[str]: ...


class Copy:
    """The copy of one snapshot, with its sources and detectors.

    Lives until the copy has ended, whatever becomes of the Snapshot.
    """

    def __init__(
        self, core: _core.Snapshot, tree: Tree, deferral: Deferral, *, shared: bool
    ) -> None:
        self.core = core
        self.sources = tree.storages  # kept alive while the lane reads them
        self.verdict = Verdict(deferral)
        self.devices = tree.devices
        self.shared = shared
        self.seen = False  # whether the error was raised to a caller
        self.gate_wait_s = 0.0
        self.owner: Callable[[], Owner | None] | None = None
        self._when_settled: list[Callable[[], object]] = []  # functions to call once it is settled
        self._ends: list[StillframeError | None] = []  # the first is the error, once it is settled

    def start(self) -> None:
        """Copy the captured storages, and start the copies of the others by the lane and the
        devices."""
        later = bool(self.verdict.is_needed or self.devices)
        if later:
            completion.completion.start()
            completion.copying[self.core.number] = self
        try:
            self.core.start(_device.streams(self.devices))
        finally:
            # After a Ctrl-C too, the entry in `copying` keeps the sources until the copy has ended.
            # A copy without bytes gets no notice of its end, so its entry is removed here.
            if later and self.core.wait(0)[0]:
                completion.copying.pop(self.core.number, None)
        self.verdict.launched(self)
        self.settle()

    def gate(self) -> bool:
        """Wait until no host memory of the tree is read, and make the current streams wait.

        The calling thread's current streams then wait for the copies from devices. Returns False
        if such copies still run.
        """
        entered = time.perf_counter()
        with inside():
            if self.devices:
                copied = self.core.gate(_device.streams(self.devices))
            else:
                copied = True
                self.core.wait(None)
            self.gate_wait_s += time.perf_counter() - entered
            if copied:
                self.settle()
            else:  # judge now: the step that follows changes the versions before the copy has ended
                self.verdict.judge()
        return copied

    def finish(self) -> None:
        """Wait for the end without the completion thread."""
        with inside():
            self.core.wait(None)
            self.settle()

    def after_copy(self) -> None:
        """Handle the end of the copy; called on the completion thread."""
        self.settle()

    def settle(self) -> None:
        """Give the verdict if the copy has ended and no other caller has given it.

        It has no lock: a signal handler may interrupt it, and wait for a thread that calls it.
        """
        if self.is_settled():
            return
        ended, torn = self.core.wait(0)
        if not ended:
            return
        failed = self.core.error()
        if torn < 0 and not failed:
            torn = self.verdict.judge()
        if self.is_settled():  # by a signal handler, or another thread
            return
        error: StillframeError | None = None
        if failed:
            error = StillframeError(f"the snapshot could not be copied: {failed}")
        elif torn >= 0:
            error = self._torn_error(torn)
        self._ends.append(error)  # the first one counts
        self.verdict.over(self)
        self.verdict.release()
        self.sources = []
        while self._when_settled:
            with contextlib.suppress(IndexError):  # another thread was faster
                completion.callbacks.put(self._when_settled.pop(0))

    def call_when_settled(self, function: Callable[[], object]) -> None:
        """Call `function` on the callbacks' thread once the verdict is known."""
        self._when_settled.append(function)
        if self.is_settled():
            with contextlib.suppress(ValueError):  # `settle` has taken it
                self._when_settled.remove(function)
                completion.callbacks.put(function)

    def is_settled(self) -> bool:
        return bool(self._ends)

    @property
    def error(self) -> StillframeError | None:
        """The error that makes the copy unusable; None if none is known."""
        return self._ends[0] if self._ends else None

    def _torn_error(self, index: int) -> TornSnapshotError:
        """Return the error of a snapshot whose source changed during the copy."""
        owner = self.owner() if self.owner is not None else None
        names = owner._names(index) if owner is not None else []
        what = self.verdict.blame(index, names)
        error = TornSnapshotError(
            f"{what} changed outside the optimizer's step while a snapshot was still being copied."
            " Call wait() before such a change, or take the snapshot with overlap=False. This"
            " optimizer's state is copied during the call from now on.",
            names,
        )
        if owner is None and self.owner is not None:
            log.error("stillframe: a snapshot that is in use is damaged: %s", error)
        return error


# ---- forks and the end of the process ----


def _copies() -> list[Copy]:
    return [copy for copy in list(completion.copying.values()) if isinstance(copy, Copy)]


def _before_fork() -> None:
    """Complete shared copies, because a child gets shared memory as it is at the fork."""
    for copy in _copies():
        if copy.shared:
            copy.core.wait(None)


def _finish_at_exit() -> None:
    """Finish running copies, because the interpreter is about to free their sources."""
    for copy in _copies():
        copy.finish()


atexit.register(_finish_at_exit)
os.register_at_fork(before=_before_fork)


def ordinary_copy(tree: T) -> tuple[T, int, int]:
    """Copy a tree as `snapshot` does, into ordinary memory.

    Returns:
        The tree, the number of its tensors, and the bytes of its storages.
    """
    source = Tree(tree, lanes=False)
    offsets: list[int] = []
    end = 0
    for _, nbytes in source.sources():
        offsets.append(end)
        end += -(-nbytes // _ALIGN) * _ALIGN
    # The memory lives as long as a tensor over it.
    memory = mmap.mmap(-1, max(end, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    base = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    for (address, nbytes), offset in zip(source.sources(), offsets, strict=True):
        if address:
            ctypes.memmove(base + offset, address, nbytes)
    built, _ = source.rebuild(memory, offsets)
    return built, source.num_tensors(), source.nbytes()
