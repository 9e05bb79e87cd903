"""Who owns which storage: what is known of every optimizer that has stepped.

An `Owner` stands for one optimizer, found by a weak reference. It knows whether the optimizer
`qualifies` (its step is known, see `stillframe._watch.steps`), whether a step of it is going on,
and through its ``Observer`` (C) which of its storages change in steps only. Nothing here keeps an
optimizer or a tensor alive.

What looks at an optimizer does so as `bookkeeping`: it may fail there, and then everything of that
optimizer is captured. One for which there can be no owner is only marked while it steps.

Several threads may step different optimizers, and a signal handler may come in anywhere. So
there is no lock: shared state is changed by single dict and set operations, which the interpreter
lock makes atomic, and one owner is only ever changed by the thread that steps its optimizer.

A storage that changed once stays captured until `load_state_dict` or a new storage takes its
place. One that two optimizers own is captured in both.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import weakref
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch.optim import Optimizer

from stillframe import _core
from stillframe._base import device
from stillframe._base.calls import stack
from stillframe._base.dtensor import dtensor, memory_of
from stillframe._watch import steps
from stillframe._watch.guard import guarded
from stillframe._watch.keepers import Marks

log = logging.getLogger("stillframe")

_MIN_NBYTES = 4096  # smaller storages are captured whoever owns them
_MOST_LOOKS = 64  # at parameters, to see whether a save has an optimizer's

_owners: dict[int, Owner] = {}  # by id(optimizer)
# Threads of steps, by id(optimizer), from a step's start to its end; one that raised stays.
_active: dict[int, threading.Thread] = {}
_claimed: dict[int, int] = {}  # storage -> serial of the first owner; kept by the observers
_serials = itertools.count(1)
_told: set[str] = set()  # what was logged, once
# The frames of these are steps: the hooks' wrapper, and `gate`'s around methods that write as well.
step_codes: set[CodeType] = {steps.HOOKED}


def tell_once(sentence: str) -> None:
    """Logs what costs a user overlap."""
    if sentence not in _told:
        _told.add(sentence)
        log.info("stillframe: %s", sentence)


def _give_up(subject: Any, error: Exception) -> None:
    """Bookkeeping of an optimizer, or of its owner, has failed."""
    owner = subject if isinstance(subject, Owner) else _owners.get(id(subject))
    if owner is not None:
        owner.distrust(f"it cannot be watched ({type(error).__name__}: {error})")
    kind = type(subject) if owner is None else owner.kind
    log.debug("stillframe: a %s cannot be watched", kind.__qualname__, exc_info=error)
    tell_once(
        f"a {steps.name_of(kind)} cannot be watched ({type(error).__name__}), so its parameters and"
        " state are copied during the call of each save"
    )


bookkeeping = guarded(_give_up)


class Owner:
    """One optimizer, as far as saves are concerned.

    Attributes:
        closure_place: Where in a step's positional arguments the closure stands, if it does.
        ungated: A step of it did not call the closure it was given, so the gate never waits for
            the closure again.
        gated: The closure passed on in the present step has been called.
        kind: The optimizer's class.
    """

    __slots__ = (
        "__weakref__",
        "_known",
        "_rests",
        "_rivals",
        "_seen",
        "_serial",
        "_steps_nested",
        "_why",
        "closure_place",
        "gated",
        "kind",
        "observer",
        "ref",
        "ungated",
    )

    def __init__(self, optimizer: Optimizer) -> None:
        self._serial = next(_serials)
        self._steps_nested = 0  # that have begun, one in the other
        self._known = False
        self._rests = False  # the observer's word at the end of the last step
        self._seen: tuple[weakref.ref[Any] | None, int] = (None, 0)
        self._rivals: weakref.WeakSet[Owner] = weakref.WeakSet()
        self._why = ""
        self.closure_place: int | None = None
        self.ungated = False
        self.gated = True
        self.kind = type(optimizer)
        self.observer = _core.Observer(_claimed, self._serial)
        self.ref = weakref.ref(optimizer, _Burial(id(optimizer)))

    @property
    def distrusted(self) -> bool:
        """Everything of it is captured, for as long as it lives."""
        return bool(self._why)

    def distrust(self, why: str) -> None:
        """Has everything captured from now on; the first reason stays."""
        self._why = self._why or why

    def qualifies(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's step is torch's own, a listed or a registered class's."""
        own = optimizer.__dict__.get("step")  # where LR schedulers put their wrapper
        step = type(optimizer).step if own is None else own
        seen, vouched = self._seen
        if seen is None or seen() is not step or vouched != len(steps.vouched):
            self._known = steps.is_known(type(optimizer), step)
            self.closure_place = steps.closure_place(step)
            # A bound method dies at once and is looked at each time; held, it would keep the
            # optimizer alive.
            try:
                self._seen = (weakref.ref(step), len(steps.vouched))
            except TypeError:
                self._seen = (None, 0)
        return self._known

    def begin(self, optimizer: Optimizer) -> None:
        """A step begins.

        One that raised has left its mark, since torch then runs no hook. So a mark counts as a
        step around this one only where that step is found on the stack.
        """
        nested = self._steps_nested > 0 and _steps_on_stack(optimizer) > 1
        self._steps_nested = self._steps_nested + 1 if nested else 1
        if not nested:
            self.gated = True

    def end(self, optimizer: Optimizer) -> bool:
        """A step has ended: looks at what only the next one should change. False inside a step
        around it."""
        if self._steps_nested > 1:
            self._steps_nested -= 1
            return False
        if not self.gated:
            self.ungated = True
            self.distrust("its step did not call the closure it was given")
        try:
            if self._known and not self._why:
                groups, state = optimizer.param_groups, optimizer.state
                self._rests = self.observer.rests(groups, state)
                if not self._rests:
                    self._record(groups, state)
        finally:
            self._steps_nested = 0
        return True

    def _record(self, groups: Any, state: Any) -> None:
        # A torch function mode (a default device is one) would run Python code at each read.
        with torch._C.DisableTorchFunction():
            clashes: list[tuple[int, int]] = []
            if self.observer.stepped(groups, state):
                kind = dtensor()
                if kind is not None:
                    _core.Observer.see_through(kind, "_local_tensor")
                try:
                    clashes = self.observer.enrol(groups, state)
                except MemoryError:
                    return  # nothing is watched then, so everything is captured
            self._look()
        for serial, storage in clashes:
            for rival in living():
                if rival._serial == serial:
                    rival.observer.capture(storage)
                    rival._rivals.add(self)
                    self._rivals.add(rival)

    @bookkeeping
    def compare(self) -> None:
        """The gate of the next step is reached."""
        if self._rests:
            return
        with torch._C.DisableTorchFunction():
            self.observer.compare()
            self._look()

    def _look(self) -> None:
        """Has devices copy down what is not decided yet, on the current streams."""
        devices = self.observer.due()
        if devices:
            self.observer.look(device.streams(devices))

    @bookkeeping
    def defer(self, marks: Marks) -> None:
        """Marks what of a save may be copied late; see ``Observer.defer``."""
        optimizer = self.ref()
        if optimizer is None or not self.qualifies(optimizer) or self.distrusted:
            return
        if id(optimizer) in _active:
            return  # its last step raised, halfway through who knows what
        self.observer.defer(optimizer.param_groups, optimizer.state, marks)

    @bookkeeping
    def captured(self, marks: Marks) -> str | None:
        """Says why nothing of the optimizer is copied late in a save that has something of it;
        None where it is, or has not. `marks`: those of everybody."""
        if self._known and not self._why:
            return None
        optimizer = self.ref()
        if optimizer is None or not self._is_in(optimizer, marks):
            return None
        name = steps.name_of(self.kind)
        if self._why:
            return f"what belongs to a {name} was copied during the call, since {self._why}"
        return (
            f"what belongs to a {name} was copied during the call, since its step is not known: if"
            " it calls the closure first, and nothing but the step writes parameters and state, say"
            f" stillframe.register_optimizer({self.kind.__name__}) and it is copied beside training"
        )

    def _is_in(self, optimizer: Optimizer, marks: Marks) -> bool:
        params = (p for group in optimizer.param_groups for p in group["params"])
        for p in map(memory_of, itertools.islice(params, _MOST_LOOKS)):
            if type(p) in (torch.Tensor, torch.nn.Parameter) and p.layout is torch.strided:
                storage = p.untyped_storage()
                number = marks.numbers.get(storage._cdata)
                if number is not None and storage.nbytes() > _MIN_NBYTES:
                    return not marks.is_late(number)
        return False

    def bury(self) -> None:
        """The optimizer is gone. Storages it shared with another belong to that one alone."""
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
            _active.pop(self._key, None)
            owner.bury()


