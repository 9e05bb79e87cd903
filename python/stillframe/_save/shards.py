"""Splits a dict of tensors into several safetensors files, and makes their index.

The split is that of `huggingface_hub.split_torch_state_dict_into_shards`. Tensors in the dict's
order fill a file up to the limit. A tensor larger than the limit has a file of its own. Tensors
over one storage stay together, and the storage counts once and as a whole. The caller writes the
files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from torch import Tensor

from stillframe._base import sizes
from stillframe._base.safetensors import INDEX_SUFFIX, SUFFIX
from stillframe._tree import flat


@dataclass(frozen=True, slots=True)
class Shards:
    """The files of a split.

    Attributes:
        files: The tensors of each file, by its name.
        index_name: The name of the index; "" if there is only one file.
        index: The contents of the index, JSON.
    """

    files: dict[str, dict[str, Tensor]]
    index_name: str = ""
    index: bytes = b""


def split(tensors: object, name: str, max_shard_size: int | str | None) -> Shards:
    """Split a flat dict of tensors into files of at most ``max_shard_size`` bytes of tensors.

    Args:
        tensors: A dict that one safetensors file could hold.
        name: The name of the file, such as "model.safetensors". If there are several files, they
            are called "model-00001-of-00003.safetensors" and so on.
        max_shard_size: Bytes, or a string such as "5GB" (1 GB is 1000³ bytes); None makes one file.

    Raises:
        ValueError, TypeError: The name does not end in ".safetensors", or the size makes no sense.
        Exception: As `stillframe.save`, if a safetensors file cannot hold the dict.
    """
    if not name.endswith(SUFFIX):
        raise ValueError(f"the name of a safetensors file has to end in {SUFFIX}, not {name!r}")
    checked = flat.checked(tensors)
    if max_shard_size is None:
        return Shards({name: checked})
    shards, nbytes = _pack_into_shards(checked, sizes.parse(max_shard_size, "max_shard_size"))
    if len(shards) < 2:
        return Shards({name: checked})
    stem = name.removesuffix(SUFFIX)
    names = [f"{stem}-{i:05}-of-{len(shards):05}{SUFFIX}" for i in range(1, len(shards) + 1)]
    files = dict(zip(names, shards, strict=True))
    weight_map = {key: file for file, shard in files.items() for key in shard}
    index = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    return Shards(files, stem + INDEX_SUFFIX, text.encode())


def _pack_into_shards(
    tensors: dict[str, Tensor], limit: int
) -> tuple[list[dict[str, Tensor]], int]:
    """Return the tensors of each file of at most `limit` bytes, and the bytes of all storages."""
    shards: list[dict[str, Tensor]] = []
    current_shard: dict[str, Tensor] = {}  # the file that is being filled
    current_nbytes = total = 0  # bytes in `current_shard`, and in all files
    shard_by_storage: dict[tuple[torch.device, int, int], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        key = storage.device, storage.data_ptr(), nbytes
        existing_shard = shard_by_storage.get(key)
        if existing_shard is not None:  # tensors over one storage stay together
            existing_shard[name] = tensor
            continue
        total += nbytes
        if nbytes > limit:  # a file of its own
            shard = {name: tensor}
            shards.append(shard)
        else:
            if current_nbytes + nbytes > limit:
                shards.append(current_shard)
                current_shard, current_nbytes = {}, 0
            current_shard[name] = tensor
            current_nbytes += nbytes
            shard = current_shard
        shard_by_storage[key] = shard
    if current_shard:
        shards.append(current_shard)
    return shards, total
