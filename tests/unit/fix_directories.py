"""Checkpoints of several files: how tests write one, and look at what is there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import stillframe
import torch
from safetensors.torch import load_file

FLAT = ("model.safetensors",)
NAMES = ("config.json", "logs/0/log.txt", "model.safetensors", "optimizer.pt", "sub/rng.pt")


def state(value: float, numel: int = 3000) -> dict[str, torch.Tensor]:
    return {"w": torch.full((numel,), value), "b": torch.full((7,), value)}


def fill(files: Any, value: float) -> None:
    """Write every kind of file: saved ones, and those of other code, in directories too."""
    files.save(state(value), "optimizer.pt")
    files.save(state(value), "sub/rng.pt")
    files.save_safetensors(state(value), "model.safetensors", metadata={"format": "pt"})
    (Path(files.path) / "config.json").write_text(str(value))
    (Path(files.path) / "logs/0").mkdir(parents=True)
    (Path(files.path) / "logs/0/log.txt").write_text(str(value))


def write(path: Path, value: float, **options: Any) -> stillframe.SaveHandle:
    """Save a checkpoint of every kind of file; return its handle."""
    with stillframe.checkpoint(path, **options) as files:
        fill(files, value)
    return files.handle


def value_of(path: Path) -> float | None:
    """Return the value of a checkpoint; None if there is none.

    Raises:
        AssertionError: It is not whole, or its files have several values.
    """
    if not path.exists():
        return None
    names = sorted(
        os.path.relpath(os.path.join(folder, name), path)
        for folder, _, files in os.walk(path)
        for name in files
    )
    assert names == sorted(NAMES), names
    values = {float((path / name).read_text()) for name in NAMES[:2]}
    for name in NAMES[2:]:
        loaded = load_file(path / name) if name in FLAT else stillframe.load(path / name)
        values |= {float(each) for tensor in loaded.values() for each in tensor.unique()}
    assert len(values) == 1, values
    return values.pop()


def hidden(path: Path) -> list[str]:
    """List the temporaries next to a checkpoint."""
    return sorted(name for name in os.listdir(path) if name.startswith(".stillframe-"))
