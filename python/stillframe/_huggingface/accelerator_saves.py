"""The saves of one Accelerator on several ranks.

One rank, the leader, opens the directory and removes old checkpoints. The other ranks write into
the leader's directory. Their handles ask the leader how the save has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

from accelerate import Accelerator

from stillframe._huggingface.ranks import (
    LeaderDirectoryWriter,
    Ranks,
    lead,
    ranks_sharing_directory,
)
from stillframe._save import api
from stillframe._save.handle import Deadline, SaveHandle, State, error_of
from stillframe.errors import StillframeError

_CHECKPOINT_NAME = re.compile(r"checkpoint_(\d+)")
# Every rank writes files with these names. Only the leader's files are kept.
_LEADERS_FILES = re.compile(r"scaler\.pt|dl_state_dict(_\d+)?\.bin")
_POLL_S = 0.01  # how often another rank asks the leader whether a save has ended


class Saves:
    """The saves of one Accelerator on one rank."""

    def __init__(self, accelerator: Accelerator) -> None:
        arguments = SimpleNamespace(
            world_size=accelerator.num_processes,
            process_index=accelerator.process_index,
            local_process_index=accelerator.local_process_index,
            save_on_each_node=False,
        )
        # `_all` are all ranks, `_ranks` those that write into the same directory. Both are None for
        # a single process.
        self._all = self._ranks = ranks_sharing_directory(arguments)
        if accelerator.project_configuration.save_on_each_node:
            arguments.save_on_each_node = True
            self._ranks = ranks_sharing_directory(arguments)
        self._is_on_other_machine = arguments.process_index != arguments.local_process_index
        self._number = 0  # the number of the last call, the same on all ranks
        self._in_flight: list[SaveHandle] = []  # on the leader, oldest first
        self.is_leader = self._ranks is None or self._ranks.is_leader

    def share(self, wait: Callable[[], str], find: Callable[[], str]) -> str:
        """Return the result of `find()` on rank 0 to all ranks. If each machine has a leader, each
        leader calls `wait()` first."""
        self._number += 1
        key = f"load/{self._number}"
        if self._ranks is None or self._all is None:
            return find()
        if self._ranks is not self._all:  # each machine has a leader
            self._ranks.share(key, wait)
        return self._all.share(key, find)

    def save(
        self,
        path: str,
        open_directory: Callable[[], AbstractContextManager[Any]],
        write: Callable[[Any], object],
    ) -> SaveHandle:
        """Let all ranks write into one directory; return the handle of the save.

        Args:
            open_directory: Called on the leader; returns a context manager that opens the
                directory `path`.
            write: Called on each rank with the open checkpoint.
        """
        self._number += 1
        ranks, number = self._ranks, self._number  # the number is the same on all ranks
        if ranks is not None and not ranks.is_leader:
            with ranks.follow(number, path) as directory:
                write(_FilteredLeaderDirectory(directory, durable=self._is_on_other_machine))
            return FollowerSaveHandle(path, ranks, number)

        self._in_flight = [each for each in self._in_flight if not each.done()]
        files: Any = None
        try:
            with contextlib.ExitStack() as stack:

                def open_checkpoint() -> str:
                    nonlocal files
                    files = stack.enter_context(open_directory())
                    directory: str = files.path
                    return directory

                stack.enter_context(lead(ranks, number, open_checkpoint))
                write(files)
        except BaseException as error:
            self._report_once_saves_ended(number, handle=None, failed=error)
            raise

        handle: SaveHandle = files.handle
        if handle.state != "skipped":
            self._in_flight.append(handle)
        self._report_once_saves_ended(number, handle)
        return handle

    def _report_once_saves_ended(
        self, number: int, handle: SaveHandle | None, failed: BaseException | None = None
    ) -> None:
        """Tell the other ranks how save `number` ended, once all saves in flight have ended. If the
        call failed, `failed` is its error and `handle` is None."""
        ranks = self._ranks
        if ranks is None:
            return

        def report(_handle: object = None) -> None:
            error = failed if handle is None else error_of(handle)
            is_skipped = handle is not None and handle.state == "skipped"
            ranks.report_ended(number, None if error is None else str(error), is_skipped=is_skipped)

        if self._in_flight:  # the newest save ends last
            self._in_flight[-1].add_done_callback(report)
        else:
            report()

    def rotate(self, path: str, limit: int | None) -> None:
        """Remove the oldest checkpoints next to `path`, so that `limit` remain; None removes none.

        The removes run after the save to `path`, and only if that save became durable.
        """
        if limit is None:
            return
        directory, new = os.path.split(path)
        # The directory of a save in flight does not exist yet.
        names = {*os.listdir(directory), *(os.path.basename(each.path) for each in self._in_flight)}
        old: dict[int, str] = {}  # names by number
        for name in names - {new}:
            matched = _CHECKPOINT_NAME.fullmatch(name)
            if matched and api.exists(os.path.join(directory, name)):
                old[int(matched[1])] = name
        total = len(old) + 1  # with the new checkpoint
        excess = max(0, total - limit)
        for number in sorted(old)[:excess]:
            api.remove(os.path.join(directory, old[number]))


_saves: weakref.WeakKeyDictionary[Accelerator, Saves] = weakref.WeakKeyDictionary()


def get_or_create_saves(accelerator: Accelerator) -> Saves:
    if accelerator not in _saves:
        _saves[accelerator] = Saves(accelerator)
    return _saves[accelerator]


class _FilteredLeaderDirectory(LeaderDirectoryWriter):
    """The leader's directory, for another rank. It skips files that only the leader writes."""

    def save(self, obj: object, name: str) -> None:
        if not _LEADERS_FILES.fullmatch(name):
            super().save(obj, name)


