"""One save after the other, on all ranks the same one.

Every call takes part in exactly one save of its group, also a call that raises. Where it could not
copy its state it takes part with that error, which all ranks get. Where it raises the error of the
save before, nobody saves: the others have raised it too, or have seen it before. So no rank waits
for one that has given up, and none saves its state beside another call's of the rest. A number of
the call goes round with the first collective; ranks that differ in it all fail.

One thread runs the rounds. Nothing of DCP that is not public is leaned on; what is remote goes
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
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save

from stillframe._base.paths import Place
from stillframe._dcp.beside import Beside
from stillframe._dcp.joint import JointSave, Plans
from stillframe._dcp.ranks import Ranks, is_there
from stillframe._dcp.shards import put_together
from stillframe._dcp.staged import Staged, StateDict
from stillframe._dcp.writer import FileSystemWriter
from stillframe._save import completion
from stillframe._save.engine import Engine
from stillframe._save.options import OnDurable
from stillframe._save.ordered import Turn
from stillframe._save.report import SaveReport
from stillframe._snapshot.save import SnapshotSave
from stillframe.errors import StillframeError

log = logging.getLogger("stillframe")

WhenBusy = Literal["wait", "raise"]


class _NotSavedError(StillframeError):
    """A rank's call raised the error of the save before."""


class _GroupIsGoneError(Exception):
    """The user has destroyed it."""


@dataclass(frozen=True)
class Asked:
    """How a save is asked for; see `async_save`. The rest is for saves of Lightning's.

    Attributes:
        beside: This rank's file that the checkpoint is committed with.
        follow_link: Save to what a link names, and not in its place.
        makes_way: This rank removes the file or link that stands where the directory goes.
        live_if_full: A state that no pool is large enough for is saved as it is. Who asked has to
            wait for the end then.
        on_durable: As for `stillframe.async_save`.
        error_of: What the user gets of an error, with the path. The next save does not raise it:
            who asked does.
    """

    group: dist.ProcessGroup | None
    planner: SavePlanner | None
    overlap: bool
    durable: bool
    engine: Engine | None
    when_busy: WhenBusy
    beside: Beside | None = None
    follow_link: bool = True
    makes_way: bool = False
    live_if_full: bool = False
    on_durable: OnDurable | None = None
    error_of: Callable[[BaseException, str], BaseException] | None = None


