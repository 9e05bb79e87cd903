"""Implements `ordinary_copy`: a copy like `snapshot`'s in ordinary memory, for a full pool."""

from __future__ import annotations

import ctypes
import mmap
from typing import TypeVar

import torch

from stillframe._tree.walk import Tree

T = TypeVar("T")

_ALIGN = 64  # bytes; alignment of each storage, as in the pool


def ordinary_copy(tree: T) -> tuple[T, int, int]:
    """Copy a tree as `snapshot` does, into ordinary memory.

    Returns:
        The tree, the number of its tensors, and the bytes of its storages.
    """
    source = Tree(tree, lanes=False)
    offsets: list[int] = []
    end = 0
    for _, nbytes in source.sources():
        offsets.append(end)
        end += -(-nbytes // _ALIGN) * _ALIGN
    # The memory lives as long as a tensor over it.
    memory = mmap.mmap(-1, max(end, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    base = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    for (address, nbytes), offset in zip(source.sources(), offsets, strict=True):
        if address:
            ctypes.memmove(base + offset, address, nbytes)
    built, _ = source.rebuild(memory, offsets)
    return built, source.num_tensors(), source.nbytes()
