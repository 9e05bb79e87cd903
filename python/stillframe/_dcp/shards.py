"""ShardedTensors in a state dict, which FSDP makes when it has no device mesh.

A snapshot refuses a ShardedTensor. So it is replaced by its local tensors before the copy, and made
again over the copied tensors.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


class _Recipe:
    """The description of a ShardedTensor, without its memory."""

    def __init__(self, whole: Any) -> None:
        self._spec = whole.sharding_spec()
        self._metadata = whole.metadata()
        self._shards = [(type(each), each.metadata) for each in whole.local_shards()]
        self._group = whole._process_group

    def rebuild(self, tensors: list[torch.Tensor], kind: Any) -> Any:
        """Return a ShardedTensor, of the class `kind`, over these local tensors."""
        properties = self._metadata.tensor_properties
        whole = kind.__new__(
            kind,
            self._spec,
            self._metadata.size,
            dtype=properties.dtype,
            layout=properties.layout,
            pin_memory=False,
            requires_grad=False,
        )
        # The constructor would allocate memory, and the public functions would refuse the copies,
        # which are on another device than the metadata says.
        whole._prepare_init(process_group=self._group)
        whole._metadata = self._metadata
        whole._local_shards = [
            shard(tensor=tensor, metadata=metadata)
            for (shard, metadata), tensor in zip(self._shards, tensors, strict=True)
        ]
        return whole


class _Local(list[torch.Tensor]):
    """The tensors of one ShardedTensor on this rank."""

    recipe: _Recipe


def take_apart(tree: Any) -> Any:
    """Replace ShardedTensors by their local tensors. Return the tree itself if it has none."""
    kind = _kind()
    return tree if kind is None else _replace(tree, kind, _local_tensors)


def put_together(tree: Any) -> Any:
    """Return the tree of `take_apart` with its ShardedTensors made again."""
    kind = _kind()
    if kind is None:
        return tree
    return _replace(tree, _Local, lambda local: local.recipe.rebuild(local, kind))


def _kind() -> type[Any] | None:
    """Return the class ShardedTensor, or None if its module was not imported: then there are no
    ShardedTensors."""
    module = sys.modules.get("torch.distributed._shard.sharded_tensor")
    kind = getattr(module, "ShardedTensor", None)
    return kind if isinstance(kind, type) else None


def _replace(tree: Any, kind: type[Any], exchange: Any) -> Any:
    """Put `exchange(object)` in place of each object of the class `kind`. Return the tree itself if
    it has none."""
    if isinstance(tree, kind):
        return exchange(tree)
    if type(tree) in (list, tuple):
        items = [_replace(each, kind, exchange) for each in tree]
        changed = any(new is not old for new, old in zip(items, tree, strict=True))
        return type(tree)(items) if changed else tree
    if isinstance(tree, dict):
        replaced = {key: _replace(value, kind, exchange) for key, value in tree.items()}
        changed = any(value is not tree[key] for key, value in replaced.items())
        return replaced if changed else tree
    return tree


def _local_tensors(whole: Any) -> _Local:
    """Return a ShardedTensor's local tensors, with the recipe to make it again."""
    local = _Local(shard.tensor.detach() for shard in whole.local_shards())
    local.recipe = _Recipe(whole)
    return local
