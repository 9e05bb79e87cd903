"""Owners: what is known of every optimizer that has stepped, and of its storages.

An `Owner` represents one optimizer. It knows whether the optimizer's step is known
(`stillframe._watch.steps`) and whether a step is running. The owner's ``Observer`` (C) knows which
of the optimizer's storages change in steps only. A storage that changed outside a step stays
captured until `load_state_dict` or until a new storage replaces it. A storage that two optimizers
own is captured. Nothing here keeps an optimizer or a tensor alive.

Code that reads an optimizer is decorated with `bookkeeping`: if it raises, every later save
captures all storages of that optimizer.

Several threads may step different optimizers, and a signal handler may interrupt anywhere. So there
is no lock: shared state changes by single dict and set operations, which are atomic. An owner is
changed only by the thread that steps its optimizer.
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
from stillframe._base.distributed import dtensor_class_if_imported, memory_of
from stillframe._watch import steps
from stillframe._watch.guard import guarded
from stillframe._watch.memory_owners import Marks

log = logging.getLogger("stillframe")

_MIN_NBYTES = 4096  # smaller storages are always captured
_MAX_EXAMINED = 64  # how many parameters of an optimizer `_is_captured` looks at

_owners: dict[int, Owner] = {}  # by id(optimizer)
# The thread of each running step, by id(optimizer). The entry of a step that raised stays.
_active: dict[int, threading.Thread] = {}
# The serial of a storage's first owner, by the address of the StorageImpl. Observers maintain it.
_first_owners: dict[int, int] = {}
_serials = itertools.count(1)
_logged: set[str] = set()  # sentences that were logged
# A frame with one of these codes is a step. `step_hooks` adds its wrappers of other methods that
# write.
step_codes: set[CodeType] = {steps.HOOKED}


def log_once(sentence: str) -> None:
    """Log a reason why saves overlap less with training, once for each sentence."""
    if sentence not in _logged:
        _logged.add(sentence)
        log.info("stillframe: %s", sentence)


def _give_up(subject: Any, error: Exception) -> None:
    """Distrust an optimizer after an error; `subject` is the optimizer or its owner."""
    owner = subject if isinstance(subject, Owner) else _owners.get(id(subject))
    if owner is not None:
        owner.distrust(f"it cannot be watched ({type(error).__name__}: {error})")
    kind = type(subject) if owner is None else owner.kind
    log.debug("stillframe: a %s cannot be watched", kind.__qualname__, exc_info=error)
    log_once(
        f"a {steps.name_of(kind)} cannot be watched ({type(error).__name__}), so its parameters and"
        " state are copied during the call of each save"
    )


bookkeeping = guarded(_give_up)


class Owner:
    """One optimizer, as far as saves are concerned.

    Attributes:
        closure_index: The index of the closure among a step's positional arguments, if it has one.
        gate_is_ahead: The running step was given a closure with the gate at its end, and has not
            come to the gate yet.
        kind: The optimizer's class.
        observer: Knows which of the optimizer's storages change in steps only.
        ref: A weak reference to the optimizer.
        serial: A number that no other owner has.
        skipped_closure: A step has not called the closure that it was given. From then on the gate
            is before each step.
        has_unhooked_steps: Steps may run without hooks and wait for no copy, so saves defer nothing
            that the optimizer writes.
    """

    __slots__ = (
        "__weakref__",
        "_examined_step",
        "_is_idle",
        "_rivals",
        "_step_is_known",
        "_steps_nested",
        "_why_distrusted",
        "closure_index",
        "gate_is_ahead",
        "has_unhooked_steps",
        "kind",
        "observer",
        "ref",
        "serial",
        "skipped_closure",
    )

    def __init__(self, optimizer: Optimizer) -> None:
        self.serial = next(_serials)
        self._steps_nested = 0  # how many steps are running, one inside the other
        self._step_is_known = False  # the last result of `has_known_step`
        self._is_idle = False  # after the last step, the observer had nothing to record or compare
        # `_step_is_known` was found for this step function and number of registered classes.
        self._examined_step: tuple[weakref.ref[Any] | None, int] = (None, 0)
        self._rivals: weakref.WeakSet[Owner] = weakref.WeakSet()  # other owners of its storages
        self._why_distrusted = ""  # "": the optimizer is not distrusted
        self.closure_index: int | None = None
        self.skipped_closure = False
        self.has_unhooked_steps = False
        self.gate_is_ahead = False
        self.kind = type(optimizer)
        self.observer = _core.Observer(_first_owners, self.serial)
        self.ref = weakref.ref(optimizer, _OwnerRemoval(id(optimizer)))

    @property
    def distrusted(self) -> bool:
        """Whether saves capture all storages of the optimizer."""
        return bool(self._why_distrusted)

    def distrust(self, why: str) -> None:
        """Have saves capture all storages of the optimizer from now on; the first reason stays."""
        self._why_distrusted = self._why_distrusted or why

    def allow_unhooked_steps(self, why: str) -> None:
        """Record that steps may run without hooks, and have saves capture what such steps write."""
        self.distrust(why)
        self.has_unhooked_steps = True
        self.capture_params_in_other_owners()

    @bookkeeping
    def capture_params_in_other_owners(self) -> None:
        """Have saves capture this optimizer's parameters, even if other optimizers own them too."""
        optimizer = self.ref()
        other_owners = [each for each in living() if each is not self]
        if optimizer is None or not other_owners:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                memory = memory_of(parameter)
                if isinstance(memory, torch.Tensor) and memory.layout is torch.strided:
                    storage = memory.untyped_storage()._cdata
                    for other in other_owners:
                        other.observer.capture(storage)

    def has_known_step(self, optimizer: Optimizer) -> bool:
        """Return whether the step is known (`steps.is_known`). Also set `closure_index`."""
        # LR schedulers put a wrapper of the step into the optimizer itself.
        wrapper = optimizer.__dict__.get("step")
        step = type(optimizer).step if wrapper is None else wrapper
        examined, nr_registered = self._examined_step
        is_same_step = examined is not None and examined() is step
        # A class that was registered in the meantime may make the same step known.
        if not is_same_step or nr_registered != len(steps.registered):
            self._step_is_known = steps.is_known(type(optimizer), step)
            self.closure_index = steps.closure_index(step)
            # A weak reference, because a bound method would keep the optimizer alive. A reference
            # to a bound method is dead at once, so such a step is examined each time.
            try:
                self._examined_step = (weakref.ref(step), len(steps.registered))
            except TypeError:  # no weak references to this object
                self._examined_step = (None, 0)
        return self._step_is_known

    def begin(self, optimizer: Optimizer) -> None:
        """Note that a step begins."""
        # `_steps_nested` may count a step that raised, after which torch runs no post-hook. So an
        # enclosing step must also be on the stack.
        is_nested = self._steps_nested > 0 and _steps_on_stack(optimizer) > 1
        if is_nested:
            self._steps_nested += 1
        else:
            self._steps_nested = 1
            self.gate_is_ahead = False

    def end(self, optimizer: Optimizer) -> bool:
        """Note that a step has ended, and record samples of the storages. Return False if the step
        was inside another step of the same optimizer."""
        if self._steps_nested > 1:
            self._steps_nested -= 1
            return False
        if self.gate_is_ahead:
            self.skipped_closure = True
            self.distrust("its step did not call the closure it was given")
        try:
            if self._step_is_known and not self._why_distrusted:
                groups, state = optimizer.param_groups, optimizer.state
                self._is_idle = self.observer.is_idle(groups, state)
                if not self._is_idle:
                    self._record(groups, state)
        finally:
            self._steps_nested = 0
        return True

    def _record(self, groups: Any, state: Any) -> None:
        """Record samples after a step. Have saves capture storages with two owners."""
        # A torch function mode would run Python code at each read.
        with torch._C.DisableTorchFunction():
            # Storages that have another owner too: (serial of that owner, storage).
            shared_storages: list[tuple[int, int]] = []
            must_find_storages = self.observer.stepped(groups, state)
            if must_find_storages:
                kind = dtensor_class_if_imported()
                if kind is not None:  # the observer watches the local tensor of a DTensor
                    _core.Observer.see_through(kind, "_local_tensor")
                try:
                    # `enrol` finds the optimizer's storages and begins to watch them.
                    shared_storages = self.observer.enrol(groups, state)
                except MemoryError:
                    return  # the observer watches nothing now, so everything is captured
            self._start_due_probes()
        for other_serial, storage in shared_storages:
            for owner in living():
                if owner.serial == other_serial:
                    owner.observer.capture(storage)
                    owner._rivals.add(self)
                    self._rivals.add(owner)

    @bookkeeping
    def compare(self) -> None:
        """Compare the storages with the samples of the last step. Call this at the gate of the next
        step, when no storage should have changed."""
        if self._is_idle:
            return  # the observer has nothing to compare
        with torch._C.DisableTorchFunction():
            self.observer.compare()
            self._start_due_probes()

    def _start_due_probes(self) -> None:
        """Start the comparisons of device storages that are due."""
        devices_due = self.observer.due()
        if devices_due:
            self.observer.probe(device.streams(devices_due))

    @bookkeeping
    def defer(self, marks: Marks) -> None:
        """Mark the storages of a save that may be copied after its call; see ``Observer.defer``."""
        optimizer = self.ref()
        if optimizer is None or not self.has_known_step(optimizer) or self.distrusted:
            return
        if id(optimizer) in _active:
            return  # the last step of the owner's optimizer raised, perhaps before it wrote all
        self.observer.defer(optimizer.param_groups, optimizer.state, marks)

    @bookkeeping
    def why_captured(self, marks: Marks) -> str | None:
        """Return a sentence about why a save captures all storages of the optimizer. Return None if
        some are deferred, or if the save has no storage of the optimizer."""
        if self._step_is_known and not self._why_distrusted:
            return None
        optimizer = self.ref()
        if optimizer is None or not self._is_captured(optimizer, marks):
            return None
        name = steps.name_of(self.kind)
        if self._why_distrusted:
            why = self._why_distrusted
            return f"what belongs to a {name} was copied during the call, since {why}"
        return (
            f"what belongs to a {name} was copied during the call, since its step is not known: if"
            " it calls the closure first, and nothing but the step writes parameters and state, say"
            f" stillframe.register_optimizer({self.kind.__name__}) and it is copied during training"
        )

    def _is_captured(self, optimizer: Optimizer, marks: Marks) -> bool:
        """Return whether the save captures the optimizer's storages, by the first large parameter
        in the save. Return False if none is found."""
        params = (p for group in optimizer.param_groups for p in group["params"])
        for memory in map(memory_of, itertools.islice(params, _MAX_EXAMINED)):
            is_plain = type(memory) in (torch.Tensor, torch.nn.Parameter)
            if not is_plain or memory.layout is not torch.strided:
                continue
            storage = memory.untyped_storage()
            number = marks.numbers.get(storage._cdata)
            if number is not None and storage.nbytes() > _MIN_NBYTES:
                return not marks.is_deferred(number)
        return False

    def reset_co_owner_observers(self) -> None:
        """Have the observers of all rivals learn again. The optimizer no longer exists, so the
        storages may have one owner only."""
        for rival in tuple(self._rivals):
            rival.observer.forget()


