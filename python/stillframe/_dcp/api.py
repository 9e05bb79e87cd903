"""`async_save` and `save`: one call that keeps the stager, the writer and the plans between saves.

    async_save
      wait for the previous save      its error is raised here, and sent to the other ranks
      stage                           copies the state into pool memory (`staged`)
      Rounds.submit                   plans, writes and commits on the thread `sf-dcp`

To follow one save, read the modules in this order:

    api           starts the save
    rounds        runs the saves one after the other
    joint         makes one save of all ranks
    writer        writes this rank's files
    checkpoint    names and commits the files
    location      puts the files into a directory or a store
    ranks         has the collectives
"""

from __future__ import annotations

import functools
import os
import time
import weakref
from dataclasses import dataclass, field
from typing import Any, cast, get_args

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.checkpoint.stateful import Stateful

from stillframe._base.arguments import check_booleans
from stillframe._base.birth import ForkGuard
from stillframe._base.distributed import is_initialized
from stillframe._base.paths import CheckpointPath
from stillframe._dcp.location import StorageOptions
from stillframe._dcp.ranks import Groups, refuse_without_cpu
from stillframe._dcp.rounds import Round, Rounds, SaveRequest, WhenBusy, Worker
from stillframe._dcp.shards import replace_sharded_tensors
from stillframe._dcp.staged import Stages, StateDict
from stillframe._dcp.writer import FileSystemWriter
from stillframe._save import completion, ordered
from stillframe._save.engine import Engine
from stillframe._save.handle import (
    SaveHandle,
    report_of,
    set_mirror,
    take_uncollected_error,
    wait_for_end,
)
from stillframe._save.ordered import LogEntry
from stillframe._save.report import SaveReport
from stillframe._snapshot.save import SnapshotSave
from stillframe.errors import BusyError, PoolExhaustedError


@dataclass
class SaveResponse(AsyncSaveResponse):
    """DCP's response: the futures `staging_completion` and `upload_completion`. The result of
    `upload_completion` is the checkpoint's `Metadata`."""

    _save: SaveHandle = field(repr=False)

    @property
    def report(self) -> SaveReport | None:
        """The report on what this rank did, once the upload has succeeded; None before."""
        return report_of(self._save)


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
    storage_options: StorageOptions = None,
) -> SaveResponse:
    """Save a checkpoint of all ranks, as `torch.distributed.checkpoint.async_save` does, with
    stillframe's staging, writing and commit. Every rank must make every call.

    The call copies the state. With `overlap=True`, data that only the optimizer's step changes is
    copied after the call, during the next forward and backward. The next step waits for that copy.
    Planning, writing and the commit run while training goes on. If names, types and shapes are
    those of an earlier save, the ranks use its plan again. PyTorch's `dcp.load` reads the
    checkpoint, on any number of ranks.

    One save is under way at a time, and the next call waits for its end. If the save failed and its
    future has not raised the error yet, the next call raises the error. A path that is saved to
    again always holds the complete old checkpoint or the complete new one.

    Args:
        state_dict: As for DCP. `state_dict()` of each `Stateful` value is called.
        checkpoint_id: A directory, created with its parents if it is missing, or a URL such as
            "s3://bucket/step100".
        process_group: The ranks that save; all ranks by default. It needs a backend for the CPU. If
            it has all ranks, only its timeout is used, for a gloo group that the first call makes.
            If it has fewer ranks, nothing else may use it until the save has ended.
        planner: PyTorch's planner by default. Plans of a planner that you give are not used again.
        no_dist: This process saves alone, even if there are others. Give each process a path of its
            own. Otherwise the state of the process that ends last stays.
        overlap: Copy after the call what only the optimizer's step changes.
        durable: Sync files and directories.
        engine: The engine to use, `stillframe.default_engine()` by default.
        when_busy: While a save is under way, "wait" for it, or "raise" `BusyError` on all ranks if
            any rank is busy. "raise" needs a group of all ranks.
        storage_options: For a URL, what fsspec's file system for its scheme takes. By default the
            credentials are those of the environment.

    Returns:
        Two futures, and later a report. The error of one rank reaches all ranks:
        `CheckpointException` (a BaseException, not an Exception) says which ranks failed and why.
        If a rank was killed, the others get gloo's error within the group's timeout.

    Raises:
        BusyError: See `when_busy`.
        CheckpointException, Exception: The previous save failed.
        TypeError, ValueError: An argument is invalid.
        PoolExhaustedError, StillframeError, Exception: This rank could not copy its state, see
            `stillframe.snapshot`. The save then fails on the other ranks too.
    """
    ordered.refuse_in_external_work()
    saver = saver_of_this_process()
    begun = saver.save(
        state_dict,
        CheckpointPath.of(checkpoint_id),
        SaveRequest(
            group=saver.group(process_group, no_dist),
            planner=planner,
            overlap=overlap,
            durable=durable,
            engine=engine,
            when_busy=when_busy,
        ),
        storage_options,
    )
    return SaveResponse(begun.staging_completion, cast(Any, begun.upload_completion), begun)


