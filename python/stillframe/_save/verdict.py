"""`Verdict`: whether a deferred copy holds the state at the call.

    made ──make_steps_wait──▶ steps wait for the copy ──let_steps_go──▶ no step waits ──▶ ended
                                 │ judge: compares versions, once

The core compares samples of the copied bytes. This module compares torch's version counters, once,
when the first caller needs the verdict. Later callers get the same answer, because an optimizer's
step may have written to the tensors since.
"""

from __future__ import annotations

from collections.abc import Sequence

from stillframe._watch import gate

_NOTHING = gate.Deferral()  # replaces the deferral of a save that has ended


class Verdict:
    """The comparison of version counters for one save or snapshot.

    Any thread and any signal handler may use a verdict at any time. A verdict does not keep the
    save or snapshot alive.

    Args:
        deferral: The storages that are copied after the call.
    """

    def __init__(self, deferral: gate.Deferral) -> None:
        self._deferral = deferral
        self._answers: list[int] = []  # the results of `judge`; the first one counts
        self._over = False  # `let_steps_go` was called

    @property
    def is_needed(self) -> bool:
        """Whether any storage is copied after the call."""
        return bool(self._deferral.indices)

    def make_steps_wait(self, pending: gate.Pending) -> None:
        """Make every later step wait for the copy that `pending` represents."""
        if not self.is_needed:  # no step has to wait
            self._deferral.close()
            return
        gate.track(pending, self._deferral)
        if self._over:  # another thread called `let_steps_go` in the meantime
            gate.untrack(pending)

    def judge(self) -> int:
        """Return the number of a storage that was written to since the call; -1 if none was."""
        if not self._answers:
            self._answers.append(self._deferral.torn())
        return self._answers[0]  # all threads get the first answer

    def let_steps_go(self, pending: gate.Pending) -> None:
        """Let optimizer steps run without waiting for the copy. May be called again."""
        self._over = True
        gate.untrack(pending)

    def end(self, pending: gate.Pending) -> None:
        """Drop everything at the end of the save. May be called again."""
        self.let_steps_go(pending)
        self._deferral.close()
        self._deferral = _NOTHING

    def release(self) -> None:
        """Drop the tensors. `stop_deferring_storage_owner` may still be called."""
        self._deferral.release()

    def stop_deferring_storage_owner(self, index: int, names: Sequence[str]) -> str:
        """Have later saves capture the whole state of the optimizer that owns the storage. Return
        words for the storage, for an error message.

        Args:
            index: The number of a torn storage.
            names: The key paths of its tensors; may be empty.
        """
        self._deferral.distrust(index)
        return ", ".join(names) if names else f"storage {index}"
