"""One save after the other, on all ranks the same one.

Every call takes part in exactly one save of its group, also a call that raises. Where it could not
copy its state it takes part with that error, which all ranks get. Where it raises the error of the
save before, nobody saves: the others have raised it too, or have seen it before. So no rank waits
for one that has given up, and none saves its state beside another call's of the rest. A number of
the call goes round with the first collective; ranks that differ in it all fail.

A round is run by one thread. Nothing of DCP that is not public is leaned on; what is remote goes
through DCP's own `save`.

    called ──▶ staging ──▶ its turn to write ──▶ agreed ──▶ planned, copied, written (`JointSave`)
       │                                                          its turn to commit ──▶ ended
       └───────── an error goes along to where the others are ──────────┘
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save

from stillframe._dcp.beside import Beside
from stillframe._dcp.groups import is_there
from stillframe._dcp.joint import JointSave
from stillframe._dcp.kept import Plans
from stillframe._dcp.ranks import Ranks
from stillframe._dcp.shards import put_together
from stillframe._dcp.staged import Staged, StateDict
from stillframe._dcp.turn import Turn
from stillframe._dcp.writer import FileSystemWriter
from stillframe._save import completion
from stillframe._save.outcome import CallingLater, Failure
from stillframe.errors import StillframeError

log = logging.getLogger("stillframe")


# The state dict, and what `Beside` writes.
Copied = tuple[StateDict, Any]


class _NotSavedError(StillframeError):
    """A rank's call raised the error of the save before."""


class _GroupIsGoneError(Exception):
    """The user has destroyed it."""


