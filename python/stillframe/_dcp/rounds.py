"""The saves of a process, one after the other, each together with the other ranks.

A *round* is one save of all ranks of a group. Every call takes part in exactly one round, even if
the call raises:

- If a call could not copy its state, its error fails the round on all ranks.
- If a call raises the error of the previous save, its round saves nothing.

So no rank waits for a rank that has given up. The ranks exchange the numbers of their calls, and
fail if the numbers differ. So no checkpoint mixes the states of different calls.

One thread, `sf-dcp`, runs the rounds:

    called ─▶ staging ─▶ no earlier save uses the directory ─▶ all ranks agree to save
                                                                       │
      ended ◀─ committed at the head of the log ◀─ planned, copied, written (`JointSave`)

If a rank fails in one of these steps, it reports the failure in the next exchange of numbers.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner

from stillframe._base import urls
from stillframe._base.paths import CheckpointPath
from stillframe._base.threads import RunOnceThread
from stillframe._dcp.joint import JointSave, Plans
from stillframe._dcp.ranks import Ranks, group_exists
from stillframe._dcp.shards import restore_sharded_tensors
from stillframe._dcp.side_file import SideFile
from stillframe._dcp.staged import Staged, StateDict
from stillframe._dcp.writer import FileSystemWriter
from stillframe._remote.mirror import MirrorUpload
from stillframe._save import completion
from stillframe._save.engine import Engine
from stillframe._save.options import OnDurable
from stillframe._save.ordered import LogEntry
from stillframe._save.report import SaveReport
from stillframe._snapshot.save import SnapshotSave
from stillframe.errors import StillframeError

log = logging.getLogger("stillframe")

WhenBusy = Literal["wait", "raise"]


class _NotSavedError(StillframeError):
    """Nothing was saved, because a rank's call raised the error of the previous save."""


@dataclass(frozen=True)
class SaveRequest:
    """The arguments of a save; see `async_save`."""

    group: dist.ProcessGroup | None
    planner: SavePlanner | None
    overlap: bool
    durable: bool
    engine: Engine | None
    when_busy: WhenBusy
    # Only Lightning's saves set these:
    side_file: SideFile | None = None  # committed together with the checkpoint
    follow_link: bool = True  # save to the directory that a link names; False: replace the link
    removes_file: bool = False  # this rank removes a file or link at the directory's path
    # If the pool is too small for a copy, write the state itself. The caller must then wait for the
    # end of the save.
    uncopied_if_full: bool = False
    on_durable: OnDurable | None = None  # as for `stillframe.async_save`
    mirror: MirrorUpload | None = None  # the upload to a mirror that follows the save
    # Called with an error and the path; returns the error for the user. With this function, the
    # caller raises the save's error, and the next save does not.
    error_of: Callable[[BaseException, str], BaseException] | None = None


@dataclass
class Round:
    """One round, as this rank sees it. `group`, `tree` and `staged` are None after the end.

    Attributes:
        tree: The copies of the state dict and of the side file's content, which may not be complete
            yet; or the exception that has prevented the copy.
    """

    number: int  # of this call: the process counts its calls for the group from 1
    target: CheckpointPath
    request: SaveRequest
    save: SnapshotSave
    writer: FileSystemWriter
    group: dist.ProcessGroup | None  # None if this process saves alone
    tree: tuple[StateDict, Any] | BaseException | None = None
    staged: Staged | None = None  # the memory of the copy; None without a copy
    entry: LogEntry | None = None  # None when the interpreter exits
    is_taken_apart: bool = False  # the tree has no ShardedTensors but their local tensors
    raises_previous_error: bool = False  # so this round saves nothing

    def wait(self) -> None:
        """Wait until the bytes of the tree's tensors are copied. Raise the error of a copy that
        failed."""
        if self.staged is not None:
            try:
                self.staged.wait_until_copied()
            finally:
                # Also after an error, so that a thread that waits for the staging gets the error.
                self.save.record_copied()

    def wait_to_write(self) -> None:
        """Wait until no earlier entry of the log concerns the directory. With `removes_file`, then
        remove a file or link at the directory's path."""
        if self.entry is not None:
            self.entry.wait_to_write()
        path = self.target.name
        if self.request.removes_file and (os.path.islink(path) or os.path.isfile(path)):
            if self.entry is not None:
                self.entry.wait_to_commit()  # until then the file may be the only checkpoint
            os.unlink(path)

    def report(self) -> SaveReport:
        """Return the report of this rank's part of a save that has succeeded."""
        files = self.writer.reports()
        nbytes = sum(file.nbytes for file in files)
        io_mode = files[0].io_mode if files else self.writer.location.io_mode
        return self.save.report(
            nbytes,
            io_mode,
            fallbacks=[line for file in files for line in file.fallbacks],
            more_pool_bytes=max((file.peak_pool_bytes for file in files), default=0),
        )


