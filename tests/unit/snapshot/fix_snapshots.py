"""Fixtures of the snapshot tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import stillframe
import torch

MIB = 1 << 20


@pytest.fixture
def engine() -> Iterator[stillframe.Engine]:
    with stillframe.Engine(pool_bytes=32 * MIB, block_bytes=4 * MIB) as engine:
        yield engine


def identity(tensor: Any) -> int:
    storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else tensor
    return int(storage._cdata)


def trained(size: int = 300) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model and an optimizer whose state a save would defer."""
    torch.manual_seed(0)
    model = torch.nn.Linear(size, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(4):
        step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    weight = next(model.parameters())
    model(torch.ones(2, weight.shape[1])).sum().backward()
    optimizer.step()


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def flat(node: Any) -> list[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        return [node]
    if isinstance(node, dict):
        return [tensor for value in node.values() for tensor in flat(value)]
    if isinstance(node, (list, tuple)):
        return [tensor for value in node for tensor in flat(value)]
    return []


def raw(tensors: list[torch.Tensor]) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in tensors]
