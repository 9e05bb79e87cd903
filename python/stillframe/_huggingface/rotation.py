"""Which checkpoints of an output directory go, by the rule of transformers' Trainer."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from transformers.trainer_utils import sort_checkpoints

from stillframe._save import api


def rotate(
    run_dir: str, limit: int | None, best: str | None, ours: list[str], untold: Collection[str]
) -> None:
    """Remove the oldest checkpoints beyond `limit`, behind the saves that were submitted so far.

    The newest checkpoint and the best one stay, as with transformers.

    Args:
        run_dir: The directory with the checkpoints.
        limit: `save_total_limit`; None or 0 keeps all.
        best: `state.best_model_checkpoint`.
        ours: The checkpoints that this training has saved, the oldest first, as `normal` gives
            them. Those that are gone leave the list.
        untold: Those of them for which `on_save` has not been called. They stay until it has been.
    """
    if limit is None or limit <= 0:
        return
    ours[:] = [path for path in ours if path in untold or api.exists(path)]
    older = (path for path in sort_checkpoints(run_dir, use_mtime=True) if path not in ours)
    left = [path for path in older if api.exists(path)] + ours
    protected = {*left[-1:], *([normal(best)] if best else [])}
    for path in list(left):
        if len(left) <= max(limit, len(protected)):
            return
        if path not in protected and path not in untold:
            api.remove(path)
            left.remove(path)


def normal(path: str) -> str:
    """Return a path in the form in which transformers lists it."""
    return str(Path(path))
