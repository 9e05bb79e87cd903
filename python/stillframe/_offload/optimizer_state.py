"""Implements `offload_optimizer_state`: state lives in the pool, and is on the device for a step.

Steps of `torch.optim` handle one parameter group after the other, and look up the state of a
group's parameters first. So the optimizer's `state` is replaced by a dict that notices lookups. The
first lookup in a group copies the state of the group to the device, sends that of the group before
back, and prefetches that of the group after. Outside a step the whole state is in the pool, where
`state_dict()` and saves find it.

    step    look up group 0   update 0   look up group 1       update 1   ...   end
    in      0, then 1 .....................    2 .................
    out                                  0 ....                  1              all are in the pool

State that comes back from a step gets new memory of the pool, so tensors that a user took earlier
are not overwritten.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from stillframe import _core
from stillframe._offload.device_pool import OffloadStats
from stillframe._offload.offloader import Offloader
from stillframe._offload.ticket import Ticket
from stillframe._save.engine import Engine
from stillframe._watch import memory_owners, steps
from stillframe._watch.step_hooks import eager

_MIN_BYTES = 4096  # smaller tensors, such as step counts, are not offloaded


class _StateTensorPosition(NamedTuple):
    """The position of a tensor in the state."""

    entries: dict[Any, Any]  # the state of one parameter
    key: Any  # the key of the tensor there, such as "exp_avg"


class _LookupNotifyingState(defaultdict[Any, Any]):
    """An optimizer's state that calls `owner._on_lookup` for every lookup of a parameter. Copies
    and pickles are ordinary dicts."""

    def __init__(self, owner: OffloadedOptimizerState, state: dict[Any, Any]) -> None:
        super().__init__(dict, state)
        self._owner = weakref.ref(owner)

    def __getitem__(self, key: Any) -> Any:
        owner = self._owner()
        if owner is not None:
            owner._on_lookup(key)
        return super().__getitem__(key)

    def __reduce__(self) -> Any:
        """Let copies and pickles be an ordinary `defaultdict(dict)` with the same items."""
        return defaultdict, (dict,), None, None, iter(self.items())


class _StateMemoryOwner:
    """The owner of the state's memory in the pool, for saves; see `MemoryOwner`.

    Saves may defer the state if only steps change it. The state is deferred after two intervals
    between steps in which no version counter has changed. After a change outside a step, the state
    is never deferred again.
    """

    def __init__(self) -> None:
        self._nr_intervals = 0  # how many intervals between steps were observed
        # The tensors in the pool, with their versions at the end of the last step.
        self._versions_noted: list[tuple[Tensor, int]] = []
        self._is_distrusted = False  # then the state is never deferred again
        memory_owners.register(self)

    def note(self, tensors_in_pool: list[Tensor]) -> None:
        """Record the versions at the end of a step."""
        self._versions_noted = [(pooled, pooled._version) for pooled in tensors_in_pool]

    def compare(self) -> None:
        """Look for writes outside a step. Called when a step begins or offloading ends."""
        noted, self._versions_noted = self._versions_noted, []
        if any(pooled._version != version for pooled, version in noted):
            self._is_distrusted = True
        if noted:
            self._nr_intervals += 1

    def defer(self, marks: memory_owners.Marks) -> None:
        was_watched_long_enough = self._nr_intervals >= 2
        if was_watched_long_enough and not self._is_distrusted:
            _core.Observer.defer_memory_owner([pooled for pooled, _ in self._versions_noted], marks)

    def distrust(self, why: str) -> None:
        self._is_distrusted = True


class OffloadedOptimizerState:
    """The handle of `offload_optimizer_state`. As a context manager it calls `remove()` on exit."""

    def __init__(self, optimizer: Optimizer, offloader: Offloader) -> None:
        self._optimizer = optimizer
        self._offloader = offloader
        # The tensors of each group in the pool, by the group's number in `param_groups`.
        self._pooled: dict[int, list[tuple[_StateTensorPosition, Tensor]]] = {}
        self._group_of: dict[Any, int] = {}  # the number of each parameter's group
        self._on_device: int | None = None  # the number of the group on the device
        self._onloaded: list[Tensor] = []  # the tensors of that group on the device
        # The tensors in the pool of the prefetched group.
        self._prefetched_sources: list[Tensor] = []
        # The groups on their way to the pool, by number.
        self._leaving: dict[int, tuple[Ticket, list[_StateTensorPosition]]] = {}
        # (parameter, key, value) of the large tensors that `_set_aside_large_tensors` has set
        # aside.
        self._loading: list[tuple[Tensor, Any, Tensor]] = []
        self._stepping = False  # a step is running
        self._removed = False
        self._state_owner = _StateMemoryOwner()
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(self._before_state_dict),
            optimizer.register_load_state_dict_pre_hook(self._set_aside_large_tensors),
            optimizer.register_load_state_dict_post_hook(self._move_loaded_state_to_pool),
        ]
        self._replace_state()

    def __enter__(self) -> OffloadedOptimizerState:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Bring the whole state to the device and leave it there. May be called again."""
        if self._removed:
            return
        self._return_state_to_pool()
        self._removed = True
        self._state_owner.compare()
        for handle in self._handles:
            handle.remove()
        for number in list(self._pooled):
            onloaded = self._onload(number)
            for item, _ in self._pooled[number]:
                # A copy: the onloaded tensors share one allocation.
                item.entries[item.key] = item.entries[item.key].clone()
            self._offloader.release(onloaded)
        # An ordinary dict in place of the `_LookupNotifyingState`, which reports lookups.
        self._optimizer.state = defaultdict(dict, self._optimizer.state)
        self._offloader.close()

    def stats(self) -> OffloadStats:
        """Return counters of what was copied so far; see `Offloader.stats`."""
        return self._offloader.stats()

    # ---- hooks of the optimizer ----

    @eager
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._state_owner.compare()
        self._return_state_to_pool()  # an earlier step may have ended in an error
        if type(optimizer.state) is not _LookupNotifyingState:
            self._replace_state()  # other code has replaced the state
        self._map_parameters_to_groups()
        self._stepping = True

    @eager
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._return_state_to_pool()
        self._state_owner.note([pooled for group in self._pooled.values() for _, pooled in group])

    def _before_state_dict(self, optimizer: Optimizer) -> None:
        self._return_state_to_pool()

    def _set_aside_large_tensors(
        self, optimizer: Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """Return a state_dict without the large tensors, so that torch does not load them to the
        device. Set the large tensors aside for `_move_loaded_state_to_pool`."""
        self._return_state_to_pool()
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        # Not strict: torch refuses a state_dict of the wrong length later.
        parameter_of = dict(zip(numbers, parameters, strict=False))
        self._loading = []
        small: dict[Any, Any] = {}
        for number, entries in state_dict["state"].items():
            parameter = parameter_of.get(number)
            small[number] = entries
            if parameter is None or not isinstance(entries, dict):
                continue
            # torch loads "step" in another way than the other values.
            large = [k for k, value in entries.items() if _is_offloadable(value) and k != "step"]
            small[number] = {key: value for key, value in entries.items() if key not in large}
            self._loading += [(parameter, key, entries[key]) for key in large]
        return {**state_dict, "state": small}

    def _move_loaded_state_to_pool(self, optimizer: Optimizer) -> None:
        """Move the loaded state, and the tensors that were set aside, into the pool."""
        loading, self._loading = self._loading, []
        self._state_owner = _StateMemoryOwner()
        self._replace_state()
        for number in range(len(optimizer.param_groups)):
            of_group = [each for each in loading if self._group_of[each[0]] == number]
            if not of_group:
                continue
            values = []
            for parameter, _, value in of_group:
                # torch converts the values in the same way, but loads them to the device.
                dtype = parameter.dtype if parameter.is_floating_point() else None
                values.append(value.to("cpu", dtype))
            in_pool = self._offloader.adopt(values).tensors()
            for (parameter, key, _), pooled in zip(of_group, in_pool, strict=True):
                entries = dict.__getitem__(optimizer.state, parameter)  # does not call `_on_lookup`
                entries[key] = pooled
                self._pooled.setdefault(number, []).append(
                    (_StateTensorPosition(entries, key), pooled)
                )

    # ---- in and out ----

    def _replace_state(self) -> None:
        """Replace the optimizer's state by a `_LookupNotifyingState`, and move it into the pool."""
        self._pooled = {}
        self._optimizer.state = _LookupNotifyingState(self, self._optimizer.state)
        self._map_parameters_to_groups()
        for number in range(len(self._optimizer.param_groups)):
            self._offload(number)
            self._wait_until_group_in_pool(number)

    def _map_parameters_to_groups(self) -> None:
        """Record the number of each parameter's group."""
        self._group_of = {
            parameter: number
            for number, group in enumerate(self._optimizer.param_groups)
            for parameter in group["params"]
        }

    def _on_lookup(self, key: Any) -> None:
        """Handle a lookup of `key`, usually a parameter. In a step, copy the parameter's group to
        the device, and prefetch the next group. Otherwise wait until the group is in the pool."""
        number = self._group_of.get(key)
        if number is None or number == self._on_device:
            return
        self._wait_until_group_in_pool(number)
        if not self._stepping:
            return
        self._offload_current_group()
        self._onloaded = self._onload(number)
        self._on_device = number
        next_group = self._sources(number + 1)  # empty after the last group
        if next_group and self._offloader.prefetch(next_group):
            self._prefetched_sources = next_group

    def _sources(self, number: int) -> list[Tensor]:
        """Return a group's tensors in the pool."""
        return [pooled for _, pooled in self._pooled.get(number, [])]

    def _onload(self, number: int) -> list[Tensor]:
        """Copy a group to the device, and return its tensors there."""
        tensors_in_pool = self._pooled.get(number, [])
        if not tensors_in_pool:
            return []
        sources = self._sources(number)
        if list(map(id, sources)) != list(map(id, self._prefetched_sources)):
            self._give_up_prefetch()  # another group, or old values, were prefetched
        tensors = self._offloader.onload(sources)
        self._prefetched_sources = []
        for (item, _), tensor in zip(tensors_in_pool, tensors, strict=True):
            item.entries[item.key] = tensor
        return tensors

    def _give_up_prefetch(self) -> None:
        prefetched, self._prefetched_sources = self._prefetched_sources, []
        if prefetched:
            self._offloader._give_up_prefetch(prefetched)

    def _offload_current_group(self) -> None:
        """Send the group that is on the device back to the pool."""
        number, self._on_device = self._on_device, None
        if number is not None:
            self._offload(number)
            if self._onloaded:
                self._offloader.release(self._onloaded)
            self._onloaded = []

    def _offload(self, number: int) -> None:
        """Start to copy a group's tensors on the device into the pool."""
        device = self._offloader.device
        in_pool = {id(pooled) for _, pooled in self._pooled.get(number, [])}
        state = self._optimizer.state
        items: list[_StateTensorPosition] = []
        for parameter in self._optimizer.param_groups[number]["params"]:
            if parameter in state:
                entries = dict.__getitem__(state, parameter)  # does not call `_on_lookup`
                for key, value in entries.items():
                    if not _is_offloadable(value) or value.device != device:
                        continue
                    # If the device is the CPU, tensors in the pool are on it, too.
                    if id(value) not in in_pool:
                        items.append(_StateTensorPosition(entries, key))
        if not items:
            return
        ticket = self._offloader.offload([item.entries[item.key] for item in items])
        self._leaving[number] = ticket, items
        # Forget the old values of these items in the pool.
        sent = {(id(item.entries), item.key) for item in items}
        self._pooled[number] = [
            (item, pooled)
            for item, pooled in self._pooled.get(number, [])
            if (id(item.entries), item.key) not in sent
        ]
        for item in items:
            item.entries[item.key] = None  # frees the device's memory once the bytes are copied

    def _wait_until_group_in_pool(self, number: int) -> None:
        """Wait until a group that was sent is in the pool."""
        ticket, items = self._leaving.pop(number, (None, []))
        if ticket is not None:
            for item, pooled in zip(items, ticket.tensors(), strict=True):
                item.entries[item.key] = pooled
                self._pooled.setdefault(number, []).append((item, pooled))

    def _return_state_to_pool(self) -> None:
        """End the step: wait until the whole state is in the pool."""
        self._stepping = False
        self._offload_current_group()
        self._give_up_prefetch()  # a failed step may have left a prefetch
        if self._leaving:  # wait here, because code that reads the tensors later does not wait
            with self._offloader._waiting():
                for number in list(self._leaving):
                    self._wait_until_group_in_pool(number)


def _is_offloadable(value: Any) -> bool:
    """Return whether a value of the state is a tensor that is offloaded."""
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and value.numel() * value.itemsize >= _MIN_BYTES
    )


