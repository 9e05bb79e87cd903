"""`async_save` and `save`: one call that keeps what DCP wants kept.

What is kept from call to call: a group of our own, the thread of rounds, plans of each structure,
and which save is under way.

    async_save
      wait for the save before        its error is raised, and goes round
      stage                           copies, on pool memory
      Rounds.submit                   the rest, on its thread
"""

from __future__ import annotations

import functools
import logging
import os
import time
import weakref
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.checkpoint.stateful import Stateful

from stillframe._base.birth import Birth
from stillframe._base.distributed import is_initialized
from stillframe._base.flags import refuse_unclear
from stillframe._base.paths import Place
from stillframe._dcp.beside import Beside
from stillframe._dcp.groups import Groups, refuse_without_cpu
from stillframe._dcp.rounds import Copied, Round, Rounds, Upload, Worker
from stillframe._dcp.shards import taken_apart
from stillframe._dcp.staged import Staged, Stages, StateDict
from stillframe._dcp.turn import Turn
from stillframe._dcp.writer import FileSystemWriter
from stillframe._save import completion, ordered
from stillframe._save.engine import Engine, refuse_no_engine
from stillframe._save.outcome import CallingLater
from stillframe._save.report import SaveReport
from stillframe.errors import BusyError, PoolExhaustedError

log = logging.getLogger("stillframe")

WhenBusy = Literal["wait", "raise"]


@dataclass
class SaveResponse(AsyncSaveResponse):
    """DCP's response: two futures, `staging_completion` and `upload_completion`. The result of the
    second is the checkpoint's `Metadata`.

    Attributes:
        report: What this rank did and what it cost, once the upload has succeeded; None before.
    """

    report: SaveReport | None = None
    staged_nbytes: int = field(default=0, init=False, repr=False)
    reads_live_state: bool = field(default=False, init=False, repr=False)


def async_save(
    state_dict: StateDict,
    checkpoint_id: str | os.PathLike[str],
    *,
    process_group: dist.ProcessGroup | None = None,
    planner: SavePlanner | None = None,
    no_dist: bool = False,
    overlap: bool = True,
    durable: bool = True,
    engine: Engine | None = None,
    when_busy: WhenBusy = "wait",
) -> SaveResponse:
    """Saves a checkpoint of all ranks, as `torch.distributed.checkpoint.async_save` does, with
    stillframe's staging, writing and commit. Every rank has to make every call.

    The call copies the state. With `overlap=True`, what only the optimizer's step changes is copied
    after the call, under the next forward and backward, and the next step waits for it by itself.
    Planning, writing and the commit run beside training, with collectives in a group of their own.
    For local paths plans are kept: the second save of a structure sends none. PyTorch's `dcp.load`
    reads the checkpoint, on any number of ranks.

    One save is under way at a time. The next call waits for it, and raises its error unless the
    future has already given it. A path that is saved to again holds the old checkpoint or the new
    one at every moment.

    Args:
        state_dict: As for DCP; `Stateful` values are asked for theirs.
        checkpoint_id: A directory, created with its parents if it is missing. For a remote one
            (`scheme://`), the state is staged here and written by PyTorch's own writer.
        process_group: The ranks that save, with a backend for the CPU. By default all ranks. Where
            it has all of them, only its timeout is used, for a gloo group that the first call
            makes. With fewer ranks nothing else may use it meanwhile.
        planner: By default PyTorch's, with plans kept.
        no_dist: This process saves alone, even if there are others. To a path of its own: where two
            save to one, the last one's state stays, as with PyTorch's writer.
        overlap: Copy after the call what only the optimizer's step changes.
        durable: Sync files and directories.
        engine: The engine to use, `stillframe.default_engine()` by default.
        when_busy: While a save is under way: "wait" for it, or "raise" `BusyError`, on all ranks
            if any of them is still busy, for which the group has to have all ranks.

    Returns:
        Two futures, and later a report. An error of one rank reaches all: `CheckpointException` (a
        BaseException, not an Exception) says which ranks failed and why. If a rank was killed, the
        others get gloo's error, within the group's timeout.

    Raises:
        BusyError: See `when_busy`.
        CheckpointException, Exception: The save before failed.
        TypeError, ValueError: An argument that makes no sense.
        PoolExhaustedError, StillframeError, Exception: This rank could not copy its state, see
            `stillframe.snapshot`. The other ranks' save fails with the reason.
    """
    ordered.refuse_inside()
    saver = saver_of_this_process()
    return saver.save(
        state_dict,
        Place.of(checkpoint_id),
        Asked(
            group=saver.group(process_group, no_dist),
            planner=planner,
            overlap=overlap,
            durable=durable,
            engine=engine,
            when_busy=when_busy,
        ),
    )


