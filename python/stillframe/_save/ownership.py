"""Who owns which storage: what is known of every optimizer that has stepped.

An `Owner` stands for one optimizer, found by a weak reference. It knows whether the optimizer
`qualifies` (its step is torch's own, or was vouched for with `register_optimizer`), whether a
step of it is going on, and through its ``Observer`` (C) which of its storages change in steps
only. Nothing here keeps an optimizer or a tensor alive.

Several threads may step different optimizers, and a signal handler may come in anywhere. So
there is no lock: shared state is changed by single dict and set operations, which the interpreter
lock makes atomic, and one owner is only ever changed by the thread that steps its optimizer.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer

from stillframe import _core

# The code of the wrapper in which torch runs the hooks of a step.
_HOOKED = Optimizer.profile_hook_step(lambda *_: None).__code__
_MAX_LAYERS = 32

_owners: dict[int, Owner] = {}  # by id(optimizer)
_active: set[int] = set()  # serials of optimizers between a step's start and its end
_claimed: dict[int, int] = {}  # storage -> serial of the first owner; kept by the observers
_vouched: set[Any] = set()  # the step functions of registered classes
_serials = itertools.count(1)


def _layers(step: Any) -> list[Any]:
    """The functions between a step's hooks, outermost first.

    What is wrapped around the hooks (an LR scheduler, Lightning, a compiled step) runs before or
    after the step as far as the gate is concerned, and is left out.
    """
    layers: list[Any] = []
    inside = False
    for _ in range(_MAX_LAYERS):
        if step is None:
            break
        step = getattr(step, "__func__", step)
        if not inside and getattr(step, "__code__", None) is _HOOKED:
            inside = True
            layers.clear()
        else:
            layers.append(step)
        inner = getattr(step, "__wrapped__", None)
        step = inner if inner is not None else getattr(step, "_torchdynamo_orig_callable", None)
    return layers


def _module(function: Any) -> str:
    # `__module__` is copied by functools.wraps; the globals are the function's own.
    name = getattr(function, "__globals__", {}).get("__name__", "")
    return name if isinstance(name, str) else ""


def _is_known(step: Any) -> bool:
    layers = _layers(step)
    if not layers:
        return False
    if layers[0] in _vouched:
        return True
    return _module(layers[-1]).startswith("torch.optim.") and all(
        _module(layer).startswith("torch.") for layer in layers
    )


def register_optimizer(optimizer_class: type[Optimizer]) -> None:
    """Vouches for an optimizer class, so that saves may overlap training with it.

    By this call you promise that the class's ``step`` calls the closure, if it is given one,
    before it changes anything, and that nothing outside ``step`` writes the optimizer's
    parameters and state. Subclasses count only if they inherit ``step`` unchanged.

    Args:
        optimizer_class: A subclass of ``torch.optim.Optimizer``.

    Raises:
        TypeError: It is not one.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(f"expected a subclass of torch.optim.Optimizer, got {optimizer_class!r}")
    layers = _layers(optimizer_class.step)
    if layers:
        _vouched.add(layers[0])


