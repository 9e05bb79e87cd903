"""Methods put over those of single objects, and other exchanges there; taken back again.

Some of what Lightning does never reaches a CheckpointIO: it asks the file system whether a
checkpoint exists, makes links, tells loggers of saves. The companion puts functions over those
methods, on the objects of one Trainer and never on a class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Method = Callable[..., Any]

_MISSING = object()


class _Over:
    """A function over a method. Passes everything on once it was taken off, for somebody may have
    put another one over it and still call it."""

    def __init__(self, original: Method, function: Callable[..., Any]) -> None:
        self.original = original
        self._function = function
        self.active = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active:
            return self.original(*args, **kwargs)
        return self._function(self.original, *args, **kwargs)


class Wraps:
    """What was put over methods for one Trainer."""

    def __init__(self) -> None:
        self._placed: list[tuple[Any, str, Any, Any]] = []

    def put(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """`owner.name(...)` calls `function(original, ...)` from now on. Once for each method."""
        attributes = vars(owner)
        before = attributes.get(name, _MISSING)
        if isinstance(before, _Over) and before.active:
            return
        over = _Over(getattr(owner, name), function)
        attributes[name] = over
        self._placed.append((owner, name, before, over))

    def exchange(self, owner: Any, name: str, value: Any) -> None:
        """`owner.name` is `value` from now on, unless somebody assigns another one."""
        attributes = vars(owner)
        self._placed.append((owner, name, attributes[name], value))
        attributes[name] = value

    def restore(self) -> None:
        """Takes everything off. May be called again."""
        while self._placed:
            owner, name, before, over = self._placed.pop()
            if isinstance(over, _Over):
                over.active = False
            attributes = vars(owner)
            if attributes.get(name) is not over:
                continue  # somebody put another one there, or took it off
            if before is _MISSING:
                del attributes[name]
            else:
                attributes[name] = before