class Upload(CallingLater):
    """The end of one round on this rank, which nobody can cancel. Notes whether somebody has seen
    its error; those who look at all saves of the process see it as they see a handle.

    Attributes:
        seen: Whoever made it knows its error before it ends.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self.path = path
        self.seen = False
        self._failure: Failure | None = None
        self._number = next(completion.numbers)

    @property
    def state(self) -> str:
        if not self.done():
            return "writing"
        return "durable" if super().exception() is None else "failed"

    def begin(self) -> None:
        """It is under way from here on, whoever holds it."""
        completion.in_flight[self._number] = self

    def end(
        self, metadata: Metadata | None, error: BaseException | None, turn: Turn | None
    ) -> None:
        """What waits behind it hears of it first, and no sooner than its error can be had."""
        if error is not None and not self.seen:
            self._failure = Failure(error)
        if turn is not None:
            turn.end(error is None)
        completion.in_flight.pop(self._number, None)
        if error is None:
            self.set_result(metadata)
        else:
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> Metadata | None:
        try:
            found: Metadata | None = super().result(timeout)
            return found
        finally:
            if self.done():
                self._collect()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self._collect()
        return error

    def unseen_error(self) -> BaseException | None:
        """Waits for the end; the error, if nobody has seen it. It counts as seen from now on."""
        error = super().exception()
        seen = self._failure is None or self._failure.collected
        self._collect()
        return None if seen else error

    def _collect(self) -> None:
        if self._failure is not None:
            self._failure.collect()

    def __del__(self) -> None:
        if self._failure is not None:
            self._failure.dropped(self.path)


@dataclass
class Round:
    """What one call wants saved.

    Attributes:
        tree: The copy of the state dict, and of what stands beside it, whose bytes need not be
            there yet; or the exception that it has none for.
        staged: Its memory; None where there is no copy.
        writer: None where DCP is to choose one by the path.
        planner: The user's own.
        group: None where this process saves alone.
        place: The path as all ranks have to have it.
        turn: Its place in the order of other saves; None where nothing else is under way any more.
        begins: Done when this rank may begin, for who has given it a place there; else None.
        beside: This rank's file that the checkpoint is committed with.
        is_apart: ShardedTensors of the state dict were taken apart for the copying.
        raised: The call raises the error of the save before.
        spent: Gets what nobody needs any more, the tensors of the copy among it.
        ended_well: Called before anybody hears of the end.
        give_up: Called with a group in which a collective has failed.
    """

    number: int
    path: str
    tree: Copied | BaseException | None
    staged: Staged | None
    writer: FileSystemWriter | None
    planner: SavePlanner | None
    group: dist.ProcessGroup | None
    upload: Upload
    place: str
    turn: Turn | None = None
    begins: Future[None] | None = None
    beside: Beside | None = None
    is_apart: bool = False
    raised: bool = False
    spent: list[Any] = field(default_factory=list)
    ended_well: Callable[[], object] = int
    give_up: Callable[[dist.ProcessGroup, BaseException], object] | None = None

    def wait(self) -> None:
        """Returns when the bytes of the tree's tensors are there.

        Raises:
            TornSnapshotError, StillframeError: They will not be.
        """
        if self.staged is not None:
            self.staged.wait_until_copied()


class Worker:
    """The thread that runs a process's rounds, whichever group they are of: one at a time is under
    way. It ends with the process; the exit waits for what has a turn."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, function: Callable[[], object]) -> None:
        """Where it is too late for a thread, the function runs here."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="sf-dcp", daemon=True)
        if completion.completion.over or not completion.start_once(self._thread):
            function()
        else:
            self._waiting.put(function)

    def _loop(self) -> None:
        while True:
            self._waiting.get()()


class Rounds:
    """Those of one process over one group, which it does not keep."""

    def __init__(self, worker: Worker) -> None:
        self._calls = 0
        self._plans = Plans()
        self._ranks: Ranks | None = None
        self._worker = worker

    def next(
        self,
        path: str,
        writer: FileSystemWriter | None,
        planner: SavePlanner | None,
        group: dist.ProcessGroup | None,
        upload: Upload,
    ) -> Round:
        """What a call begins with. It has to be submitted, whatever happens."""
        self._calls += 1
        place = path if writer is None else writer.directory
        return Round(self._calls, path, None, None, writer, planner, group, upload, place)

    def submit(self, work: Round) -> None:
        work.upload.begin()
        self._worker.put(functools.partial(self._run, work))

    def _run(self, work: Round) -> None:
        metadata: Metadata | None = None
        failure: BaseException | None = None
        try:
            metadata = self._save(work)
            work.ended_well()
        except BaseException as error:
            # CheckpointException is no Exception. Its frames hold the tree.
            failure = self._cleaned_up(work, error.with_traceback(None))
        try:
            if work.staged is not None:
                work.spent.extend(work.staged.upload_ended())
        except BaseException as error:
            failure = failure or error
        work.tree = work.group = None
        if self._ranks is not None:
            self._ranks.rest()
        if work.beside is not None:
            work.beside.content = None
        work.upload.end(metadata, failure, work.turn)

    def _cleaned_up(self, work: Round, failure: BaseException) -> BaseException:
        """Whatever goes wrong here, the save ends: somebody waits for it."""
        try:
            return self._clean_up(work, failure)
        except Exception:
            log.exception("stillframe: something is left of the failed save of %s", work.path)
            return failure

    def _clean_up(self, work: Round, failure: BaseException) -> BaseException:
        """Returns what the user gets."""
        if isinstance(failure, CheckpointException) and work.writer is not None:
            work.writer.abandon()  # the coordinator has said that there is no commit
        group, work.group, self._ranks = work.group, None, None
        work.spent.clear()
        known = isinstance(failure, (CheckpointException, StillframeError))  # to all ranks
        of_dcp = work.writer is None and isinstance(failure, CheckpointException)
        if group is not None and (of_dcp or not known) and not is_there(group):
            why = failure
            failure = StillframeError(
                f"the process group was destroyed while the save of {work.path} was under way:"
                " wait for its upload_completion before destroy_process_group()"
            )
            failure.__cause__ = why
        if group is not None and work.give_up is not None and not known:
            work.give_up(group, failure)
        if isinstance(failure, _NotSavedError):
            work.upload.seen = True  # or its error would keep the next call from saving, and so on
            if not work.raised:
                log.error("stillframe: %s: %s", work.path, failure)
        return failure

    def _save(self, work: Round) -> Metadata:
        ranks, writer = self._ranks or Ranks(work.group, work.spent), work.writer
        self._ranks = ranks
        ranks.go_on(work.group)
        joint: JointSave | None = None
        if writer is not None:
            joint = JointSave(ranks, self._plans, work.number, writer, work.planner, work.wait)
        tree: StateDict = {}
        failure: BaseException | None = None
        kept, is_same = 0, False
        try:
            if work.begins is not None:
                work.begins.result()
            tree = self._begin(work)
            if joint is None:
                work.wait()
            else:
                kept, is_same = joint.prepare(tree)
        except BaseException as error:
            failure = error
        if work.turn is not None:
            work.turn.wait_to_write()  # all ranks have, once they agree
            if writer is not None:
                writer.before_commit = work.turn.wait_to_commit
        files_id = 0 if writer is None else writer.files_id
        failed, place = failure is not None, _number_of(work.place)
        rows = ranks.words(work.number, work.raised, failed, kept, is_same, files_id, place)
        _refuse_to_save(rows, work.place, place)
        if any(row[2] for row in rows):
            ranks.refuse("plan", failure)
        if joint is None:
            return self._save_remotely(tree, work)
        return joint.save(
            is_planned=all(row[3] == kept != 0 for row in rows),
            is_same=all(row[3] == kept != 0 and row[4] for row in rows),
            files_ids=[row[5] for row in rows],
        )

    def _save_remotely(self, tree: StateDict, work: Round) -> Metadata:
        """Where the group has been destroyed, DCP takes this rank for the only one: each would save
        its own part as the whole."""
        _look_for(work.group)
        saved: Metadata = save(
            tree,
            checkpoint_id=work.path,
            planner=work.planner,
            process_group=work.group,
            no_dist=work.group is None,
        )
        _look_for(work.group)
        return saved

    def _begin(self, work: Round) -> StateDict:
        """The state dict's copy, which may be under way yet."""
        assert work.tree is not None
        if isinstance(work.tree, BaseException):
            raise work.tree
        tree, content = work.tree
        if work.beside is not None:
            work.beside.content = content
        together: StateDict = put_together(tree) if work.is_apart else tree
        return together


def _look_for(group: dist.ProcessGroup | None) -> None:
    if group is not None and not is_there(group):
        raise _GroupIsGoneError


def _number_of(place: str) -> int:
    """One that other places do not have."""
    return int.from_bytes(hashlib.blake2b(os.fsencode(place), digest_size=7).digest(), "little")


def _refuse_to_save(rows: list[list[int]], path: str, place: int) -> None:
    """
    Raises:
        StillframeError: The ranks are at different calls, or one of them has raised: on all.
    """
    numbers = [row[0] for row in rows]
    if len({*numbers}) > 1:
        raise StillframeError(
            "not all ranks are at the same call of stillframe.dcp.async_save and save: they"
            f" are at {numbers}, in the order of their ranks. Every rank has to make every call"
        )
    if any(row[1] for row in rows):
        raise _NotSavedError(
            f"nothing was saved: the error of the save before was raised on the ranks"
            f" {[rank for rank, row in enumerate(rows) if row[1]]} first"
        )
    others = [rank for rank, row in enumerate(rows) if row[6] != place]
    if others:
        raise StillframeError(
            f"not all ranks save to the same path: this one to {path}, and the ranks {others}"
            " elsewhere. Every rank has to make every call, in the same order"
        )
