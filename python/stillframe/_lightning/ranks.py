"""Errors of rank 0, raised by all ranks of a Trainer together.

Lightning saves on rank 0 and has every rank meet in a barrier behind it. An error raised in
between leaves the others in the barrier, so it is kept until all have passed it; then one flag
goes round, and if it is set the error follows it.

After training rank 0 raises alone: between `setup` and `teardown` all ranks raise together, and a
save after that stands behind the barrier in which the others wait. Nothing of ours may stay on a
Trainer that was torn down.
"""

from __future__ import annotations

import pickle
from typing import Any

from stillframe._base.distributed import is_initialized
from stillframe.errors import StillframeError


def several(trainer: Any) -> bool:
    """Whether `trainer` runs on several ranks that can talk to each other now."""
    return trainer.world_size > 1 and is_initialized()


def agree(trainer: Any, error: BaseException | None) -> BaseException | None:
    """What every rank is to raise: rank 0's error, or None. A collective: call it on all ranks."""
    strategy = trainer.strategy
    if not strategy.reduce_boolean_decision(error is not None, all=False):
        return None
    sent = strategy.broadcast(_packed(error), src=0)
    if error is not None:
        return error
    told = _unpacked(sent)
    if told is not None:
        told.add_note(f"This was raised by rank 0; rank {trainer.global_rank} ends with it.")
    return told


def _packed(error: BaseException | None) -> bytes | None:
    if error is None:
        return None
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
    except Exception:  # an error of other code, with whatever in it
        packed = pickle.dumps(StillframeError(f"{type(error).__name__}: {error}"))
    return packed


def _unpacked(packed: bytes | None) -> BaseException | None:
    return None if packed is None else pickle.loads(packed)
