"""The process that an object belongs to: the one that made it, never a forked child of that one."""

from __future__ import annotations

from stillframe import _core
from stillframe.errors import ForkError


class Birth:
    """The process that made an object whose threads or memory a forked child does not have.

    Args:
        what: The object's name in the error, as in "this Engine".
    """

    __slots__ = ("_generation", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._generation = _core.fork_generation()

    def foreign(self) -> bool:
        """Return whether this process is a forked child of the one that made the object."""
        return self._generation != _core.fork_generation()

    def refuse_child(self) -> None:
        """Raise an error in a forked child.

        Raises:
            ForkError: The process that made the object is a parent of this one.
        """
        if self.foreign():
            raise ForkError(
                f"{self._what} was made before fork() and belongs to the parent process. A forked"
                " child may use stillframe.default_engine(), which makes one of its own, or make"
                " an Engine."
            )