def save(
    state_dict: StateDict,
    checkpoint_id: str | os.PathLike[str],
    *,
    process_group: dist.ProcessGroup | None = None,
    planner: SavePlanner | None = None,
    no_dist: bool = False,
    durable: bool = True,
    engine: Engine | None = None,
    storage_options: StorageOptions = None,
) -> SaveReport:
    """Save a checkpoint of all ranks and return when it is durable.

    Args:
        state_dict: As for `async_save`.
        checkpoint_id: As for `async_save`.
        process_group: As for `async_save`.
        planner: As for `async_save`.
        no_dist: As for `async_save`.
        durable: As for `async_save`.
        engine: As for `async_save`.
        storage_options: As for `async_save`.

    Returns:
        What this rank did and what it cost.

    Raises:
        CheckpointException: A rank failed. The path holds the checkpoint that it held before.
        TypeError, ValueError, StillframeError, Exception: As in `async_save`.
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
        storage_options=storage_options,
    )
    response.upload_completion.result()
    assert response.report is not None
    return response.report


class Saver:
    """The state that a process keeps between calls."""

    def __init__(self) -> None:
        self.birth = ForkGuard("what stillframe.dcp keeps")
        self._groups = Groups()
        self._worker = Worker()
        # Tensors and collectives of saves that have ended. The next call frees them. The thread
        # `sf-dcp` does not, because each free releases the interpreter lock, and while the main
        # thread computes, getting the lock back takes long.
        self._discarded: list[Any] = []
        self._rounds_alone = self._make_round_runner()  # for saves without other ranks
        self._rounds = weakref.WeakKeyDictionary[dist.ProcessGroup, Rounds]()
        self._last: SnapshotSave | None = None  # the save of the last call
        # The next call raises the error of `_last`. False for Lightning, which raises it itself.
        self._raises_last_error = False
        self._stages = Stages()

    def group(
        self, process_group: dist.ProcessGroup | None, no_dist: bool
    ) -> dist.ProcessGroup | None:
        """Return the group for a save's collectives; None if this process saves alone."""
        if no_dist or not is_initialized():
            return None
        if process_group is not None:
            refuse_without_cpu(process_group)
        return self._groups.get_or_create_save_group(process_group)

    def save(
        self,
        state_dict: StateDict,
        target: CheckpointPath,
        request: SaveRequest,
        storage_options: StorageOptions = None,
    ) -> SnapshotSave:
        """Start a save. See `async_save`."""
        entered = time.perf_counter()
        writer = FileSystemWriter(
            target.given,
            durable=request.durable,
            engine=request.engine,
            storage_options=storage_options,
        )
        if not isinstance(state_dict, dict):
            raise TypeError(f"state_dict has to be a dict, not {type(state_dict).__name__}")
        if request.when_busy not in get_args(WhenBusy):
            raise ValueError(f"when_busy has to be 'wait' or 'raise', not {request.when_busy!r}")
        check_booleans(overlap=request.overlap, durable=request.durable)
        if request.when_busy == "raise":
            self._refuse_busy(request.group)
        writer.side_file = request.side_file
        path = target.shown
        save = SnapshotSave(path, target.given, request.on_durable, entered=entered, known_as=path)
        set_mirror(save, request.mirror)
        rounds = self._get_round_runner(request.group)
        work = rounds.begin(target, request, save, writer)
        try:
            self._wait_for_previous_save(work)
            save.record_slot_wait()  # the time until now is the report's `backpressure_s`
            self._discarded.clear()
            self._stage(work, _replace_stateful_values(state_dict))
            completion.thread.start()
            # While the interpreter exits, the save runs inside this call and needs no entry.
            if not completion.thread.drain_is_over:
                work.entry = LogEntry(target.key(follow_link=request.follow_link))
                work.entry.submit()
        except BaseException as error:
            work.tree = error  # makes the round fail on all ranks
            save.error_is_known = True  # the caller gets the error from this call
            raise
        finally:
            self._last = save
            self._raises_last_error = request.error_of is None  # see `SaveRequest`
            # If the state was not copied (`uncopied_if_full`), the caller waits for the end of the
            # save, and this wait counts as a part of the call.
            if work.staged is not None:
                save.record_call_end()
            # Also after an error, because the other ranks wait for this rank to take part.
            rounds.submit(work)
        return save

    def _stage(self, work: Round, state_dict: StateDict) -> None:
        """Copy the state into pool memory, and set `work.staged` and `work.tree`. If the state does
        not fit, raise PoolExhaustedError. But if the request has `uncopied_if_full`, set only
        `work.tree`, to the state itself."""
        request = work.request
        content = None if request.side_file is None else request.side_file.content
        tree = state_dict, content
        stage = functools.partial(
            self._stages.stage, overlap=request.overlap, engine=request.engine
        )
        try:
            try:
                work.staged = stage(tree)
            except TypeError:
                # A snapshot refuses ShardedTensors, but it takes their local tensors.
                without_sharded = replace_sharded_tensors(state_dict)
                if without_sharded is state_dict:
                    raise  # there is no ShardedTensor: the error has another cause
                tree = without_sharded, content
                work.is_taken_apart = True
                work.staged = stage(tree)
        except PoolExhaustedError:
            if not request.uncopied_if_full:
                raise
            work.tree = tree  # the state itself
        else:
            work.tree = work.staged.take_tree_for_own_upload(work.save)

    def _make_round_runner(self) -> Rounds:
        return Rounds(self._worker, self._discarded, self._give_up)

    def _get_round_runner(self, group: dist.ProcessGroup | None) -> Rounds:
        if group is None:
            return self._rounds_alone
        return self._rounds.setdefault(group, self._make_round_runner())

    def _give_up(self, group: dist.ProcessGroup, why: BaseException) -> None:
        """Give up a group in which a collective has failed."""
        self._rounds.pop(group, None)
        self._groups.give_up(group, why)

    def _refuse_busy(self, group: dist.ProcessGroup | None) -> None:
        """Raise BusyError if a save is under way on any rank of the group, or without a group in
        this process. All ranks of the group call this."""
        busy = self._last is not None and not self._last.done()
        if group is not None:
            busy = self._groups.any_rank_votes_true(group, busy)
        if busy:
            raise BusyError(
                "a save is under way: wait for its upload_completion, or give when_busy='wait'"
            )

    def _wait_for_previous_save(self, work: Round) -> None:
        """Wait for the end of the previous save. Raise its error if nobody has seen the error and
        `_raises_last_error` is true."""
        last = self._last
        if last is None:
            return
        wait_for_end(last)
        error = take_uncollected_error(last) if self._raises_last_error else None
        if error is not None:
            work.raises_previous_error = True
            raise error


def _replace_stateful_values(state_dict: StateDict) -> StateDict:
    """Replace each `Stateful` value by its `state_dict()`."""
    return {
        name: value.state_dict() if _is_stateful(value) else value
        for name, value in state_dict.items()
    }


def _is_stateful(value: Any) -> bool:
    # isinstance with a protocol is slow, so common types are excluded first
    is_common = type(value) is dict or isinstance(value, torch.Tensor)
    return not is_common and isinstance(value, Stateful)


_saver = Saver()


def saver_of_this_process() -> Saver:
    """Return the process's Saver. A forked child gets a new Saver: the old one's threads and groups
    are the parent's."""
    global _saver
    if _saver.birth.in_forked_child():
        _saver = Saver()
    return _saver
