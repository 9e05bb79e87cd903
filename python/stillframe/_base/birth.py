"""The process that an object belongs to: the process that made it, and not its forked children."""

from __future__ import annotations

from stillframe import _core
from stillframe.errors import ForkError


class Birth:
    """A mark of the process that made an object. A forked child lacks the object's threads or
    memory, and so must not use the object.

    Args:
        what: The words for the object in the error, such as "this Engine".
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
            ForkError: This process is a forked child of the one that made the object.
        """
        if self.foreign():
            raise ForkError(
                f"{self._what} was made before fork() and belongs to the parent process. A forked"
                " child may use stillframe.default_engine(), which makes one of its own, or make"
                " an Engine."
            )
