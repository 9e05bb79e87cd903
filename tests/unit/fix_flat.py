"""Flat dicts of tensors for safetensors files, and the comparison of a file with one."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

# Every dtype that the library saves.
DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32),
    *(torch.int64, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]


def filled(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Return a tensor of random bytes; bools are 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    count = dtype.itemsize
    for size in shape:
        count *= size
    most = 2 if dtype is torch.bool else 256
    data = torch.randint(most, (count,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(shape)


def random_tensors(seed: int, most: int = 30) -> dict[str, Tensor]:
    """Return tensors of random dtypes and shapes, some empty and some without dimensions."""
    dice = random.Random(seed)
    return {
        f"{dice.choice('abc')}.{i}": filled(
            dice.choice(DTYPES), *(dice.choice((0, 1, 3, 17, 60)) for _ in range(dice.randrange(4)))
        )
        for i in range(dice.randrange(most))
    }


def flattened(tree: Any, name: str = "") -> dict[str, Tensor]:
    """Return the tensors of a training's state by their key paths, each storage once."""
    found: dict[str, Tensor] = {}
    if isinstance(tree, Tensor):
        found[name] = tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            found.update(flattened(value, f"{name}.{key}"))
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            found.update(flattened(value, f"{name}.{i}"))
    first = {tensor.untyped_storage()._cdata: key for key, tensor in reversed(found.items())}
    kept = {key: found[key] for key in sorted(first.values())}
    return {key: tensor for key, tensor in kept.items() if tensor.is_contiguous()}


def header_of(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header, and the offset of the first tensor's bytes."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), 8 + length


def assert_holds(path: Path, tensors: dict[str, Tensor], metadata: Any = None) -> None:
    """Assert that the library reads these tensors, and that each is aligned to its elements."""
    got = load_file(path)
    assert got.keys() == tensors.keys()
    for name, wanted in tensors.items():
        assert (got[name].dtype, got[name].shape) == (wanted.dtype, wanted.shape), name
        one, two = (t.detach().contiguous().reshape(-1) for t in (got[name], wanted))
        assert torch.equal(one.view(torch.uint8), two.view(torch.uint8)), name
    with safe_open(path, "pt") as file:
        assert file.metadata() == metadata
    header, begin = header_of(path)
    assert begin % 4096 == 0
    for name, wanted in tensors.items():
        assert header[name]["data_offsets"][0] % wanted.element_size() == 0, name
