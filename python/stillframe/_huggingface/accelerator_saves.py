"""The saves of one Accelerator: which rank opens the directory, and how others learn the result.

One rank is the leader. It opens the directory, gets the save's own handle, and removes old
checkpoints. The other ranks write into the leader's directory, and get a handle that asks the
leader how the save has ended.
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

from stillframe._huggingface.ranks import LeaderDirectory, Ranks, lead, ranks_of
from stillframe._save import api
from stillframe._save.handle import Deadline, SaveHandle, State, error_of
from stillframe.errors import StillframeError

_NAME = re.compile(r"checkpoint_(\d+)")
# Every rank of Accelerate writes files of these names. Only the leader's are kept.
_LEADERS = re.compile(r"scaler\.pt|dl_state_dict(_\d+)?\.bin")
_POLL_S = 0.01  # the pause between two questions of a rank whether a save has ended


class Saves:
    """The saves of one Accelerator, seen by one rank.

    Attributes:
        is_leader: This rank opens the directories and removes old ones.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        arguments = SimpleNamespace(
            world_size=accelerator.num_processes,
            process_index=accelerator.process_index,
            local_process_index=accelerator.local_process_index,
            save_on_each_node=False,
        )
        # `_all` has all ranks, and `_ranks` those that write into the same directory. Both are None
        # for a process alone.
        self._all = self._ranks = ranks_of(arguments)
        if accelerator.project_configuration.save_on_each_node:
            arguments.save_on_each_node = True
            self._ranks = ranks_of(arguments)
        # Whether this rank is on another machine than rank 0.
        self._is_elsewhere = arguments.process_index != arguments.local_process_index
        self._number = 0  # the number of the last call, the same on all ranks
        self._in_flight: list[SaveHandle] = []  # on the leader, oldest first
        self.is_leader = self._ranks is None or self._ranks.is_leader

    def share(self, wait: Callable[[], str], find: Callable[[], str]) -> str:
        """Return, on all ranks, the result of `find()` on rank 0.

        If each machine has a leader, each leader calls `wait()` first. The result of `wait` is not
        used: it returns a string only because `Ranks.share` sends one.
        """
        self._number += 1
        key = f"load/{self._number}"
        if self._ranks is None or self._all is None:
            return find()
        if self._ranks is not self._all:
            self._ranks.share(key, wait)
        return self._all.share(key, find)

    def save(
        self,
        path: str,
        opened: Callable[[], AbstractContextManager[Any]],
        write: Callable[[Any], object],
    ) -> SaveHandle:
        """Have all ranks write into one directory.

        Args:
            path: The directory.
            opened: Called on the leader; returns a context manager that opens the directory.
            write: Called with the open checkpoint, on each rank.

        Returns:
            The handle of the save.
        """
        self._number += 1
        ranks, number = self._ranks, self._number
        if ranks is not None and not ranks.is_leader:
            with ranks.follow(number, path) as directory:
                write(_AccelerateDirectory(directory, durable=self._is_elsewhere))
            return Followed(path, ranks, number)
        self._in_flight = [each for each in self._in_flight if not each.done()]
        files: Any = None
        try:
            with contextlib.ExitStack() as block:

                def open_it() -> str:
                    nonlocal files
                    files = block.enter_context(opened())
                    directory: str = files.path
                    return directory

                block.enter_context(lead(ranks, number, open_it))
                write(files)
        except BaseException as error:
            self._report_ended(number, None, error)
            raise
        handle: SaveHandle = files.handle
        if handle.state != "skipped":
            self._in_flight.append(handle)
        self._report_ended(number, handle)
        return handle

    def _report_ended(
        self, number: int, handle: SaveHandle | None, failed: BaseException | None = None
    ) -> None:
        """Report to the other ranks how the save of call `number` has ended, as soon as the last
        save in flight has ended.

        Args:
            handle: The handle of the save; None if the call has failed.
            failed: The error of the call, if it has failed.
        """
        ranks = self._ranks
        if ranks is None:
            return

        def report(_: object = None) -> None:
            error = failed if handle is None else error_of(handle)
            is_skipped = handle is not None and handle.state == "skipped"
            ranks.report_ended(number, None if error is None else str(error), is_skipped=is_skipped)

        if self._in_flight:
            self._in_flight[-1].add_done_callback(report)
        else:
            report()

    def rotate(self, path: str, limit: int | None) -> None:
        """Remove the oldest checkpoints next to `path`, so that `limit` remain; None removes none.

        The removes run after the save to `path`, and only if it became durable. Checkpoints whose
        saves are in flight count too, although their directories do not exist yet.
        """
        if limit is None:
            return
        directory, new = os.path.split(path)
        names = {*os.listdir(directory), *(os.path.basename(each.path) for each in self._in_flight)}
        numbers: dict[int, str] = {}
        for name in names - {new}:
            matched = _NAME.fullmatch(name)
            if matched and api.exists(os.path.join(directory, name)):
                numbers[int(matched[1])] = name
        # The new checkpoint counts too.
        for number in sorted(numbers)[: max(0, len(numbers) + 1 - limit)]:
            api.remove(os.path.join(directory, numbers[number]))