class _ExchangedNumbers(NamedTuple):
    """The numbers that each rank sends to the others before a save."""

    number: int  # of the rank's call
    raises_previous_error: bool  # the rank's call raises the error of the previous save
    failed: bool  # the rank cannot save
    plan_number: int  # of the save whose plan the rank still has; 0 without a plan
    # Every item has the same offset and length as in the last save with that plan.
    has_same_ranges: bool
    files_id: int  # the id in the names of the rank's files
    target: int  # identifies the path


class Worker:
    """The daemon thread that runs the rounds of all groups, one at a time. The interpreter's exit
    waits for saves that have an entry in the log."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread = RunOnceThread(self._loop, "sf-dcp")

    def run_on_thread(self, function: Callable[[], object]) -> None:
        """Run the function on the thread, or here while the interpreter exits."""
        if completion.thread.drain_is_over or not self._thread.start():
            function()
        else:
            self._waiting.put(function)

    def _loop(self) -> None:
        while True:
            # Called without a variable, which would keep the round alive.
            self._waiting.get()()


class Rounds:
    """The rounds of one group in this process. The group is referenced only during a round.

    Args:
        discarded: Receives objects that are no longer needed, such as the tensors of copies.
        give_up: Called with a group in which a collective has failed, and the error.
    """

    def __init__(
        self,
        worker: Worker,
        discarded: list[Any],
        give_up: Callable[[dist.ProcessGroup, BaseException], object],
    ) -> None:
        self._calls = 0  # how many rounds have begun
        self._plans = Plans()
        self._ranks: Ranks | None = None
        self._worker = worker
        self._discarded = discarded
        self._give_up = give_up

    def begin(
        self,
        target: CheckpointPath,
        request: SaveRequest,
        save: SnapshotSave,
        writer: FileSystemWriter,
    ) -> Round:
        """Begin a round. The caller must submit it, even after an error."""
        self._calls += 1
        return Round(self._calls, target, request, save, writer, request.group)

    def submit(self, work: Round) -> None:
        """Have the worker run the round."""
        work.save.begin()  # keeps the save alive until its end
        self._worker.run_on_thread(functools.partial(self._run, work))

    def _run(self, work: Round) -> None:
        """Make the save, and end its handle with the result or the error."""
        metadata: Metadata | None = None
        report: SaveReport | None = None
        failure: BaseException | None = None
        try:
            metadata = self._save(work)
            report = work.report()
        except BaseException as error:  # CheckpointException is no Exception
            # without the traceback, whose frames would keep the tree alive
            failure = self._try_clean_up(work, error.with_traceback(None))
        try:
            if work.staged is not None:
                # The next call frees the emptied tensors.
                self._discarded.extend(work.staged.release_after_upload())
        except BaseException as error:
            failure = failure or error
        # The user may free the state and destroy the group when the save ends.
        work.tree = work.group = work.staged = None
        if self._ranks is not None:
            self._ranks.drop_group()
        if work.request.side_file is not None:
            work.request.side_file.content = None
        if failure is not None:
            metadata = report = None
            if work.request.error_of is not None:
                failure = work.request.error_of(failure, work.target.shown)
        work.save.end(report, failure, value=metadata, entry=work.entry)

    def _try_clean_up(self, work: Round, failure: BaseException) -> BaseException:
        """Clean up and return the error for the user. Log an error of the cleaning itself, because
        the save must end."""
        try:
            return self._clean_up(work, failure)
        except Exception:
            log.exception(
                "stillframe: something is left of the failed save of %s", work.target.shown
            )
            return failure

    def _clean_up(self, work: Round, failure: BaseException) -> BaseException:
        """Remove the failed save's files, give up a broken group, and return the user's error."""
        if isinstance(failure, CheckpointException):
            work.writer.abandon()  # every rank knows that there was no commit
        group = work.group
        work.group = self._ranks = None
        self._discarded.clear()  # collectives in it keep the group's connections open
        # All ranks get errors of these classes. After any other error, which may be this rank's
        # alone, other ranks may be waiting in the group.
        all_ranks_have_failed = isinstance(failure, (CheckpointException, StillframeError))
        if group is not None and not all_ranks_have_failed:
            if not group_exists(group):
                why = failure
                failure = StillframeError(
                    f"the process group was destroyed while the save of {work.target.shown} was"
                    " under way: wait for its upload_completion before destroy_process_group()"
                )
                failure.__cause__ = why
            self._give_up(group, failure)
        if isinstance(failure, _NotSavedError):
            work.save.error_is_known = True  # so the next call does not raise this error
            if not work.raises_previous_error:  # only calls of other ranks have raised an error
                log.error("stillframe: %s: %s", work.target.shown, failure)
        return failure

    def _save(self, work: Round) -> Metadata:
        """Make the save together with the other ranks, and return the checkpoint's metadata."""
        writer = work.writer
        if self._ranks is None:
            self._ranks = Ranks(work.group, self._discarded)
        ranks = self._ranks
        ranks.use_group(work.group)
        planner = work.request.planner
        joint = JointSave(ranks, self._plans, work.number, writer, planner, work.wait)

        # Not raised here, because the call raises the same object on another thread, and both
        # threads would add their frames to its traceback.
        failure = work.tree if isinstance(work.tree, BaseException) else None
        plan_number, has_same_ranges = 0, False  # this rank has no plan to use again
        if failure is None:
            try:
                plan_number, has_same_ranges = joint.prepare(_unpack_copied_state(work))
            except BaseException as error:
                failure = error
        try:
            work.wait_to_write()  # before the ranks agree, so that no rank writes too early
        except BaseException as error:
            failure = failure or error
        if work.entry is not None:
            writer.before_commit = work.entry.wait_to_commit

        target = _hash_path_to_int(work.target.name)
        ours = _ExchangedNumbers(
            number=work.number,
            raises_previous_error=work.raises_previous_error,
            failed=failure is not None,
            plan_number=plan_number,
            has_same_ranges=has_same_ranges,
            files_id=writer.files_id,
            target=target,
        )
        all_ranks = [_ExchangedNumbers._make(row) for row in ranks.exchange(*ours)]
        _raise_if_ranks_disagree(all_ranks, urls.shown(work.target.name), target)
        if any(each.failed for each in all_ranks):
            ranks.raise_errors_of_all_ranks("plan", failure)

        same_number = all(each.plan_number == plan_number for each in all_ranks)
        has_common_plan = plan_number != 0 and same_number
        return joint.save(
            has_common_plan=has_common_plan,
            has_same_ranges=has_common_plan and all(each.has_same_ranges for each in all_ranks),
            files_ids=[each.files_id for each in all_ranks],
        )


