"""A tiny GPT-2 from a config, its data and Trainers, and a comparison of checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import transformers as transformers
from safetensors import safe_open
from stillframe.transformers import Trainer as OurTrainer
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainingArguments

WORDS = 64
TIMES = ("runtime", "per_second")  # figures that differ from run to run


class Rows(Dataset):
    """Random sequences, the same in every process."""

    def __init__(self, length=64):
        self.rows = torch.randint(0, WORDS, (length, 8), generator=torch.Generator().manual_seed(7))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def model(width=32):
    torch.manual_seed(3)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=8, n_embd=width, n_layer=2, n_head=2)
    )


def tokenizer():
    words = Tokenizer(models.WordLevel({f"w{each}": each for each in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w1")


def arguments(output_dir="out", **options):
    given = {
        "max_steps": 6,
        "save_steps": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        **options,
    }
    return TrainingArguments(output_dir=str(output_dir), **given)


def trainer(cls=OurTrainer, output_dir="out", callbacks=None, net=None, **options):
    """Return a Trainer of the tiny model.

    Args:
        cls: Ours, transformers' own, or a subclass.
        options: Of `TrainingArguments`, and `processing_class`.
    """
    processing_class = options.pop("processing_class", None)
    return cls(
        model=net or model(),
        args=arguments(output_dir, **options),
        train_dataset=Rows(),
        eval_dataset=Rows(8),
        processing_class=processing_class,
        callbacks=callbacks,
    )


def files_of(directory):
    """Return the path of each file below a directory."""
    directory = Path(directory)
    return sorted(
        path.relative_to(directory).as_posix()
        for path in directory.rglob("*")
        if path.is_file() and "runs" not in path.parts
    )


def checkpoints(directory="out"):
    return sorted(
        path.name for path in Path(directory).iterdir() if path.name.startswith("checkpoint-")
    )


def differences(ours, theirs):
    """Return the files of two directories whose contents differ, with a reason."""
    found = []
    for name in sorted({*files_of(ours), *files_of(theirs)}):
        one, other = Path(ours) / name, Path(theirs) / name
        if not one.exists() or not other.exists():
            found.append(f"{name} is in one of them only")
        elif contents(one) != contents(other):
            found.append(f"{name} differs")
    return found


def contents(path):
    """Return what a file holds, in a form that `==` compares."""
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            tensors = {name: comparable(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
            return file.metadata(), tensors
    if path.suffix == ".json":
        return without_times(json.loads(path.read_text()))
    if path.name == "training_args.bin":
        return torch.load(path, weights_only=False).to_dict()
    if path.suffix in (".pt", ".pth", ".bin"):
        return comparable(torch.load(path, weights_only=False))
    return path.read_bytes()


def without_times(value):
    if isinstance(value, dict):
        return {key: without_times(each) for key, each in value.items() if not key.endswith(TIMES)}
    return [without_times(each) for each in value] if isinstance(value, list) else value


def comparable(value):
    if isinstance(value, torch.Tensor):
        return value.dtype, value.stride(), value.tolist()
    if isinstance(value, dict):
        return type(value), {key: comparable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [comparable(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value


def is_whole(checkpoint, save_only_model=False):
    """Return whether everything that a training needs is there and of one step."""
    path = Path(checkpoint)
    step = int(path.name.removeprefix("checkpoint-"))
    needed = {"model.safetensors", "config.json", "trainer_state.json", "training_args.bin"}
    if not save_only_model:
        needed |= {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
    if not needed <= set(os.listdir(path)):
        return False
    if json.loads((path / "trainer_state.json").read_text())["global_step"] != step:
        return False
    contents(path / "model.safetensors")
    if save_only_model:
        return True
    optimizer = torch.load(path / "optimizer.pt", weights_only=False)
    steps = {int(each["step"]) for each in optimizer["state"].values()}
    return steps == {step} and torch.load(path / "scheduler.pt")["last_epoch"] == step
