"""Directories of checkpoints of every kind, as their programs write them."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import stillframe
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

WEIGHTS = {"a": torch.arange(64.0), "b": torch.arange(8.0)}


class TrainingArguments:
    """Stands for that of transformers, whose pickle has the same two attributes."""

    def __init__(self, save_only_model: bool, processes: int) -> None:
        self.save_only_model = save_only_model
        self.save_on_each_node = False
        self.distributed_state = PartialState(processes)


class PartialState:
    def __init__(self, processes: int) -> None:
        self.num_processes = processes


def model_of(path: Path, *, sharded: bool = False, kind: str = "safetensors") -> None:
    """Write a model as `save_pretrained` does."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text('{"model_type": "gpt2"}')
    (path / "generation_config.json").write_text("{}")
    save: Any = save_file if kind == "safetensors" else torch.save
    stem = "model" if kind == "safetensors" else "pytorch_model"
    if not sharded:
        save(WEIGHTS, path / f"{stem}.{kind}")
        return
    names = [f"{stem}-0000{number}-of-00002.{kind}" for number in (1, 2)]
    for name, key in zip(names, WEIGHTS, strict=True):
        save({key: WEIGHTS[key]}, path / name)
    index = {"metadata": {}, "weight_map": dict(zip(WEIGHTS, names, strict=True))}
    (path / f"{stem}.{kind}.index.json").write_text(json.dumps(index))


def rest_of_trainer(path: Path, step: int, ranks: int = 1) -> None:
    torch.save({"step": step}, path / "optimizer.pt")
    torch.save({"last_epoch": step}, path / "scheduler.pt")
    names = ["rng_state.pth"] if ranks == 1 else [f"rng_state_{i}.pth" for i in range(ranks)]
    for name in names:
        torch.save({"cpu": torch.get_rng_state()}, path / name)


def trainer_state(path: Path, step: int) -> None:
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step, "epoch": 1.0}))


def trainer(
    path: Path,
    step: int,
    *,
    sharded: bool = False,
    kind: str = "safetensors",
    ranks: int = 1,
    only_model: bool = False,
    args: bool = True,
) -> Path:
    """Write a checkpoint of transformers' Trainer, in its order."""
    model_of(path, sharded=sharded, kind=kind)
    if args:
        torch.save(TrainingArguments(only_model, ranks), path / "training_args.bin")
    if not only_model:
        rest_of_trainer(path, step, ranks)
    trainer_state(path, step)
    return path


def adapter(path: Path, step: int) -> Path:
    """Write a checkpoint of a Trainer whose model is an adapter of PEFT."""
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text("{}")
    save_file(WEIGHTS, path / "adapter_model.safetensors")
    rest_of_trainer(path, step)
    trainer_state(path, step)
    return path


def sharded_trainer(path: Path, step: int) -> Path:
    """Write a checkpoint of a Trainer under FSDP with a sharded state."""
    path.mkdir(parents=True)
    sharded(path / "pytorch_model_fsdp_0")
    sharded(path / "optimizer_0")
    torch.save({"last_epoch": step}, path / "scheduler.pt")
    for rank in (0, 1):
        torch.save({"cpu": torch.get_rng_state()}, path / f"rng_state_{rank}.pth")
    torch.save(TrainingArguments(False, 2), path / "training_args.bin")
    trainer_state(path, step)
    return path


def accelerate(path: Path, *, ranks: int = 1, models: int = 1, kind: str = "safetensors") -> Path:
    """Write what Accelerate's `save_state` writes, in its order."""
    path.mkdir(parents=True)
    save: Any = save_file if kind == "safetensors" else torch.save
    stem = "model" if kind == "safetensors" else "pytorch_model"
    for number in range(models):
        save(WEIGHTS, path / f"{stem}{f'_{number}' if number else ''}.{kind}")
    torch.save({"state": {}}, path / "optimizer.bin")
    torch.save({"last_epoch": 3}, path / "scheduler.bin")
    for rank in range(ranks):
        torch.save({"step": 3}, path / f"random_states_{rank}.pkl")
    return path