def _unpack_copied_state(work: Round) -> StateDict:
    """Return the copy of the state dict, which may not be complete yet. Give the other copy to the
    side file."""
    assert isinstance(work.tree, tuple)
    tree, content = work.tree
    if work.request.side_file is not None:
        work.request.side_file.content = content
    together: StateDict = restore_sharded_tensors(tree) if work.is_taken_apart else tree
    return together


def _hash_path_to_int(target: str) -> int:
    """Return a number that identifies a path and fits into an int64."""
    digest = hashlib.blake2b(os.fsencode(target), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def _raise_if_ranks_disagree(all_ranks: list[_ExchangedNumbers], path: str, target: int) -> None:
    """Raise StillframeError, on all ranks, if the ranks do not make the same save, or if the call
    of a rank has raised."""
    numbers = [each.number for each in all_ranks]
    if len({*numbers}) > 1:
        raise StillframeError(
            "not all ranks are at the same call of stillframe.dcp.async_save and save: they"
            f" are at {numbers}, in the order of their ranks. Every rank has to make every call"
        )
    if any(each.raises_previous_error for each in all_ranks):
        raise _NotSavedError(
            f"nothing was saved: the error of the save before was raised on the ranks"
            f" {[rank for rank, each in enumerate(all_ranks) if each.raises_previous_error]} first"
        )
    others = [rank for rank, each in enumerate(all_ranks) if each.target != target]
    if others:
        raise StillframeError(
            f"not all ranks save to the same path: this one to {path}, and the ranks {others}"
            " elsewhere. Every rank has to make every call, in the same order"
        )
