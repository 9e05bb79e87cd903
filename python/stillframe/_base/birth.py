"""`ForkGuard`: finds out whether an object was made before a fork, by the parent process."""

from __future__ import annotations

from stillframe import _core
from stillframe.errors import ForkError


class ForkGuard:
    """The process that made an object. A forked child must not use the object, because the child
    lacks the object's threads or memory. `what` names the object in the error, such as "this
    Engine"."""

    __slots__ = ("_generation", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._generation = _core.fork_generation()

    def in_forked_child(self) -> bool:
        """Return whether this process is a forked child of the process that made the object."""
        return self._generation != _core.fork_generation()

    def refuse_forked_child(self) -> None:
        """Raise ForkError in a forked child."""
        if self.in_forked_child():
            raise ForkError(
                f"{self._what} was made before fork() and belongs to the parent process. A forked"
                " child may use stillframe.default_engine(), which makes one of its own, or make"
                " an Engine."
            )
