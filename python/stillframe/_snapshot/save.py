"""Implements `SnapshotSave`: a save that Python code writes, from a snapshot or the state itself.

Another CheckpointIO writes it as external work of the log (`_lightning/wrapped.py`), or all ranks
together write it through torch.distributed.checkpoint (`_dcp/rounds.py`).

    made ──begin──▶ under way ──record_copied──▶ staged ──end──▶ durable or failed
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from stillframe import _core
from stillframe._save.external import ExternalSave
from stillframe._save.handle import Deadline
from stillframe._save.options import OnDurable
from stillframe._save.report import IoMode, SaveReport
from stillframe._snapshot.snapshot import (
    Snapshot,
    gate_wait_s,
    get_copy_error,
    is_copied,
    will_return,
)
from stillframe.errors import StillframeError


class SnapshotSave(ExternalSave):
    """The handle of a save that Python code writes; `ExternalSave` explains the arguments."""

    def __init__(
        self,
        path: str,
        given: Any,
        on_durable: OnDurable | None,
        *,
        entered: float,
        slot: _core.Slot | None = None,
        known_as: str = "a save",
    ) -> None:
        super().__init__(path, given, on_durable, entered=entered, slot=slot, known_as=known_as)
        self._snapshot: Snapshot[Any] | None = None  # the snapshot that is written, if any
        self._nbytes = self._deferred_nbytes = self._num_tensors = 0  # of the snapshot
        self._copied_s: float | None = None  # seconds from the call to the end of the copy

    # ---- for users ----

    def progress(self) -> tuple[int, int]:
        """Return (bytes written, bytes to write). The first is 0 until the save has ended."""
        return (self._nbytes if self._outcome.settled else 0), self._nbytes

    def _is_staged(self) -> bool:
        snapshot = self._snapshot
        return snapshot is not None and is_copied(snapshot)

    def _wait_until_staged(self, deadline: Deadline) -> bool:
        snapshot = self._snapshot
        if snapshot is not None and not self._outcome.settled:
            try:
                snapshot.wait(deadline.left())
            except TimeoutError:
                raise self._timeout_error(deadline, "staged") from None
            except StillframeError:  # the copy failed, so the save will fail too
                return False
        return self._outcome.error is None

    # ---- for the code that makes the save ----

    def set_snapshot(self, snapshot: Snapshot[Any]) -> None:
        """Set the snapshot that is written. Without this call, the user's state itself is."""
        self._snapshot = snapshot
        self._nbytes, self._num_tensors = snapshot.nbytes, snapshot.num_tensors
        self._deferred_nbytes = snapshot.deferred_nbytes

    def snapshot(self) -> Snapshot[Any] | None:
        """Return the snapshot that is written, or None. Return None after the save's end too."""
        return self._snapshot

    def record_launch(self) -> None:
        """Record that the save goes on even if the call raises. From now on, calls that need the
        snapshot's memory wait for it."""
        snapshot = self._snapshot
        super().record_launch()
        if snapshot is not None:
            will_return(snapshot)

    def _drop_references(self) -> None:
        self._snapshot = None

    def record_copied(self) -> None:
        """Record that the copy has ended, successfully or not. May be called again."""
        if self._copied_s is None:
            self._copied_s = time.perf_counter() - self._entered
        snapshot = self._snapshot
        if snapshot is not None:
            self._outcome.notify_staged(get_copy_error(snapshot))

    def report(
        self,
        nbytes: int,
        io_mode: IoMode,
        *,
        fallbacks: Sequence[str] = (),
        more_pool_bytes: int = 0,
    ) -> SaveReport:
        """Return the report of a successful save.

        Args:
            nbytes: The number of bytes that were written.
            io_mode, fallbacks: See `SaveReport`.
            more_pool_bytes: Bytes of the pool that the writing has used, without the snapshot.
        """
        self.record_copied()
        assert self._copied_s is not None
        snapshot = self._snapshot
        durable_after_s = time.perf_counter() - self._entered
        call_s = min(self._call_time.seconds, durable_after_s)  # the call may not have returned
        return SaveReport(
            path=self._path,
            nbytes=nbytes,
            num_tensors=self._num_tensors,
            captured_nbytes=self._nbytes - self._deferred_nbytes,
            deferred_nbytes=self._deferred_nbytes,
            blocked_s=call_s,
            gate_wait_s=0.0 if snapshot is None else gate_wait_s(snapshot),
            backpressure_s=self._slot_wait_s,
            staged_after_s=self._copied_s,
            durable_after_s=durable_after_s,
            peak_pool_bytes=self._nbytes + more_pool_bytes,
            io_mode=io_mode,
            fallbacks=tuple(dict.fromkeys(fallbacks)),
        )
