"""Replaces methods and other attributes of single objects, and restores them.

Lightning does some things without its CheckpointIO: it asks the file system whether a checkpoint
exists, makes links, and tells loggers of saves. The companion replaces those methods on the objects
of one Trainer, never on a class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Method = Callable[..., Any]

_MISSING = object()


class _Over:
    """A function that replaces a method.

    Once it is removed it calls the original, because another replacement may still call it.
    """

    def __init__(self, original: Method, function: Callable[..., Any]) -> None:
        self.original = original
        self._function = function
        self.active = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active:
            return self.original(*args, **kwargs)
        return self._function(self.original, *args, **kwargs)


class Wraps:
    """The replaced attributes of one Trainer's objects."""

    def __init__(self) -> None:
        self._placed: list[tuple[Any, str, Any, Any]] = []

    def put(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Make `owner.name(...)` call `function(original, ...)`; no effect if it does already."""
        attributes = vars(owner)
        before = attributes.get(name, _MISSING)
        if isinstance(before, _Over) and before.active:
            return
        over = _Over(getattr(owner, name), function)
        attributes[name] = over
        self._placed.append((owner, name, before, over))

    def exchange(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name` to `value`, unless somebody assigns another value later."""
        attributes = vars(owner)
        self._placed.append((owner, name, attributes[name], value))
        attributes[name] = value

    def restore(self) -> None:
        """Restore everything. May be called again."""
        while self._placed:
            owner, name, before, over = self._placed.pop()
            if isinstance(over, _Over):
                over.active = False
            attributes = vars(owner)
            if attributes.get(name) is not over:
                continue  # somebody else has replaced or deleted it
            if before is _MISSING:
                del attributes[name]
            else:
                attributes[name] = before
