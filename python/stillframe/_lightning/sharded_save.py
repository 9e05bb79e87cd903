"""Saves a state of which each rank has a part, through DCP, for a plugin.

On every rank the save has an entry in the process's log, as saves of files have. So removes
submitted before it are done first, and removes and links submitted after it wait for its end, which
is the same on all ranks. A file or link with the directory's name is removed first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stillframe._base.calls import inside
from stillframe._base.paths import Place
from stillframe._save import ordered
from stillframe._save.engine import Engine, limits_of
from stillframe._save.handle import SaveHandle, wait_for_end
from stillframe._save.options import SaveOptions
from stillframe._snapshot.save import SnapshotSave
from stillframe.errors import SaveError, StillframeError

# A directory with this file is a sharded checkpoint for Lightning.
META = "meta.pt"


@dataclass(frozen=True)
class Parts:
    """The contents of a checkpoint.

    Attributes:
        state: The states of models and optimizers, for DCP.
        rest: Everything else; only rank 0's is saved.
        rank: This rank.
    """

    state: dict[str, Any]
    rest: dict[str, Any]
    rank: int


def submit(parts: Parts, place: Place, options: SaveOptions, *, engine: Engine) -> SaveHandle:
    """Start the save. A collective: if one rank raises, the save fails on all of them.

    A state that does not fit into the pool is saved from its own memory, in the call.

    Raises:
        BusyError: The engine of a rank is busy and raises this; all ranks raise it.
        StillframeError, Exception: This rank could not copy its state.
    """
    from stillframe._dcp.api import saver_of_this_process
    from stillframe._dcp.rounds import SaveRequest
    from stillframe._dcp.side_file import SideFile

    first = parts.rank == 0
    saver = saver_of_this_process()
    with inside():
        ordered.refuse_inside()
        asked = SaveRequest(
            group=saver.group(None, no_dist=False),
            planner=None,
            overlap=options.overlap,
            durable=options.durable,
            engine=engine,
            when_busy="raise" if limits_of(engine).when_busy == "raise" else "wait",
            side_file=SideFile(META, parts.rest) if first else None,
            follow_link=options.follow_link,
            removes_file=first,
            uncopied_if_full=True,
            on_durable=options.on_durable if first else None,
            error_of=of_save,
        )
        save: SnapshotSave = _saved(saver, parts.state, place, asked)
        if save.snapshot() is None:
            wait_for_end(save)
    return save


def _saved(saver: Any, state: dict[str, Any], place: Place, asked: Any) -> Any:
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        return saver.save(state, place, asked)
    except CheckpointException as error:  # raised by the user's own DCP save
        raise of_save(error, place.text) from None


def of_save(error: BaseException, path: str) -> Exception:
    """Convert an error to one that `except Exception` catches, which DCP's own is not."""
    failures: dict[int, Any] = getattr(error, "failures", {})
    if not failures:
        if isinstance(error, Exception):
            return error
        return StillframeError(f"{path} was not saved: {error!r}")
    causes = {rank: cause for rank, (cause, _) in sorted(failures.items())}
    words = "; ".join(f"rank {rank}: {_words(cause)}" for rank, cause in causes.items())
    first = next(iter(causes.values()))
    if isinstance(first, OSError) and first.errno:
        return SaveError(first.errno, words, path, getattr(first, "phase", "write"))
    return StillframeError(f"{path} was not saved: {words}")


def _words(cause: BaseException) -> str:
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return str(cause) if isinstance(cause, StillframeError) else repr(cause)