class _OwnerRemoval:
    """The callback of an owner's weak reference, which removes the owner of a dead optimizer."""

    __slots__ = ("_key",)

    def __init__(self, key: int) -> None:
        self._key = key

    def __call__(self, ref: weakref.ref[Optimizer]) -> None:
        owner = _owners.get(self._key)
        if owner is not None and owner.ref is ref:
            del _owners[self._key]
            _active.pop(self._key, None)
            owner.reset_co_owner_observers()


def _steps_on_stack(optimizer: Optimizer) -> int:
    """Return how many steps of the optimizer are running on this thread."""
    nr_steps = 0
    for frame in stack(sys._getframe(1)):
        if frame.f_code in step_codes and frame.f_locals.get("self") is optimizer:
            nr_steps += 1
    return nr_steps


@bookkeeping
def _after_load_state_dict(optimizer: Optimizer) -> None:
    """Forget everything learned about an optimizer after its ``load_state_dict``."""
    owner = find(optimizer)
    if owner is not None:
        owner.observer.forget()


def find(optimizer: Optimizer) -> Owner | None:
    """Return the owner of an optimizer, or None if the optimizer has never stepped."""
    owner = _owners.get(id(optimizer))
    return owner if owner is not None and owner.ref() is optimizer else None


def find_or_make_owner(optimizer: Optimizer) -> Owner:
    """Return the owner of an optimizer; make one at its first step."""
    owner = find(optimizer)
    if owner is None:
        owner = Owner(optimizer)
        _owners[id(optimizer)] = owner
        # An optimizer made without Optimizer.__init__ may lack these hooks.
        if hasattr(optimizer, "_optimizer_load_state_dict_post_hooks"):
            optimizer.register_load_state_dict_post_hook(_after_load_state_dict)
    return owner


