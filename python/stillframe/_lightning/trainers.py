"""Keeps the Trainers that use a plugin: which of them train, and their replaced methods.

Methods are replaced on the objects of one Trainer, never on a class.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any

from stillframe._lightning.callers import Fabric

Method = Callable[..., Any]

log = logging.getLogger("stillframe")

_NO_COMPANION = (
    "stillframe's companion callback is not among this Trainer's callbacks, so each of its saves"
    " waits until the checkpoint is durable. Create the plugin before the Trainer and pass it as"
    " Trainer(plugins=[...]); the callback comes through the entry points of the installed package."
)

_MISSING = object()  # stands for the old value if the object had no attribute of its own


class _MethodReplacement:
    """A function that replaces a method.

    Other code may keep this function and call it after `Wraps.restore`. The function is not
    `active` then, and only calls the original.
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
        # (owner, attribute, its old value, its new value), in the order of replacement.
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def put(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Make `owner.name(...)` call `function(original, ...)`. Do nothing if the method is
        replaced already."""
        attributes = vars(owner)
        old_value = attributes.get(name, _MISSING)
        if isinstance(old_value, _MethodReplacement) and old_value.active:
            return
        replacement = _MethodReplacement(getattr(owner, name), function)
        attributes[name] = replacement
        self._replaced.append((owner, name, old_value, replacement))

    def exchange(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name` to `value` until `restore`."""
        attributes = vars(owner)
        self._replaced.append((owner, name, attributes[name], value))
        attributes[name] = value

    def restore(self) -> None:
        """Restore every attribute that other code has not changed since. May be called again."""
        while self._replaced:
            owner, name, old_value, new_value = self._replaced.pop()
            if isinstance(new_value, _MethodReplacement):
                new_value.active = False
            attributes = vars(owner)
            if attributes.get(name) is not new_value:  # other code has changed it
                continue
            if old_value is _MISSING:
                del attributes[name]
            else:
                attributes[name] = old_value


class Trainers:
    """The Trainers of one plugin.

    A `caller` is a Trainer, the type `Fabric`, or None for a call without a strategy.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        # The Trainers between on_train_start and on_train_end.
        self._training: weakref.WeakSet[Any] = weakref.WeakSet()
        # The Trainers between setup and teardown, with what was replaced in each.
        self._wraps: weakref.WeakKeyDictionary[Any, Wraps] = weakref.WeakKeyDictionary()

    def add(self, trainer: Any) -> None:
        self._known.add(trainer)

    def register_at_setup(self, trainer: Any) -> Wraps:
        """Register a Trainer at `setup`, and return the object for its replaced methods."""
        self._known.add(trainer)
        self._training.discard(trainer)  # an earlier fit may have ended by an exception
        return self._wraps.setdefault(trainer, Wraps())

    def tear_down(self, trainer: Any) -> None:
        wraps = self._wraps.pop(trainer, None)
        if wraps is not None:
            wraps.restore()

    def is_set_up(self, trainer: Any) -> bool:
        """Return whether a Trainer is between `setup` and `teardown`."""
        return trainer in self._wraps

    def record_training_start(self, trainer: Any) -> None:
        self._known.add(trainer)
        self._training.add(trainer)

    def record_training_end(self, trainer: Any) -> None:
        self._training.discard(trainer)

    def of_caller(self, caller: Any) -> list[Any]:
        """Return the Trainers that a call may come from."""
        if caller is Fabric:
            return []
        if caller is None:
            return list(self._known)  # a Trainer's launcher saves without a strategy on the stack
        return [caller]

    def can_return_before_durable(self, caller: Any) -> bool:
        """Return whether a save by `caller` may return before it is durable."""
        if caller is Fabric:
            return True
        if caller is not None and caller not in self._known:
            self._known.add(caller)  # so that the warning comes once
            log.warning(_NO_COMPANION)
        trainers = self.of_caller(caller)
        if not trainers:
            return True  # no Trainer uses the plugin: as for Fabric
        return any(each in self._training and each.state.status == "running" for each in trainers)

    def training_failed(self, caller: Any) -> bool:
        """Return whether Lightning is handling an exception of the training."""
        if sys.exc_info()[0] is None:
            return False
        # The user may have started the training inside an `except` block, so ask the Trainers too.
        return any(each.state.status == "interrupted" for each in self.of_caller(caller))


def is_trainer(caller: Any) -> bool:
    """Return whether a caller, as in `Trainers`, is a Trainer."""
    return caller is not None and caller is not Fabric


def swaps_weights_during_save(caller: Any) -> bool:
    """Return whether ModelCheckpoint loads the older weights in `saved_models` during a save."""
    module = caller.lightning_module if is_trainer(caller) else None
    return (
        module is not None
        and not module.automatic_optimization
        and isinstance(getattr(module, "saved_models", None), dict)
    )
