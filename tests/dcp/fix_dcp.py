"""States and a process group of one rank, for the tests of `stillframe.dcp`."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Ignore DCP's warnings about things that these tests do on purpose."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.")
        warnings.filterwarnings(
            "ignore", message=".*(torch.distributed is disabled|TypedStorage).*"
        )
        yield


class Trained:
    """A small model and its AdamW, whose state an engine defers."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        for _ in range(4):
            self.step()

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def copied(tree: Any) -> Any:
    """Return the tree with cloned tensors, for a later comparison."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {name: copied(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [copied(value) for value in tree]
    return tree


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def zeroed(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return torch.zeros_like(tree)
    if isinstance(tree, dict):
        return {name: zeroed(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [zeroed(value) for value in tree]
    return None


def loaded(like: Any, path: Any, **arguments: Any) -> Any:
    """Load a checkpoint into a tree of the same structure as `like`."""
    state = zeroed(like)
    dcp.load(state, checkpoint_id=path, no_dist=True, **arguments)
    return state
