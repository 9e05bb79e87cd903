"""Unusual optimizers, as users write them: torch runs their step hooks; little else is certain."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer

UNUSUAL: list[type[Any]] = []


def unusual(cls: type[Any]) -> type[Any]:
    UNUSUAL.append(cls)
    return cls


@torch.no_grad()
def descend(params: Iterable[Parameter]) -> None:
    for p in params:
        if p.grad is not None:
            p.sub_(p.grad, alpha=0.1)


class Plain(Optimizer):
    """The simplest optimizer with a step that is not known; the others deviate from it."""

    def __init__(self, params: Iterable[Parameter]) -> None:
        super().__init__(params, {})
        self.params = [p for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        descend(self.params)
        return loss


@unusual
class MadeByHand(Optimizer):
    """A wrapper that has only the two dicts that torch's wrapper of `step` reads.

    pytorch_optimizer's Lookahead, TRAC, OrthoGrad and Magma are like this."""

    def __init__(self, params: Iterable[Parameter]) -> None:
        self.optimizer = AdamW(params)
        self._optimizer_step_pre_hooks: dict[int, Any] = OrderedDict()
        self._optimizer_step_post_hooks: dict[int, Any] = OrderedDict()
        self._patch_step_function()
        self.state: Any = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


@unusual
class StateRaises(Plain):
    @property
    def state(self) -> Any:
        raise RuntimeError("not sharded yet")

    @state.setter
    def state(self, value: Any) -> None:
        pass


@unusual
class GroupsRaise(Plain):
    stepping = False

    def __getattribute__(self, name: str) -> Any:
        if name == "param_groups" and object.__getattribute__(self, "stepping"):
            raise RuntimeError("ask the shards")
        return super().__getattribute__(name)

    def __init__(self, params: Iterable[Parameter]) -> None:
        super().__init__(params)
        self.stepping = True


@unusual
class StateIsNoDict(SGD):
    """An optimizer with torch's own step, so it is observed, but whose state is not a dict."""

    def __init__(self, params: Iterable[Parameter]) -> None:
        super().__init__(params, lr=0.1)
        self.state: Any = _Forgetful()


class _Forgetful:
    def __getitem__(self, key: Any) -> dict[str, Any]:
        return {}


@unusual
class AttributesRaise(Plain):
    """A proxy that raises its own error for unknown attributes."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def __init__(self, params: Iterable[Parameter]) -> None:
        self.params = list(params)
        self.param_groups = [{"params": self.params}]
        self.state = {}
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._patch_step_function()


@unusual
class NoDict:
    """A class that is no Optimizer and has neither a `__dict__` nor weak references."""

    __slots__ = ("_optimizer_step_post_hooks", "_optimizer_step_pre_hooks", "params")

    def __init__(self, params: Iterable[Parameter]) -> None:
        self.params = list(params)
        self._optimizer_step_pre_hooks: dict[int, Any] = {}
        self._optimizer_step_post_hooks: dict[int, Any] = {}

    def _optimizer_step_code(self) -> None:
        pass

    @Optimizer.profile_hook_step
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        descend(self.params)
        return loss


class _Unhashable:
    """A step that is an object."""

    __hash__ = None

    def __call__(self, optimizer: Any, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        descend(optimizer.params)
        return loss

    def __get__(self, optimizer: Any, kind: Any) -> Any:
        return self if optimizer is None else lambda *args: self(optimizer, *args)


@unusual
class StepIsAnObject(Plain):
    pass


_step_object = _Unhashable()
_hooked = Optimizer.profile_hook_step(lambda self, *args: _step_object(self, *args))
_hooked.__wrapped__ = _step_object
_hooked.hooked = True
StepIsAnObject.step = _hooked


@unusual
class PoisonedClass(Plain):
    """A class whose `__class__` returns something else."""

    @property
    def __dict__(self) -> Any:
        raise TypeError("no dictionary here")


def train(optimizer: Any, params: Iterable[Parameter], count: int = 1) -> None:
    for _ in range(count):
        for p in params:
            p.grad = torch.full_like(p, 0.01)
        optimizer.step()
