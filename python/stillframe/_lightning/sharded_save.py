"""A save that all ranks make, of a state that each has a part of: a plugin's save through DCP.

On every rank it has its place in the process's log, as files have. So what was to be removed before
is gone, and what is to be removed or linked behind it waits for its end, which is the same on all
ranks. A file or link that stands where the directory goes is removed first.
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

# Lightning takes a directory for a sharded checkpoint where there is such a file.
META = "meta.pt"


@dataclass(frozen=True)
class Parts:
    """What is saved.

    Attributes:
        state: Of models and optimizers, for DCP.
        rest: Everything else; rank 0's is saved.
        rank: This one.
    """

    state: dict[str, Any]
    rest: dict[str, Any]
    rank: int


def submit(parts: Parts, place: Place, options: SaveOptions, *, engine: Engine) -> SaveHandle:
    """Starts the save. Collective; a rank that raises takes part in it, and it fails on all.

    A state that does not fit into the pool is saved as it is, and waited for.

    Raises:
        BusyError: With an engine that raises it, on all ranks.
        StillframeError, Exception: This rank could not copy its state.
    """
    from stillframe._dcp.api import saver_of_this_process
    from stillframe._dcp.beside import Beside
    from stillframe._dcp.rounds import Asked

    first = parts.rank == 0
    saver = saver_of_this_process()
    with inside():
        ordered.refuse_inside()
        asked = Asked(
            group=saver.group(None, no_dist=False),
            planner=None,
            overlap=options.overlap,
            durable=options.durable,
            engine=engine,
            when_busy="raise" if limits_of(engine).when_busy == "raise" else "wait",
            beside=Beside(META, parts.rest) if first else None,
            follow_link=options.follow_link,
            makes_way=first,
            live_if_full=True,
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
    except CheckpointException as error:  # of a save of the user's own
        raise of_save(error, place.text) from None


def of_save(error: BaseException, path: str) -> Exception:
    """What failed, as an error that `except Exception` catches: DCP's own is none."""
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
