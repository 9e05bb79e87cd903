"""Helpers of the gate's tests: saves that consist only of a skeleton, and small trainings."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any

import torch
from stillframe import _core
from stillframe._tree.skeleton import Skeleton
from stillframe._watch import gate
from torch import Tensor
from torch.nn import Parameter

NUMEL = 4096  # 16 KiB: large enough to be deferred
_SOURCE = struct.Struct("=QQII")


def skeleton_of(tensors: Iterable[Tensor]) -> Skeleton:
    """Return the skeleton of a save of these tensors."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    rows = bytearray()
    for storage in storages.values():
        rows += _SOURCE.pack(storage.data_ptr(), storage.nbytes(), 0, 0)
    return Skeleton(
        data=b"",
        storages=list(storages.values()),
        numbers=_core.Numbers(list(storages)),
        rows=rows,
        num_tensors=len(storages),
        fallbacks=[],
    )


def lanes(skeleton: Skeleton) -> list[int]:
    return [row[2] for row in _SOURCE.iter_unpack(skeleton.rows)]


def deferred(*tensors: Tensor) -> list[bool]:
    """Return for each tensor whether a save would now defer its storage."""
    skeleton = skeleton_of(tensors)
    deferral = gate.defer(skeleton, overlap=True)
    deferral.close()
    assert [i for i, lane in enumerate(lanes(skeleton)) if lane == 1] == sorted(deferral.indices)
    numbers = [skeleton.numbers.get(t.untyped_storage()._cdata) for t in tensors]
    return [number in deferral.indices for number in numbers]


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors of the optimizer's state that are large enough to be deferred."""
    found: list[Tensor] = []

    def visit(value: Any) -> None:
        if isinstance(value, Tensor) and value.untyped_storage().nbytes() > 4096:
            found.append(value)
        elif isinstance(value, dict):
            for item in value.values():
                visit(item)
        elif isinstance(value, list | tuple):
            for item in value:
                visit(item)

    visit(dict(optimizer.state))
    return found


def param(numel: int = NUMEL) -> Parameter:
    return Parameter(torch.randn(numel))


def give_gradients(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.requires_grad:
                p.grad = torch.full_like(p, 0.01)


def run_steps(
    optimizer: torch.optim.Optimizer,
    count: int,
    between: Callable[[], object] | None = None,
) -> None:
    """Run steps, and call a function after each, as in a training loop."""
    for _ in range(count):
        give_gradients(optimizer)
        optimizer.step()
        if between is not None:
            between()


class FakePending:
    """A fake save in flight that records when it was waited for."""

    def __init__(self, note: Callable[[], object] = lambda: None) -> None:
        self.waits = 0
        self.note = note

    def gate(self) -> None:
        self.waits += 1
        assert self.waits < 1000, "asked forever"
        self.note()
