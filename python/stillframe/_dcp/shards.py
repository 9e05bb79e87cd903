"""ShardedTensors in a state dict, which FSDP makes when it has no device mesh.

A snapshot refuses a ShardedTensor. So it is replaced by its local tensors before the copy, and made
again over the copied tensors.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


class _ShardedTensorDescription:
    """The description of a ShardedTensor, without its memory."""

    def __init__(self, sharded: Any) -> None:
        self._spec = sharded.sharding_spec()
        self._metadata = sharded.metadata()
        self._shards = [(type(each), each.metadata) for each in sharded.local_shards()]
        self._group = sharded._process_group

    def rebuild(self, tensors: list[torch.Tensor], kind: Any) -> Any:
        """Return a ShardedTensor, of the class `kind`, over these local tensors."""
        properties = self._metadata.tensor_properties
        sharded = kind.__new__(
            kind,
            self._spec,
            self._metadata.size,
            dtype=properties.dtype,
            layout=properties.layout,
            pin_memory=False,
            requires_grad=False,
        )
        # Not the constructor, which would allocate memory, nor the public functions, which would
        # refuse the copies: they are on another device than the metadata says.
        sharded._prepare_init(process_group=self._group)
        sharded._metadata = self._metadata
        sharded._local_shards = [
            shard(tensor=tensor, metadata=metadata)
            for (shard, metadata), tensor in zip(self._shards, tensors, strict=True)
        ]
        return sharded


class _LocalTensors(list[torch.Tensor]):
    """The tensors of one ShardedTensor on this rank."""

    recipe: _ShardedTensorDescription


def replace_sharded_tensors(tree: Any) -> Any:
    """Replace ShardedTensors by their local tensors. Return the tree itself if it has none."""
    kind = _sharded_tensor_class()
    return tree if kind is None else _replace(tree, kind, _local_tensors)


def restore_sharded_tensors(tree: Any) -> Any:
    """Return the tree of `replace_sharded_tensors` with its ShardedTensors made again."""
    kind = _sharded_tensor_class()
    if kind is None:
        return tree
    return _replace(tree, _LocalTensors, lambda local: local.recipe.rebuild(local, kind))


def _sharded_tensor_class() -> type[Any] | None:
    """Return the class ShardedTensor, or None if its module was not imported: then there are no
    ShardedTensors."""
    module = sys.modules.get("torch.distributed._shard.sharded_tensor")
    kind = getattr(module, "ShardedTensor", None)
    return kind if isinstance(kind, type) else None


def _replace(tree: Any, kind: type[Any], replacement_of: Any) -> Any:
    """Put `replacement_of(object)` in place of each object of the class `kind`. Return the tree
    itself if it has none."""
    if isinstance(tree, kind):
        return replacement_of(tree)
    if type(tree) in (list, tuple):
        items = [_replace(each, kind, replacement_of) for each in tree]
        changed = any(new is not old for new, old in zip(items, tree, strict=True))
        return type(tree)(items) if changed else tree
    if isinstance(tree, dict):
        replaced = {key: _replace(value, kind, replacement_of) for key, value in tree.items()}
        changed = any(value is not tree[key] for key, value in replaced.items())
        return replaced if changed else tree
    return tree


def _local_tensors(sharded: Any) -> _LocalTensors:
    """Return a ShardedTensor's local tensors, with the recipe to make it again."""
    local = _LocalTensors(shard.tensor.detach() for shard in sharded.local_shards())
    local.recipe = _ShardedTensorDescription(sharded)
    return local