def _steps_on_stack(optimizer: Optimizer) -> int:
    return sum(
        frame.f_code in step_codes and frame.f_locals.get("self") is optimizer
        for frame in stack(sys._getframe(1))
    )


@bookkeeping
def _loaded(optimizer: Optimizer) -> None:
    """``load_state_dict`` has run: whatever was learned is learned again."""
    owner = find(optimizer)
    if owner is not None:
        owner.observer.forget()


def find(optimizer: Optimizer) -> Owner | None:
    """The owner that stands for the optimizer, if it has ever stepped."""
    owner = _owners.get(id(optimizer))
    return owner if owner is not None and owner.ref() is optimizer else None


def find_or_make(optimizer: Optimizer) -> Owner:
    """The owner that stands for the optimizer; a new one at its first step."""
    owner = find(optimizer)
    if owner is None:
        owner = Owner(optimizer)
        _owners[id(optimizer)] = owner
        # What was made without Optimizer.__init__ may lack these hooks: then nothing is learned
        # anew after load_state_dict.
        if hasattr(optimizer, "_optimizer_load_state_dict_post_hooks"):
            optimizer.register_load_state_dict_post_hook(_loaded)
    return owner


def living() -> Iterator[Owner]:
    """Every owner, as of now."""
    # A list is filled in one piece. A tuple of a view is made between two looks at the dict, and a
    # collection of garbage there takes out the owners of optimizers that it finds.
    return iter(list(_owners.values()))