_saves: weakref.WeakKeyDictionary[Accelerator, Saves] = weakref.WeakKeyDictionary()


def saves_of(accelerator: Accelerator) -> Saves:
    """Return the saves of an Accelerator, which live as long as it does."""
    if accelerator not in _saves:
        _saves[accelerator] = Saves(accelerator)
    return _saves[accelerator]


class _AccelerateDirectory(LeaderDirectory):
    """The leader's directory, for a rank that is not the leader."""

    def save(self, obj: object, name: str) -> None:
        if not _LEADERS.fullmatch(name):
            super().save(obj, name)


# ---- handles of the other ranks ----

_exiting = threading.Event()
_followers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def _stop_followers() -> None:
    """End the threads of `Followed` before the interpreter ends. A thread that is in a call of the
    process group's store at that moment would abort the process."""
    _exiting.set()
    for thread in list(_followers):
        thread.join()


atexit.register(_stop_followers)


class Followed(SaveHandle):
    """The handle of a save on a rank that is not the leader. A thread asks the leader how the save
    has ended."""

    def __init__(self, path: str, ranks: Ranks, number: int) -> None:
        super().__init__(path, path)
        self._outcome.cancellable = False
        self._ranks, self._number = ranks, number
        self._is_skipped = False
        self._over = threading.Event()
        thread = threading.Thread(target=self._follow, name="sf-follow", daemon=True)
        _followers.add(thread)
        thread.start()

    @property
    def state(self) -> State:
        self._birth.refuse_child()
        if not self._outcome.settled:
            return "writing"
        if self._is_skipped:
            return "skipped"
        return "durable" if self._outcome.error is None else "failed"

    def _is_staged(self) -> bool:
        return True  # because this rank's files were written in the call

    def _wait_until_ended(self, deadline: Deadline) -> None:
        self._birth.refuse_child()
        if not self._over.wait(deadline.left()):
            raise self._timeout_error(deadline, "durable")

    def _follow(self) -> None:
        """Ask until the save has ended, and settle the handle. Runs on the thread."""
        error: Exception | None
        try:
            while not self._ranks.has_ended(self._number):
                if _exiting.wait(_POLL_S):
                    raise StillframeError("the interpreter is exiting")
            error = self._ranks.error_of(self._number)
            self._is_skipped = self._ranks.was_skipped(self._number)
        except Exception as lost:  # the store, which is in another process, is gone
            error = StillframeError(
                f"the rank that saves {self._path} did not tell how the save ended: {lost}"
            )
        # `is_known`, because the leader's process reports the error already.
        self._outcome.settle(None, error, is_known=True)
        self._outcome.notify()
        self._over.set()