# ---- handles of the other ranks ----

_exiting = threading.Event()
_followers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def _stop_follower_threads() -> None:
    """End the threads of `FollowerSaveHandle`. A thread that is still asking the process group's
    store when the interpreter ends would abort the process."""
    _exiting.set()
    for thread in list(_followers):
        thread.join()


atexit.register(_stop_follower_threads)


class FollowerSaveHandle(SaveHandle):
    """The handle of a save on a rank that is not the leader. A thread waits for the save's end."""

    def __init__(self, path: str, ranks: Ranks, number: int) -> None:
        super().__init__(path, path)
        self._outcome.cancellable = False  # only the leader can cancel the save
        self._ranks, self._number = ranks, number
        self._is_skipped = False
        self._ended = threading.Event()
        thread = threading.Thread(
            target=self._wait_for_leaders_result, name="sf-follow", daemon=True
        )
        _followers.add(thread)
        thread.start()

    @property
    def state(self) -> State:
        self._birth.refuse_forked_child()
        if not self._outcome.settled:
            return "writing"
        if self._is_skipped:
            return "skipped"
        return "durable" if self._outcome.error is None else "failed"

    def _is_staged(self) -> bool:
        return True  # because this rank's files were written in the call

    def _wait_until_ended(self, deadline: Deadline) -> None:
        self._birth.refuse_forked_child()
        if not self._ended.wait(deadline.left()):
            raise self._timeout_error(deadline, "durable")

    def _wait_for_leaders_result(self) -> None:
        error: Exception | None
        try:
            while not self._ranks.has_ended(self._number):
                if _exiting.wait(_POLL_S):
                    raise StillframeError("the interpreter is exiting")
            error = self._ranks.error_of(self._number)
            self._is_skipped = self._ranks.was_skipped(self._number)
        except Exception as lost:  # the process that has the store is gone
            error = StillframeError(
                f"the rank that saves {self._path} did not tell how the save ended: {lost}"
            )
        # `is_known`: the leader's process reports the error.
        self._outcome.settle(None, error, is_known=True)
        self._outcome.notify()
        self._ended.set()