def let_go() -> None:
    """No tensor is referred to until the next step of its optimizer, which learns all anew."""
    for owner in living():
        owner.observer.forget()


def enter(optimizer: Any) -> None:
    """A step begins. Until it ends, every save captures everything: what else is known of the
    optimizer does not matter."""
    _active[id(optimizer)] = threading.current_thread()


def leave(optimizer: Any) -> None:
    """A step, and every one around it, has ended."""
    _active.pop(id(optimizer), None)


def active() -> bool:
    """Whether any optimizer is between a step's start and its end."""
    if not _active:
        return False
    # torch runs no hook behind a step that raised: a mark of this thread counts as long as a step
    # is on its stack. Another thread's counts as long as it lives: to ask for its stack is not
    # safe. CPython 3.11's sys._current_frames holds a lock under which it may let go of the
    # interpreter's, and whoever asks at the same time waits for ever.
    own = threading.current_thread()
    return any(
        any(map(_may_step, stack(sys._getframe()))) if thread is own else thread.is_alive()
        for thread in list(_active.values())
    )


def _may_step(frame: FrameType) -> bool:
    """Whether it is a step, or a compiled function in which one may be."""
    code = frame.f_code
    return (
        code in step_codes
        or code.co_filename == steps.HOOKED.co_filename
        or code.co_name.startswith("torch_dynamo_resume")
    )