def save(
    state_dict: StateDict,
    checkpoint_id: str | os.PathLike[str],
    *,
    process_group: dist.ProcessGroup | None = None,
    planner: SavePlanner | None = None,
    no_dist: bool = False,
    durable: bool = True,
    engine: Engine | None = None,
) -> SaveReport:
    """Saves a checkpoint of all ranks and returns when it is durable.

    Args:
        state_dict: As for `async_save`.
        checkpoint_id: As for `async_save`.
        process_group: As for `async_save`.
        planner: As for `async_save`.
        no_dist: As for `async_save`.
        durable: As for `async_save`.
        engine: As for `async_save`.

    Returns:
        What this rank did and what it cost.

    Raises:
        CheckpointException: Any rank failed. The directory holds what it held before.
        TypeError, ValueError, StillframeError, Exception: As `async_save`.
    """
    response = async_save(
        state_dict,
        checkpoint_id,
        process_group=process_group,
        planner=planner,
        no_dist=no_dist,
        overlap=False,
        durable=durable,
        engine=engine,
    )
    response.upload_completion.result()
    assert response.report is not None
    return response.report


@dataclass(frozen=True)
class Asked:
    """How a save is asked for; see `async_save`, and of the rest `Round`.

    Attributes:
        begins: Done when this rank may begin: who asks has a place among other saves for it. With
            None it gets one here.
        live_if_full: A state that no pool is large enough for is saved as it is: the response says
            so, and who asked has to wait for the upload.
    """

    group: dist.ProcessGroup | None
    planner: SavePlanner | None
    overlap: bool
    durable: bool
    engine: Engine | None
    when_busy: WhenBusy
    begins: Future[None] | None = None
    beside: Beside | None = None
    live_if_full: bool = False


class Saver:
    """What one process keeps from call to call."""

    def __init__(self) -> None:
        self.birth = Birth("what stillframe.dcp keeps")
        self._groups = Groups()
        self._worker = Worker()
        self._alone = Rounds(self._worker)
        # By group, for as long as there is that.
        self._rounds = weakref.WeakKeyDictionary[dist.ProcessGroup, Rounds]()
        self._last: Upload | None = None
        self._stages = Stages()
        # Of saves that have ended. The end of a tensor or collective lets go of the interpreter
        # lock, so they end in the next call and not beside a main thread that computes.
        self._spent: list[Any] = []

    def group(
        self, process_group: dist.ProcessGroup | None, no_dist: bool
    ) -> dist.ProcessGroup | None:
        if no_dist or not is_initialized():
            return None
        if process_group is not None:
            refuse_without_cpu(process_group)
        return self._groups.of_saves(process_group)

    def save(self, state_dict: StateDict, place: Place, asked: Asked) -> SaveResponse:
        entered = time.perf_counter()
        path, writer = place.text, _writer(place, asked.durable, asked.engine)
        if not isinstance(state_dict, dict):
            raise TypeError(f"state_dict has to be a dict, not {type(state_dict).__name__}")
        if asked.when_busy not in get_args(WhenBusy):
            raise ValueError(f"when_busy has to be 'wait' or 'raise', not {asked.when_busy!r}")
        refuse_unclear(overlap=asked.overlap, durable=asked.durable)
        if asked.when_busy == "raise":
            self._refuse_busy(asked.group)
        if writer is not None:
            writer.beside = asked.beside
        rounds = self._rounds_of(asked.group)
        upload, copied = Upload(path), Future[Copied]()
        response = SaveResponse(CallingLater(), cast(Any, upload))
        work = rounds.next(path, writer, asked.planner, asked.group, upload)
        work.begins, work.beside, work.give_up = asked.begins, asked.beside, self._give_up
        work.spent = self._spent
        try:
            waited_s = self._wait_for_last(work)
            self._spent.clear()
            self._stage(work, _of_stateful(state_dict), asked)
            completion.completion.start()
            if not completion.completion.over and asked.begins is None:
                work.turn = Turn(place)  # now that the call is through, as a file's
            if work.staged is None:
                response.reads_live_state = True
                response.staging_completion.set_result(None)
            else:
                response.staged_nbytes = work.staged.nbytes
                work.staged.settle(copied)
            costs = _Costs(work.staged, writer, path, entered, waited_s)
            copied.add_done_callback(functools.partial(_copied, costs, response))
            work.ended_well = functools.partial(_report, response, costs)
        except BaseException as error:
            work.tree = error
            upload.seen = True  # of this call's error
            raise
        finally:
            self._last = upload
            rounds.submit(work)  # the others are at this call too
        return response

    def _stage(self, work: Round, state_dict: StateDict, asked: Asked) -> None:
        """Copies, where there is memory for that."""
        content = None if asked.beside is None else asked.beside.content
        tree: Copied = (state_dict, content)
        stage = functools.partial(self._stages.stage, overlap=asked.overlap, engine=asked.engine)
        try:
            try:
                work.staged = stage(tree)
            except TypeError:  # mostly there is none to be looked for
                tree = (taken_apart(state_dict), content)
                if tree[0] is state_dict:
                    raise
                work.is_apart = True
                work.staged = stage(tree)
        except PoolExhaustedError:
            if not asked.live_if_full:
                raise
            work.tree = tree
        else:
            work.tree = work.staged.uploads_at_once()

    def _rounds_of(self, group: dist.ProcessGroup | None) -> Rounds:
        if group is None:
            return self._alone
        return self._rounds.setdefault(group, Rounds(self._worker))

    def _give_up(self, group: dist.ProcessGroup, why: BaseException) -> None:
        self._rounds.pop(group, None)
        self._groups.give_up(group, why)

    def _refuse_busy(self, group: dist.ProcessGroup | None) -> None:
        busy = self._last is not None and not self._last.done()
        if group is not None:
            busy = self._groups.any_rank(group, busy)
        if busy:
            raise BusyError(
                "a save is under way: wait for its upload_completion, or give when_busy='wait'"
            )

    def _wait_for_last(self, work: Round) -> float:
        """The seconds it took.

        Raises:
            BaseException: What it failed with, if nobody has seen that.
        """
        began, last = time.perf_counter(), self._last
        if last is not None:
            error = last.unseen_error()
            if error is not None:
                work.raised = True
                raise error
        return time.perf_counter() - began


