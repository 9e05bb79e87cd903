"""Errors of one rank, raised by all ranks of a Trainer together.

Lightning has every rank meet in a barrier behind a save, which rank 0 makes alone or each makes a
part of. An error raised in between leaves the others in the barrier, so it is kept until all have
passed it; then one flag goes round, and if it is set the error follows it.

After training rank 0 raises alone: between `setup` and `teardown` all ranks raise together, and a
save after that stands behind the barrier in which the others wait. Nothing of ours may stay on a
Trainer that was torn down.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch.distributed

from stillframe._base.distributed import is_initialized
from stillframe.errors import StillframeError


def several(trainer: Any) -> bool:
    """Whether `trainer` runs on several ranks that can talk to each other now."""
    return trainer.world_size > 1 and is_initialized()


def agree(
    strategy: Any, error: BaseException | None, unmade: bool = False
) -> tuple[BaseException | None, bool]:
    """What every rank is to raise: its own error, or that of the first rank that has one, or None.
    A collective: call it on all ranks.

    Args:
        unmade: This rank's call failed, so that no save was made.

    Returns:
        Besides, whether `unmade` is true on any rank that has an error.
    """
    if not strategy.reduce_boolean_decision(error is not None, all=False):
        return None, False
    rows: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(rows, (_packed(error), unmade))
    of_any = any(row[1] for row in rows)
    if error is not None:
        return error, of_any
    rank, sent = next((rank, row[0]) for rank, row in enumerate(rows) if row[0] is not None)
    told: BaseException = pickle.loads(sent)
    told.add_note(f"This was raised by rank {rank}; rank {strategy.global_rank} ends with it.")
    return told, of_any


def _packed(error: BaseException | None) -> bytes | None:
    if error is None:
        return None
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
    except Exception:  # an error of other code, with whatever in it
        packed = pickle.dumps(StillframeError(f"{type(error).__name__}: {error}"))
    return packed
