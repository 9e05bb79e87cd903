"""Which process an object belongs to: the one that made it, and none that was forked later."""

from __future__ import annotations

from stillframe import _core
from stillframe.errors import ForkError


class Birth:
    """Kept by whatever has threads or memory behind it that a forked child does not have.

    Args:
        what: Names the object in the error, as in "this Engine".
    """

    __slots__ = ("_generation", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._generation = _core.fork_generation()

    def foreign(self) -> bool:
        """Whether this process is a forked child of the one that made the object."""
        return self._generation != _core.fork_generation()

    def refuse_child(self) -> None:
        """
        Raises:
            ForkError: In a forked child.
        """
        if self.foreign():
            raise ForkError(
                f"{self._what} was made before fork() and belongs to the parent process. A forked"
                " child may use stillframe.default_engine(), which makes one of its own, or make"
                " an Engine."
            )