def offload_optimizer_state(
    optimizer: Optimizer, *, engine: Engine | None = None
) -> OffloadedOptimizerState:
    """Keep an optimizer's state in the pool. A step copies one parameter group after the other to
    the device.

    Give the optimizer several parameter groups, such as one for each layer: two groups are on the
    device at a time. `state_dict()` and `load_state_dict()` work as usual, on the CPU.

    Args:
        optimizer: An optimizer of `torch.optim`, or of a class given to
            `stillframe.register_optimizer` whose step handles one group after the other. All
            parameters must be on one device.
        engine: The engine whose pool is used, `default_engine()` by default.

    Returns:
        A handle whose `remove()` brings the state to the device for good. As a context manager it
        does so on exit.

    Raises:
        TypeError: This is not an optimizer, or its step may look at all groups at once.
        ValueError: The state is offloaded already, or the parameters are on several devices.
        PoolExhaustedError: The pool is too small for the state.
    """
    kind = type(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"only an optimizer's state can be offloaded, got a {kind.__name__}")
    if isinstance(optimizer, LBFGS) or not steps.is_known(kind, kind.step):
        raise TypeError(
            f"the state of a {kind.__name__} cannot be offloaded: its step may look at all of it at"
            " once, and only steps that take one parameter group after the other can be served"
        )
    if type(optimizer.state) is _LookupNotifyingState:
        raise ValueError("this optimizer's state is offloaded already")
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"the optimizer's parameters are on several devices: {found}")
    return OffloadedOptimizerState(optimizer, Offloader(devices.pop(), engine=engine))