def living() -> Iterator[Owner]:
    """Iterate over every owner that exists now."""
    # list() copies the values in one step. A garbage collection during tuple() could remove owners.
    return iter(list(_owners.values()))


def drop_all_tensor_references() -> None:
    """Drop every reference to tensors, until each optimizer's next step."""
    for owner in living():
        owner.observer.forget()


def enter(optimizer: Any) -> None:
    """Mark an optimizer as active during its step. Saves capture everything meanwhile."""
    _active[id(optimizer)] = threading.current_thread()


def leave(optimizer: Any) -> None:
    """Remove the mark of `enter` at the end of the outermost step."""
    _active.pop(id(optimizer), None)


def active() -> bool:
    """Return whether any optimizer's step is running."""
    if not _active:
        return False
    # torch runs no post-hook after a step that raised, so a mark may be left over. A mark of this
    # thread counts only while a step is on the stack. A mark of another thread counts as long as
    # that thread lives: reading its stack is not safe, because in CPython 3.11 two callers of
    # sys._current_frames may deadlock.
    this_thread = threading.current_thread()
    for thread in list(_active.values()):
        if thread is this_thread:
            mark_counts = any(map(_may_be_step_frame, stack(sys._getframe())))
        else:
            mark_counts = thread.is_alive()
        if mark_counts:
            return True
    return False


def _may_be_step_frame(frame: FrameType) -> bool:
    """Return whether a frame is a step, or a compiled function that may contain one."""
    code = frame.f_code
    return (
        code in step_codes
        or code.co_filename == steps.HOOKED.co_filename  # compiled code keeps its file name
        or code.co_name.startswith("torch_dynamo_resume")  # the part after a graph break
    )
