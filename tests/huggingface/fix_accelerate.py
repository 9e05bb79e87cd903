"""A small training with Accelerate, and comparisons of its checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from safetensors import safe_open
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

WIDTH = 96  # 96 x 96 floats are above the sizes that are always captured


class Counter:
    """A registered object of the user's."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Model(nn.Module):
    """A small network with a tied weight, which safetensors files hold once."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, width)
        self.last.weight = self.first.weight

    def forward(self, inputs):
        return self.last(torch.relu(self.norm(self.first(inputs))))


class Numbers(IterableDataset):
    def __iter__(self):
        return (torch.randn(WIDTH) for _ in range(64))


def training(directory=None, *, nr_models=1, width=WIDTH, iterable=False, **config):
    """Return a training: its accelerator, parts, and `step()`, which returns the loss.

    Args:
        directory: With it, checkpoints are named automatically in `directory/checkpoints`.
        config: Of `ProjectConfiguration`.
    """
    forget()
    torch.manual_seed(5)
    if directory is not None:
        config = {"project_dir": str(directory), "automatic_checkpoint_naming": True, **config}
    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(**config),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    models = [Model(width) for _ in range(nr_models)]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 3) for each in optimizers]
    data = Numbers() if iterable else TensorDataset(torch.randn(64, width))
    loader = accelerator.prepare(DataLoader(data, batch_size=8, shuffle=not iterable))
    models = [accelerator.prepare(each) for each in models]
    optimizers = [accelerator.prepare(each) for each in optimizers]
    schedulers = [accelerator.prepare(each) for each in schedulers]
    counter = Counter()
    accelerator.register_for_checkpointing(counter)

    def step():
        inputs = torch.randn(8, width)
        losses = []
        for model, optimizer, scheduler in zip(models, optimizers, schedulers, strict=True):
            loss = (model(inputs) - inputs).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        counter.count += 1
        accelerator.step += 1
        return losses

    return SimpleNamespace(
        accelerator=accelerator,
        model=next(iter(models), None),
        optimizer=next(iter(optimizers), None),
        scheduler=next(iter(schedulers), None),
        loader=loader,
        counter=counter,
        step=step,
    )


def forget():
    """Drop the state that all Accelerators of the process share."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def forgotten():
    yield
    forget()


def content(path: Path):
    """Return what a file of a checkpoint holds, and the names and order of its tensors."""
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if path.suffix in (".bin", ".pt", ".pkl"):
        return torch.load(path, weights_only=False)
    return path.read_bytes()


def files(directory) -> list[str]:
    """Return the names of all files below the directory."""
    return sorted(
        os.path.relpath(os.path.join(above, name), directory)
        for above, _, names in os.walk(directory)
        for name in names
    )


def same(first, second) -> bool:
    """Return whether two contents are equal, types and orders included."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    if hasattr(first, "__array__"):
        return bool((first == second).all())
    if hasattr(first, "__dict__"):
        return same(vars(first), vars(second))
    return bool(first == second)
