"""`Verdict`: whether a copy that goes on behind its call holds the state of the call.

    made ──launched──▶ steps wait for the copy ──over──▶ no step waits ──▶ ended
                          │ look: compares versions, once

The core compares samples of the copied bytes; here the versions that torch counts are compared.
Whoever needs the answer first asks for it: an optimizer's step, somebody who waits, the completion
thread, a fork. Every later question gets the same answer, because a step may write in between.
"""

from __future__ import annotations

from collections.abc import Sequence

from stillframe._watch import gate

_NOTHING = gate.Deferral()


class Verdict:
    """The version detector of one save or snapshot. Any thread may use it, also a signal handler
    in the middle of another use. It does not keep the save or snapshot alive.

    Args:
        deferral: The storages that are copied after the call.
    """

    def __init__(self, deferral: gate.Deferral) -> None:
        self._deferral = deferral
        self._answers: list[int] = []  # the first one counts
        self._over = False

    @property
    def is_needed(self) -> bool:
        """Whether anything is copied after the call."""
        return bool(self._deferral.indices)

    def launched(self, pending: gate.Pending) -> None:
        """Make every step from now on wait for the copy, which `pending` knows of."""
        if not self.is_needed:
            self._deferral.close()
            return
        gate.track(pending, self._deferral)
        if self._over:  # another thread said so before this line
            gate.untrack(pending)

    def look(self) -> int:
        """Return the number of a storage that something wrote to since the call, or -1."""
        if not self._answers:
            self._answers.append(self._deferral.torn())  # in one step: two threads may look
        return self._answers[0]

    def over(self, pending: gate.Pending) -> None:
        """Make no step wait any more. May be called again."""
        self._over = True
        gate.untrack(pending)

    def end(self, pending: gate.Pending) -> None:
        """Drop everything: the save has ended, or there is none. May be called again."""
        self.over(pending)
        self._deferral.close()
        self._deferral = _NOTHING

    def release(self) -> None:
        """Drop the tensors. `blame` still works."""
        self._deferral.release()

    def blame(self, index: int, names: Sequence[str]) -> str:
        """Capture everything of the storage's owner from now on.

        Returns:
            What an error calls the storage: the names of its tensors, or else its number.
        """
        self._deferral.distrust(index)
        return ", ".join(names) if names else f"storage {index}"
