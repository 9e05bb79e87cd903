"""Tracks the copy of a snapshot: its sources, its end, and the verdict on torn sources.

    made -> copying -> ended -> settled

The copy is settled when the verdict is known. The verdict is given once, from the core's samples
and torch's version counters (`_save/verdict.py`).

`copy_to_ordinary_memory` makes such a copy in ordinary memory, for a full pool.
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
from stillframe._base.calls import inside_call
from stillframe._save import completion
from stillframe._save.verdict import Verdict
from stillframe._tree.walk import Tree
from stillframe._watch.gate import Deferral
from stillframe.errors import StillframeError, TornSnapshotError

log = logging.getLogger("stillframe")

T = TypeVar("T")

_ALIGN = (
    64  # bytes; the alignment of each storage's copy in `copy_to_ordinary_memory`, as in the pool
)


class SnapshotLike(Protocol):
    """The method of `Snapshot` that this module calls."""

    def _names(self, index: int) -> list[str]:
        """Return the key paths of the tensors over the storage with this number."""


class Copy:
    """The copy of one snapshot. It lives until the copy has ended, even if the Snapshot is freed.

    Args:
        core: The core's snapshot, with leased memory.
        tree: The tree that is copied.
        deferral: The storages that are copied after the call.

    Attributes:
        devices: The numbers of the CUDA devices that have storages of the tree.
        shared: Forked children may read the memory.
        error_seen: A caller has got the error, so it is not logged when the Snapshot is freed.
        gate_wait_s: How long optimizer steps have waited for the copy.
        weak_snapshot: A weak reference to the Snapshot; None before there is one.
    """

    def __init__(
        self, core: _core.Snapshot, tree: Tree, deferral: Deferral, *, shared: bool
    ) -> None:
        self.core = core
        self.sources = tree.storages  # kept alive until they are copied
        self.verdict = Verdict(deferral)
        self.devices = tree.devices
        self.shared = shared
        self.error_seen = False
        self.gate_wait_s = 0.0
        self.weak_snapshot: Callable[[], SnapshotLike | None] | None = None
        self._when_settled: list[Callable[[], object]] = []  # functions to call
        # Empty until the copy is settled. Then the first element is the error, or None.
        self._ends: list[StillframeError | None] = []

    def start(self) -> None:
        """Copy the captured storages of host memory. Threads copy the other storages later."""
        outlasts_call = bool(self.verdict.is_needed or self.devices)
        if outlasts_call:
            completion.thread.start()
            completion.copying[self.core.number] = self
        try:
            self.core.start(_device.streams(self.devices))
        finally:
            # `copying` keeps the sources alive until the core's notice of the end, even if Ctrl-C
            # ends this call. There is no notice if the copy has ended already.
            if outlasts_call:
                has_ended, _ = self.core.wait(0)
                if has_ended:
                    completion.copying.pop(self.core.number, None)
        self.verdict.make_steps_wait(self)
        self.settle()

    def gate(self) -> bool:
        """Wait until no host memory of the tree is read any more. Have the calling thread's current
        streams wait for the copies from devices.

        Return False if copies from devices still run. The next step then calls this again.
        """
        entered = time.perf_counter()
        with inside_call():
            if self.devices:
                copied = self.core.gate(_device.streams(self.devices))
            else:
                self.core.wait(None)
                copied = True
            self.gate_wait_s += time.perf_counter() - entered
            if copied:
                self.settle()
            else:
                self.verdict.judge()  # before the step, which changes the version counters
        return copied

    def finish(self) -> None:
        """Wait until the copy has ended, and settle it."""
        with inside_call():
            self.core.wait(None)  # without a limit
            self.settle()

    def on_copy_ended(self) -> None:
        self.settle()

    def settle(self) -> None:
        """Settle the copy if it has ended. No lock: a signal handler may interrupt this."""
        if self.is_settled():
            return
        ended, torn = self.core.wait(0)  # `torn` is the number of a changed storage, or -1
        if not ended:
            return
        reason = self.core.error()  # why the copy has failed, or ""
        if torn < 0 and not reason:
            torn = self.verdict.judge()
        if self.is_settled():  # by a signal handler, or another thread
            return
        error: StillframeError | None = None
        if reason:
            error = StillframeError(f"the snapshot could not be copied: {reason}")
        elif torn >= 0:
            error = self._torn_error(torn)
        self._ends.append(error)  # the first one counts
        self.verdict.let_steps_go(self)
        self.verdict.release()
        self.sources = []
        while self._when_settled:
            with contextlib.suppress(IndexError):  # another thread has taken the last one
                completion.callbacks.put(self._when_settled.pop(0))

    def call_when_settled(self, function: Callable[[], object]) -> None:
        """Call `function` on the callback thread once the copy is settled."""
        self._when_settled.append(function)
        if self.is_settled():
            with contextlib.suppress(ValueError):  # `settle` has taken the function
                self._when_settled.remove(function)
                completion.callbacks.put(function)

    def is_settled(self) -> bool:
        return bool(self._ends)

    @property
    def error(self) -> StillframeError | None:
        """The error of the copy; None if there is none, or it is not known yet."""
        return self._ends[0] if self._ends else None

    def _torn_error(self, index: int) -> TornSnapshotError:
        """Return the error of a snapshot whose storage number `index` changed during the copy."""
        snapshot = self.weak_snapshot() if self.weak_snapshot is not None else None
        names = snapshot._names(index) if snapshot is not None else []
        what = self.verdict.stop_deferring_storage_owner(index, names)
        error = TornSnapshotError(
            f"{what} changed outside the optimizer's step while a snapshot was still being copied."
            " Call wait() before such a change, or take the snapshot with overlap=False. This"
            " optimizer's state is copied during the call from now on.",
            names,
        )
        if snapshot is None and self.weak_snapshot is not None:
            # The Snapshot was freed, but tensors of the tree may be in use.
            log.error("stillframe: a snapshot that is in use is damaged: %s", error)
        return error


# ---- forks and the end of the process ----


def _copies() -> list[Copy]:
    return [copy for copy in list(completion.copying.values()) if isinstance(copy, Copy)]


def _wait_for_shared_copies() -> None:
    """Wait for shared copies: a child gets their memory as it is at the fork."""
    for copy in _copies():
        if copy.shared:
            copy.core.wait(None)


def _wait_for_copies_at_exit() -> None:
    """Wait for running copies before the interpreter frees their sources."""
    for copy in _copies():
        copy.finish()


atexit.register(_wait_for_copies_at_exit)
os.register_at_fork(before=_wait_for_shared_copies)


def copy_to_ordinary_memory(tree: T) -> tuple[T, int, int]:
    """Copy a tree as `snapshot` does, into ordinary memory. Return the new tree, the number of its
    tensors, and the bytes of its storages."""
    source = Tree(tree, lanes=False)  # no lane copies; `rebuild` copies storages on devices
    offsets: list[int] = []
    end = 0
    for _, nbytes in source.sources():
        offsets.append(end)
        end += (nbytes + _ALIGN - 1) // _ALIGN * _ALIGN  # rounded up to a multiple
    # The tensors over the memory keep it alive.
    memory = mmap.mmap(-1, max(end, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    base = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    for (address, nbytes), offset in zip(source.sources(), offsets, strict=True):
        if address:  # it is 0 for storages on devices
            ctypes.memmove(base + offset, address, nbytes)
    built, _ = source.rebuild(memory, offsets)
    return built, source.num_tensors(), source.nbytes()
