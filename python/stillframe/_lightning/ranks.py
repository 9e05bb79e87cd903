"""Makes all ranks of a Trainer raise the error of one rank together.

In Lightning all ranks meet in a barrier after a save. If a rank raised an error before the barrier,
the other ranks would wait forever. So the ranks first pass the barrier, and then agree on an error.

The ranks raise together between `setup` and `teardown`. At other times rank 0 raises alone, after
it has entered the barrier.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch.distributed

from stillframe._base.distributed import is_initialized
from stillframe.errors import StillframeError


def has_several_ranks(trainer: Any) -> bool:
    """Return whether `trainer` runs on several ranks that can communicate now."""
    return trainer.world_size > 1 and is_initialized()


def agree(
    strategy: Any, error: BaseException | None, call_failed: bool = False
) -> tuple[BaseException | None, bool]:
    """Agree on the error that every rank raises. This is a collective: all ranks have to call it.

    Args:
        error: This rank's error, or None.
        call_failed: This rank's call raised before it made a save.

    Returns:
        - The error to raise: this rank's error, otherwise the error of the first rank that has one.
          None if no rank has an error.
        - Whether `call_failed` is true on any rank. False if no rank has an error.
    """
    if not strategy.reduce_boolean_decision(error is not None, all=False):
        return None, False
    answers: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(answers, (_pickle_error(error), call_failed))
    any_call_failed = any(answer[1] for answer in answers)
    if error is not None:
        return error, any_call_failed
    packed_errors = [answer[0] for answer in answers]
    rank = next(rank for rank, packed in enumerate(packed_errors) if packed is not None)
    received: BaseException = pickle.loads(packed_errors[rank])
    received.add_note(f"This was raised by rank {rank}; rank {strategy.global_rank} ends with it.")
    return received, any_call_failed


def _pickle_error(error: BaseException | None) -> bytes | None:
    """Return the pickle of an error, or None for None. An error that cannot be pickled becomes a
    StillframeError with the same text."""
    if error is None:
        return None
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)  # some errors can be pickled and not unpickled
    except Exception:  # errors of other code may hold anything
        packed = pickle.dumps(StillframeError(f"{type(error).__name__}: {error}"))
    return packed