@dataclass
class Round:
    """What one call wants saved.

    Attributes:
        save: Its handle.
        writer: None where DCP is to choose one by the path.
        tree: The copy of the state dict, and of what stands beside it, whose bytes need not be
            there yet; or the exception that it has none for.
        staged: Its memory; None where there is no copy.
        group: None where this process saves alone.
        turn: Its place in the order of other saves; None where nothing else is under way any more.
        is_apart: ShardedTensors of the state dict were taken apart for the copying.
        raised: The call raises the error of the save before.
    """

    number: int
    place: Place
    asked: Asked
    save: SnapshotSave
    writer: FileSystemWriter | None
    group: dist.ProcessGroup | None
    tree: tuple[StateDict, Any] | BaseException | None = None
    staged: Staged | None = None
    turn: Turn | None = None
    is_apart: bool = False
    raised: bool = False

    def wait(self) -> None:
        """Returns when the bytes of the tree's tensors are there.

        Raises:
            TornSnapshotError, StillframeError: They will not be.
        """
        if self.staged is not None:
            try:
                self.staged.wait_until_copied()
            finally:
                self.save.copied()  # who waits for that hears the copy's own error

    def wait_for_turn(self) -> None:
        """Returns when nothing in front of it has to do with the directory any more.

        Raises:
            OSError: What stands in the way cannot be removed.
        """
        if self.turn is not None:
            self.turn.wait_to_write()
        path = self.place.name
        if self.asked.makes_way and (os.path.islink(path) or os.path.isfile(path)):
            if self.turn is not None:
                self.turn.wait_to_commit()  # until then it may be all that there is
            os.unlink(path)

    def report(self) -> SaveReport:
        if self.writer is None:
            nbytes = 0 if self.staged is None else self.staged.nbytes
            return self.save.report(nbytes, "fsspec")
        files = self.writer.reports()
        return self.save.report(
            sum(file.nbytes for file in files),
            files[0].io_mode if files else "buffered",
            fallbacks=[line for file in files for line in file.fallbacks],
            more_pool_bytes=max((file.peak_pool_bytes for file in files), default=0),
        )


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
    """Those of one process over one group, which it does not keep.

    Args:
        spent: Gets what nobody needs any more, the tensors of copies among it.
        give_up: Called with a group in which a collective has failed.
    """

    def __init__(
        self,
        worker: Worker,
        spent: list[Any],
        give_up: Callable[[dist.ProcessGroup, BaseException], object],
    ) -> None:
        self._calls = 0
        self._plans = Plans()
        self._ranks: Ranks | None = None
        self._worker = worker
        self._spent = spent
        self._give_up = give_up

    def next(
        self, place: Place, asked: Asked, save: SnapshotSave, writer: FileSystemWriter | None
    ) -> Round:
        """What a call begins with. It has to be submitted, whatever happens."""
        self._calls += 1
        return Round(self._calls, place, asked, save, writer, asked.group)

    def submit(self, work: Round) -> None:
        work.save.begin()
        self._worker.put(functools.partial(self._run, work))

    def _run(self, work: Round) -> None:
        metadata: Metadata | None = None
        report: SaveReport | None = None
        failure: BaseException | None = None
        try:
            metadata = self._save(work)
            report = work.report()
        except BaseException as error:
            # CheckpointException is no Exception. Its frames hold the tree.
            failure = self._cleaned_up(work, error.with_traceback(None))
        try:
            if work.staged is not None:
                self._spent.extend(work.staged.upload_ended())
        except BaseException as error:
            failure = failure or error
        work.tree = work.group = work.staged = None
        if self._ranks is not None:
            self._ranks.rest()
        if work.asked.beside is not None:
            work.asked.beside.content = None
        if failure is not None:
            metadata = report = None
            if work.asked.error_of is not None:
                failure = work.asked.error_of(failure, work.place.text)
        work.save.end(report, failure, value=metadata, turn=work.turn)

    def _cleaned_up(self, work: Round, failure: BaseException) -> BaseException:
        """Whatever goes wrong here, the save ends: somebody waits for it."""
        try:
            return self._clean_up(work, failure)
        except Exception:
            log.exception("stillframe: something is left of the failed save of %s", work.place.text)
            return failure

    def _clean_up(self, work: Round, failure: BaseException) -> BaseException:
        """Returns what the user gets."""
        if isinstance(failure, CheckpointException) and work.writer is not None:
            work.writer.abandon()  # the coordinator has said that there is no commit
        group, work.group, self._ranks = work.group, None, None
        self._spent.clear()
        known = isinstance(failure, (CheckpointException, StillframeError))  # to all ranks
        of_dcp = work.writer is None and isinstance(failure, CheckpointException)
        if group is not None and (of_dcp or not known) and not is_there(group):
            why = failure
            failure = StillframeError(
                f"the process group was destroyed while the save of {work.place.text} was under"
                " way: wait for its upload_completion before destroy_process_group()"
            )
            failure.__cause__ = why
        if group is not None and not known:
            self._give_up(group, failure)
        if isinstance(failure, _NotSavedError):
            work.save.told = True  # or its error would keep the next call from saving, and so on
            if not work.raised:
                log.error("stillframe: %s: %s", work.place.text, failure)
        return failure

    def _save(self, work: Round) -> Metadata:
        ranks, writer = self._ranks or Ranks(work.group, self._spent), work.writer
        self._ranks = ranks
        ranks.go_on(work.group)
        joint: JointSave | None = None
        if writer is not None:
            planner = work.asked.planner
            joint = JointSave(ranks, self._plans, work.number, writer, planner, work.wait)
        tree: StateDict = {}
        failure: BaseException | None = None
        kept, is_same = 0, False
        try:
            tree = _copy_of(work)
            if joint is None:
                work.wait()
            else:
                kept, is_same = joint.prepare(tree)
        except BaseException as error:
            failure = error
        try:
            work.wait_for_turn()  # all ranks have, once they agree
        except BaseException as error:
            failure = failure or error
        if work.turn is not None and writer is not None:
            writer.before_commit = work.turn.wait_to_commit
        files_id = 0 if writer is None else writer.files_id
        failed, place = failure is not None, _number_of(work.place.name)
        rows = ranks.words(work.number, work.raised, failed, kept, is_same, files_id, place)
        _refuse_to_save(rows, work.place.name, place)
        if any(row[2] for row in rows):
            ranks.refuse("plan", failure)
        if joint is None:
            return _save_remotely(tree, work)
        return joint.save(
            is_planned=all(row[3] == kept != 0 for row in rows),
            is_same=all(row[3] == kept != 0 and row[4] for row in rows),
            files_ids=[row[5] for row in rows],
        )


def _save_remotely(tree: StateDict, work: Round) -> Metadata:
    """Where the group has been destroyed, DCP takes this rank for the only one: each would save
    its own part as the whole."""
    _look_for(work.group)
    saved: Metadata = save(
        tree,
        checkpoint_id=work.place.text,
        planner=work.asked.planner,
        process_group=work.group,
        no_dist=work.group is None,
    )
    _look_for(work.group)
    return saved


def _copy_of(work: Round) -> StateDict:
    """The state dict's copy, which may be under way yet."""
    assert work.tree is not None
    if isinstance(work.tree, BaseException):
        raise work.tree
    tree, content = work.tree
    if work.asked.beside is not None:
        work.asked.beside.content = content
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