def sharded(path: Path) -> Path:
    """Write a checkpoint of torch.distributed.checkpoint."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns that there is only one process
        dcp.save(WEIGHTS, checkpoint_id=path, no_dist=True)
    return path


def lightning_sharded(path: Path) -> Path:
    sharded(path)
    torch.save({"global_step": 1}, path / "meta.pt")
    return path


def torch_file(path: Path) -> Path:
    stillframe.save({"model": WEIGHTS}, path)
    return path


def legacy_file(path: Path) -> Path:
    torch.save({"model": WEIGHTS}, path, _use_new_zipfile_serialization=False)
    return path


def safetensors_file(path: Path) -> Path:
    save_file(WEIGHTS, path)
    return path


# For each kind: what writes it, and the names of two of a series.
KINDS: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "torch": (torch_file, "step100.pt", "step200.pt"),
    "lightning": (torch_file, "epoch=0-step=100.ckpt", "epoch=1-step=200.ckpt"),
    "torch, legacy": (legacy_file, "ckpt_1.pt", "ckpt_2.pt"),
    "safetensors": (safetensors_file, "step_100.safetensors", "step_200.safetensors"),
    "sharded": (sharded, "step-100", "step-200"),
    "lightning, sharded": (lightning_sharded, "epoch=0-step=100.ckpt", "epoch=1-step=200.ckpt"),
    "trainer": (lambda p: trainer(p, step_of(p)), "checkpoint-100", "checkpoint-200"),
    "trainer, no args": (
        lambda p: trainer(p, step_of(p), args=False),
        "checkpoint-100",
        "checkpoint-200",
    ),
    "trainer, shards": (
        lambda p: trainer(p, step_of(p), sharded=True),
        "checkpoint-900",
        "checkpoint-1000",
    ),
    "trainer, bin": (
        lambda p: trainer(p, step_of(p), sharded=True, kind="bin"),
        "checkpoint-100",
        "checkpoint-200",
    ),
    "trainer, ranks": (
        lambda p: trainer(p, step_of(p), ranks=3),
        "checkpoint-100",
        "checkpoint-200",
    ),
    "trainer, only model": (
        lambda p: trainer(p, step_of(p), only_model=True),
        "checkpoint-100",
        "checkpoint-200",
    ),
    "trainer, adapter": (lambda p: adapter(p, step_of(p)), "checkpoint-100", "checkpoint-200"),
    "trainer, fsdp": (
        lambda p: sharded_trainer(p, step_of(p)),
        "checkpoint-100",
        "checkpoint-200",
    ),
    "accelerate": (accelerate, "checkpoint_9", "checkpoint_10"),
    "accelerate, many": (
        lambda p: accelerate(p, ranks=3, models=3),
        "checkpoint_9",
        "checkpoint_10",
    ),
    "accelerate, bin": (lambda p: accelerate(p, kind="bin"), "state-9", "state-10"),
}

# Files that a checkpoint may lack. Nothing says how long Accelerate's numbered rows are.
OPTIONAL = {"generation_config.json", "training_args.bin", "scheduler.bin"}
_LAST_OF_ROWS = {"model_2.safetensors", "random_states_2.pkl"}


def may_lack(file: str) -> bool:
    """Return whether a checkpoint counts as whole without this file."""
    return file in OPTIONAL or file in _LAST_OF_ROWS


def step_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def files_of(path: Path) -> list[str]:
    """Return the files of a checkpoint, relative to it; "" for one that is a file itself."""
    if path.is_file():
        return [""]
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def cases() -> Iterator[tuple[str, str]]:
    """Yield each kind with each of its files."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for kind, (write, _, newest) in KINDS.items():
            path = write(Path(folder) / newest)
            yield from ((kind, file) for file in files_of(path))
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
