"""ShardedTensors in a state dict, which FSDP makes where it has no device mesh.

A snapshot refuses them: they reduce themselves to objects with tensors of their own. So for the
copying each is exchanged for its local tensors, and made again over their copies.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


class _Recipe:
    """What a ShardedTensor is, without its memory."""

    def __init__(self, whole: Any) -> None:
        self._spec = whole.sharding_spec()
        self._metadata = whole.metadata()
        self._shards = [(type(each), each.metadata) for each in whole.local_shards()]
        self._group = whole._process_group

    def over(self, tensors: list[torch.Tensor], kind: Any) -> Any:
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
        # Its constructor would make memory, and the official ways in compare devices, which the
        # copies are not on any more.
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


def taken_apart(tree: Any) -> Any:
    """The tree with local tensors for its ShardedTensors; the tree itself where it has none."""
    kind = _kind()
    return tree if kind is None else _exchanged(tree, kind, _apart)


def put_together(tree: Any) -> Any:
    """The copied tree with ShardedTensors again."""
    kind = _kind()
    if kind is None:
        return tree
    return _exchanged(tree, _Local, lambda local: local.recipe.over(local, kind))


def _kind() -> type[Any] | None:
    """The class; None where nobody has imported it, and so has none."""
    kind = getattr(sys.modules.get("torch.distributed._shard.sharded_tensor"), "ShardedTensor", 0)
    return kind if isinstance(kind, type) else None


def _exchanged(tree: Any, kind: type[Any], exchange: Any) -> Any:
    """The tree itself where it has none of that kind."""
    if isinstance(tree, kind):
        return exchange(tree)
    if type(tree) in (list, tuple):
        items = [_exchanged(each, kind, exchange) for each in tree]
        changed = any(new is not old for new, old in zip(items, tree, strict=True))
        return type(tree)(items) if changed else tree
    if isinstance(tree, dict):
        pairs = [(key, _exchanged(value, kind, exchange)) for key, value in tree.items()]
        return dict(pairs) if any(value is not tree[key] for key, value in pairs) else tree
    return tree


def _apart(whole: Any) -> _Local:
    local = _Local(shard.tensor.detach() for shard in whole.local_shards())
    local.recipe = _Recipe(whole)
    return local