def _writer(place: Place, durable: bool, engine: Engine | None) -> FileSystemWriter | None:
    """Return None for a remote place, which PyTorch's own writer writes to."""
    if engine is not None:
        refuse_no_engine(engine)
    if place.remote:
        log.info("stillframe: %s is written by PyTorch's own writer", place.text)
        return None
    return FileSystemWriter(place.given, durable=durable, engine=engine)


def _of_stateful(state_dict: StateDict) -> StateDict:
    return {
        name: value.state_dict() if _is_stateful(value) else value
        for name, value in state_dict.items()
    }


def _is_stateful(value: Any) -> bool:
    """Asking a protocol takes longer than copying a tensor."""
    plain = type(value) is dict or isinstance(value, torch.Tensor)
    return not plain and isinstance(value, Stateful)


class _Costs:
    """What a report tells of a call."""

    def __init__(
        self,
        staged: Staged | None,
        writer: FileSystemWriter | None,
        path: str,
        entered: float,
        waited_s: float,
    ) -> None:
        self.staged = staged
        self.writer = writer
        self.path = path
        self.entered = entered
        self.called = self.copied = time.perf_counter()
        self.waited_s = waited_s


def _copied(costs: _Costs, response: SaveResponse, copied: Future[Copied]) -> None:
    costs.copied = time.perf_counter()
    error = copied.exception()
    if error is None:
        response.staging_completion.set_result(None)
    else:
        response.staging_completion.set_exception(error)


def _report(response: SaveResponse, costs: _Costs) -> None:
    """The save has ended well."""
    response.staging_completion.result()  # whoever notes it may be about to
    staged, now = costs.staged, time.perf_counter()
    nbytes, deferred_nbytes = (0, 0) if staged is None else (staged.nbytes, staged.deferred_nbytes)
    remote = costs.writer is None
    files = [] if costs.writer is None else costs.writer.reports()
    response.report = SaveReport(
        path=costs.path,
        nbytes=nbytes if remote else sum(file.nbytes for file in files),
        num_tensors=0 if staged is None else staged.num_tensors,
        captured_nbytes=nbytes - deferred_nbytes,
        deferred_nbytes=deferred_nbytes,
        # Of state that was not copied the call returns no earlier than this save ends.
        blocked_s=(now if staged is None else costs.called) - costs.entered,
        gate_wait_s=0.0 if staged is None else staged.gate_wait_s,
        backpressure_s=costs.waited_s,
        staged_after_s=costs.copied - costs.entered,
        durable_after_s=now - costs.entered,
        peak_pool_bytes=nbytes + max((file.peak_pool_bytes for file in files), default=0),
        io_mode="fsspec" if remote else files[0].io_mode if files else "buffered",
        fallbacks=tuple(dict.fromkeys(line for file in files for line in file.fallbacks)),
    )


_saver = Saver()


def saver_of_this_process() -> Saver:
    """A forked child starts with nothing: threads and groups are the parent's."""
    global _saver
    if _saver.birth.foreign():
        _saver = Saver()
    return _saver
