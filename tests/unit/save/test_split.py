"""The split of tensors into several safetensors files is huggingface_hub's."""

from __future__ import annotations

import json
import random

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from stillframe._save import shards
from torch import Tensor

PATTERN = "model{suffix}.safetensors"


def assert_split_alike(tensors: dict[str, Tensor], size: int | str) -> None:
    theirs = split_torch_state_dict_into_shards(
        tensors, filename_pattern=PATTERN, max_shard_size=size
    )
    ours = shards.split(tensors, "model.safetensors", size)
    assert {name: sorted(shard) for name, shard in ours.files.items()} == {
        name: sorted(keys) for name, keys in theirs.filename_to_tensors.items()
    }
    assert all(shard[key] is tensors[key] for shard in ours.files.values() for key in shard)
    assert (ours.index_name != "") == theirs.is_sharded
    if theirs.is_sharded:
        assert ours.index_name == "model.safetensors.index.json"
        assert json.loads(ours.index) == {
            "metadata": theirs.metadata,
            "weight_map": theirs.tensor_to_filename,
        }


def random_tensors(seed: int) -> dict[str, Tensor]:
    """Return tensors of all sizes, some of them views of one storage, some empty."""
    dice = random.Random(seed)
    tensors: dict[str, Tensor] = {}
    for i in range(1 + dice.randrange(30)):
        base = torch.zeros(dice.choice((0, 1, 10, 99, 1000)), dtype=torch.uint8)
        cut = dice.randrange(base.numel() + 1)
        tensors[f"{i}"] = base[:cut]
        if dice.random() < 0.3:
            tensors[f"{dice.randrange(100)}.rest"] = base[cut:]
    items = list(tensors.items())
    dice.shuffle(items)
    return dict(items)


@pytest.mark.parametrize("seed", range(60))
def test_large_state_is_split_into_the_files_of_huggingface_hub(seed):
    assert_split_alike(random_tensors(seed), random.Random(seed).choice((1, 50, 100, 300, 2000)))


@pytest.mark.parametrize("size", ["1KB", "2KB", "1.5KB", "1MB", "5GB"])
def test_size_units_are_those_of_huggingface_hub(size):
    assert_split_alike({f"{i}": torch.zeros(100) for i in range(9)}, size)


def test_split_without_a_size_limit_makes_one_file():
    tensors = {"a": torch.zeros(3), "b": torch.zeros(4)}
    split = shards.split(tensors, "x.safetensors", None)
    assert split.files == {"x.safetensors": tensors} and split.index_name == ""


def test_state_without_tensors_becomes_one_file():
    split = shards.split({}, "x.safetensors", 10)
    assert split.files == {"x.safetensors": {}} and split.index_name == ""


def test_state_that_no_safetensors_file_can_hold_is_not_split():
    base = torch.zeros(10)
    with pytest.raises(RuntimeError, match="share memory"):
        shards.split({"a": base, "b": base}, "x.safetensors", 1)
    with pytest.raises(ValueError, match="Expected a dict"):
        shards.split([base], "x.safetensors", 1)


@pytest.mark.parametrize("size", [0, -1, "many", 1.5, True])
def test_invalid_sizes_are_refused(size):
    with pytest.raises((ValueError, TypeError), match="max_shard_size"):
        shards.split({"a": torch.zeros(10)}, "x.safetensors", size)


def test_name_of_a_split_state_must_end_in_safetensors():
    with pytest.raises(ValueError, match=r"\.safetensors"):
        shards.split({}, "model.bin", 1)
