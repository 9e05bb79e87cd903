"""A save that all ranks make, of a state that each has a part of: the same handle, through DCP.

On every rank it has its place in the process's log, as files have, and its turn there is when its
part in DCP's collectives begins. So what was to be removed before is gone, and what is to be
removed or linked behind it waits for its end, which is the same on all ranks.

    called ──▶ its state is being copied ──▶ its turn in the log ──▶ DCP's save ──▶ ended
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stillframe import _core
from stillframe._base.calls import inside
from stillframe._base.paths import Place
from stillframe._lightning.wrapped_save import WrappedSave
from stillframe._save import ordered
from stillframe._save.engine import Engine, limits_of
from stillframe._save.handle import Deadline, wait_for_end
from stillframe._save.options import OnDurable, SaveOptions
from stillframe.errors import SaveError, StillframeError

if TYPE_CHECKING:
    from stillframe._dcp.api import SaveResponse

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


class ShardedSave(WrappedSave):
    """
    Args:
        path: The directory.
        entered: `time.perf_counter()` at the call's entry.
    """

    def __init__(self, path: str, on_durable: OnDurable | None, entered: float) -> None:
        super().__init__(path, path, on_durable, None, fallbacks=[], entered=entered, waited_s=0.0)
        self._response: SaveResponse | None = None

    def follow(self, response: SaveResponse) -> None:
        self._response = response
        self._nbytes = response.staged_nbytes
        response.staging_completion.add_done_callback(self._tell_staged)

    def end(self) -> bool:
        """Waits for the upload's end; whether it is a good one."""
        assert self._response is not None
        error = self._response.upload_completion.exception()
        self._end(self._response.report, None if error is None else of_save(error, self._path))
        return error is None

    def _tell_staged(self, copied: Future[None]) -> None:
        if copied.exception() is None:
            self._outcome.notify_staged()

    def _is_staged(self) -> bool:
        copied = None if self._response is None else self._response.staging_completion
        return copied is not None and copied.done() and copied.exception() is None

    def _wait_until_staged(self, deadline: Deadline) -> bool:
        if self._response is not None:
            try:
                if self._response.staging_completion.exception(deadline.left()) is not None:
                    return False
            except TimeoutError:
                raise self._late(deadline, "staged") from None
        return self._outcome.error is None


def submit(parts: Parts, place: Place, options: SaveOptions, *, engine: Engine) -> ShardedSave:
    """Starts the save. Collective; a rank that raises takes part in it, and it fails on all.

    A state that does not fit into the pool is saved as it is, and waited for.

    Raises:
        BusyError: With an engine that raises it, on all ranks.
        StillframeError, Exception: This rank could not copy its state.
    """
    from stillframe._dcp.api import Asked, saver_of_this_process
    from stillframe._dcp.beside import Beside

    first = parts.rank == 0
    path = place.text
    save = ShardedSave(path, options.on_durable if first else None, time.perf_counter())
    turn: Future[None] = Future()
    saver = saver_of_this_process()
    try:
        with inside():
            ordered.refuse_inside()
            asked = Asked(
                group=saver.group(None, no_dist=False),
                planner=None,
                overlap=options.overlap,
                durable=options.durable,
                engine=engine,
                when_busy="raise" if limits_of(engine).when_busy == "raise" else "wait",
                begins=turn,
                beside=Beside(META, parts.rest) if first else None,
                live_if_full=True,
            )
            response = _saved(saver, parts.state, place, asked)
            save.follow(response)
            work = functools.partial(_take_turn, save, path, turn, first)
            ordered.submit(place.key(), _core.WORK_SAVE, work)
            if response.reads_live_state:
                wait_for_end(save)
    except BaseException as error:
        with contextlib.suppress(InvalidStateError):  # its turn has come all the same
            turn.set_exception(StillframeError(f"the call broke off: {error!r}"))
        raise
    return save


def _saved(saver: Any, state: dict[str, Any], place: Place, asked: Any) -> SaveResponse:
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        response: SaveResponse = saver.save(state, place, asked)
    except CheckpointException as error:  # of a save of the user's own
        raise of_save(error, place.text) from None
    upload: Any = response.upload_completion
    upload.seen = True  # its error is the handle's
    return response


def _take_turn(
    save: ShardedSave, path: str, turn: Future[None], first: bool, after_good: bool
) -> bool:
    """In the order of the log: DCP's thread goes on, and this one waits for it."""
    refused: OSError | None = None
    try:
        if first and (os.path.islink(path) or os.path.isfile(path)):
            os.unlink(path)
    except OSError as error:
        refused = error
    with contextlib.suppress(InvalidStateError):  # the call broke off
        if refused is None:
            turn.set_result(None)
        else:
            turn.set_exception(refused)
    return save.end()


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
