"""What has memory that only an optimizer's step takes the place of, beside what optimizers own.

A state that is offloaded lies in the pool, in new memory after every step: so nothing that is known
of it could be known of the next. Who put it there says itself what a save may copy behind its call.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch

from stillframe._tree.skeleton import SOURCE

_CAPTURED, _LATE = 0, 1  # lanes
_LATE_NBYTES = 65536  # what is smaller is copied in the call: that is quicker than to watch it


class Keeper(Protocol):
    """What has memory that nothing but an optimizer's step takes the place of, beside what the
    optimizers own themselves."""

    def defer(
        self,
        numbers: dict[int, int],
        rows: bytearray,
        indices: list[int],
        owners: list[int],
        tensors: list[torch.Tensor],
        versions: list[int],
    ) -> None:
        """Marks what of a save may be copied late, as `ownership.Owner.defer` does; each with
        `defer_one`."""

    def distrust(self, why: str) -> None:
        """Has everything captured from now on: it was written to while a save copied it."""


known: weakref.WeakSet[Keeper] = weakref.WeakSet()


def keep(keeper: Keeper) -> None:
    """Asks a keeper at every save, for as long as it lives."""
    known.add(keeper)


def defer_one(
    tensor: torch.Tensor,
    numbers: dict[int, int],
    rows: bytearray,
    indices: list[int],
    owners: list[int],
    tensors: list[torch.Tensor],
    versions: list[int],
) -> None:
    """Has the storage under a keeper's tensor copied late, where the save has it and nobody else
    has said so; the arguments are those of ``Keeper.defer``."""
    number = numbers.get(tensor.untyped_storage()._cdata)
    if number is None:
        return
    row = SOURCE.unpack_from(rows, number * SOURCE.size)
    if row[2] != _CAPTURED or row[1] <= _LATE_NBYTES:
        return
    owners.append(number)
    tensors.append(tensor)
    versions.append(tensor._version)
    indices.append(number)
    SOURCE.pack_into(rows, number * SOURCE.size, row[0], row[1], _LATE, row[3])