class Owner:
    """One optimizer, as far as saves are concerned.

    Attributes:
        distrusted: Everything of it is captured, for as long as it lives.
        ungated: A step of it did not call the closure it was given, so the gate never waits for
            the closure again.
        gated: The closure passed on in the present step has been called.
    """

    __slots__ = (
        "__weakref__",
        "_depth",
        "_known",
        "_rivals",
        "_seen",
        "_serial",
        "distrusted",
        "gated",
        "observer",
        "ref",
        "ungated",
    )

    def __init__(self, optimizer: Optimizer) -> None:
        self._serial = next(_serials)
        self._depth = 0
        self._known = False
        self._seen: tuple[weakref.ref[Any] | None, int] = (None, 0)
        self._rivals: weakref.WeakSet[Owner] = weakref.WeakSet()
        self.distrusted = False
        self.ungated = False
        self.gated = True
        self.observer = _core.Observer(_claimed, self._serial)
        self.ref = weakref.ref(optimizer, _Burial(id(optimizer)))

    def qualifies(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's step is torch's own or that of a registered class."""
        own = optimizer.__dict__.get("step")  # where LR schedulers put their wrapper
        step = type(optimizer).step if own is None else own
        seen, vouched = self._seen
        if seen is None or seen() is not step or vouched != len(_vouched):
            self._known = _is_known(step)
            # A bound method dies at once and is looked at each time; held, it would keep the
            # optimizer alive.
            try:
                self._seen = (weakref.ref(step), len(_vouched))
            except TypeError:
                self._seen = (None, 0)
        return self._known

    def begin(self, optimizer: Optimizer) -> None:
        """A step begins. Until it ends, every save captures everything.

        A step that raised has left its mark, since torch then runs no hook. So a mark counts as
        a step around this one only where that step is found on the stack.
        """
        _active.add(self._serial)
        nested = self._depth > 0 and _steps_on_stack(optimizer) > 1
        self._depth = self._depth + 1 if nested else 1
        if not nested:
            self.gated = True

    def end(self, optimizer: Optimizer) -> None:
        """A step has ended: looks at what only the next one should change."""
        if self._depth > 1:
            self._depth -= 1
            return
        if not self.gated:
            self.distrusted = self.ungated = True
        try:
            if self._known and not self.distrusted:
                self._record(optimizer)
        finally:
            self._depth = 0
            _active.discard(self._serial)

    def _record(self, optimizer: Optimizer) -> None:
        groups, state = optimizer.param_groups, optimizer.state
        # A torch function mode (a default device is one) would run Python code at each read.
        with torch._C.DisableTorchFunction():
            if not self.observer.stepped(groups, state):
                return
            try:
                clashes = self.observer.enrol(groups, state)
            except MemoryError:
                return  # nothing is watched then, so everything is captured
        for serial, storage in clashes:
            for rival in living():
                if rival._serial == serial:
                    rival.observer.capture(storage)
                    rival._rivals.add(self)
                    self._rivals.add(rival)

    def compare(self) -> None:
        """The gate of the next step is reached."""
        with torch._C.DisableTorchFunction():
            self.observer.compare()

    def defer(
        self,
        numbers: dict[int, int],
        rows: bytearray,
        indices: list[int],
        owners: list[int],
        tensors: list[torch.Tensor],
        versions: list[int],
    ) -> None:
        """Marks what of a save may be copied late; see ``Observer.defer``."""
        optimizer = self.ref()
        if optimizer is None or self.distrusted or not self.qualifies(optimizer):
            return
        groups, state = optimizer.param_groups, optimizer.state
        self.observer.defer(groups, state, numbers, rows, indices, owners, tensors, versions)

    def bury(self) -> None:
        """The optimizer is gone. Storages it shared with another belong to that one alone."""
        _active.discard(self._serial)
        for rival in tuple(self._rivals):
            rival.observer.forget()


class _Burial:
    """The callback of an owner's weak reference."""

    __slots__ = ("_key",)

    def __init__(self, key: int) -> None:
        self._key = key

    def __call__(self, ref: weakref.ref[Optimizer]) -> None:
        owner = _owners.get(self._key)
        if owner is not None and owner.ref is ref:
            del _owners[self._key]
            owner.bury()


def _steps_on_stack(optimizer: Optimizer) -> int:
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None:
        if frame.f_code is _HOOKED and frame.f_locals.get("self") is optimizer:
            count += 1
        frame = frame.f_back
    return count


def _loaded(optimizer: Optimizer) -> None:
    """``load_state_dict`` has run: whatever was learned is learned again."""
    owner = find(optimizer)
    if owner is not None:
        owner.observer.forget()


def find(optimizer: Optimizer) -> Owner | None:
    """The owner that stands for the optimizer, if it has ever stepped."""
    owner = _owners.get(id(optimizer))
    return owner if owner is not None and owner.ref() is optimizer else None


def meet(optimizer: Optimizer) -> Owner:
    """The owner that stands for the optimizer; a new one at its first step."""
    owner = find(optimizer)
    if owner is None:
        owner = Owner(optimizer)
        _owners[id(optimizer)] = owner
        register: Callable[..., Any] = optimizer.register_load_state_dict_post_hook
        register(_loaded)
    return owner


def living() -> Iterator[Owner]:
    """Every owner, as of now."""
    # A list is filled in one piece. A tuple of a view is made between two looks at the dict, and a
    # collection of garbage there takes out the owners of optimizers that it finds.
    return iter(list(_owners.values()))


def active() -> bool:
    """Whether any optimizer is between a step's start and its end."""
    return bool(_active)
