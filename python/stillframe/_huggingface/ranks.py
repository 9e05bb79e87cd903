"""Messages between the ranks of a training about their checkpoints.

Each rank writes its own files into a checkpoint, such as `rng_state_1.pth`. One rank, the leader,
opens and publishes the directory. The ranks exchange messages through the key-value store of the
process group:

    leader                               the others
    opens the directory ──"opened"────▶  wait for its path
    writes its files                     write their files
    waits for them     ◀──"written"────
    closes the directory
    learns that the     ──"ended"─────▶  ask at the end of each step until they have the answer
    save has ended
    may remove the     ◀─"announced"──   have called `on_save` for the checkpoint
    checkpoint

A value in the store is "+" and an answer, or "-" and an error. A rank that does not answer is named
in the log. After the process group's timeout, the call fails on the ranks that wait.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from stillframe._base.distributed import poll
from stillframe._save import api
from stillframe.errors import StillframeError

log = logging.getLogger("stillframe")

_PATIENCE_S = 30.0  # if an answer takes longer, the log names the rank
_LATE = "It is slow, or it never comes to this call, which all ranks have to make"
# Numbers the objects of `Ranks`. All ranks make them in the same order, so the numbers agree.
_numbers = itertools.count()


class Ranks:
    """The ranks that write checkpoints together: this `rank`, the `leader`, and all `others` than
    the leader."""

    def __init__(self, rank: int, leader: int, others: range) -> None:
        self.is_leader = rank == leader
        self._rank = rank
        self._leader = leader
        self._others = others
        name = f"stillframe/checkpoints/{next(_numbers)}/{leader}"
        self._store: Any = PrefixStore(name, _get_default_store())
        # What the leader has reported:
        self._ended = -1  # the last checkpoint that has ended
        self._failed: dict[str, str] = {}  # errors, by the number of the checkpoint
        self._skipped: list[int] = []  # numbers of the checkpoints that were skipped

    def share(self, key: str, make: Callable[[], str]) -> str:
        """Return the result of the leader's `make()` on all ranks. If `make` raises an error, raise
        an error on all ranks. `key` names the answer in the store."""
        if not self.is_leader:
            return self._wait_for_answer(key)
        try:
            result = make()
        except BaseException as error:
            self._store.set(key, "-" + _describe_error(error))
            raise
        self._store.set(key, "+" + result)
        return result

    @contextlib.contextmanager
    def follow(self, number: int, path: str) -> Iterator[str]:
        """Yield the directory of checkpoint `number` that the leader has opened. At the end of the
        block, tell the leader that this rank's files are written. `path` is for messages.

        Raises:
            StillframeError: The leader failed, or its directory is not visible here.
        """
        opened_key = f"{number}/opened"
        directory = self._wait_for_answer(opened_key)
        try:
            if not os.path.isdir(directory):
                raise StillframeError(
                    f"{path} is written by a rank on another machine, and its files are not visible"
                    " here. Give a directory on a shared file system, or set save_on_each_node=True"
                )
            yield directory
        except BaseException as error:
            if isinstance(error, Exception):  # after Ctrl-C, do not wait for the leader's answer
                self._raise_if_leader_failed(opened_key, directory)
            self._store.set(f"{number}/written/{self._rank}", "-" + _describe_error(error))
            raise
        self._raise_if_leader_failed(opened_key, directory)
        self._store.set(f"{number}/written/{self._rank}", "+")

    def _raise_if_leader_failed(self, opened_key: str, directory: str) -> None:
        """Raise the leader's error, if the leader has failed since it opened the directory.

        The leader has removed the directory, but Trainer or Accelerate may have made it again.
        """
        try:
            self._wait_for_answer(opened_key)
        except StillframeError:
            shutil.rmtree(directory, ignore_errors=True)
            raise

    @contextlib.contextmanager
    def lead(self, number: int, open_directory: Callable[[], str]) -> Iterator[str]:
        """Do the work of the function `lead` with several ranks, on the leader."""
        opened_key = f"{number}/opened"
        directory = self.share(opened_key, open_directory)
        try:
            yield directory
            for rank in self._others:
                key = f"{number}/written/{rank}"
                self._wait_for_answer(key, of=rank)
                self._store.delete_key(key)
        except BaseException as error:
            # Tell the other ranks first: the caller removes the directory when this raises.
            self._store.set(opened_key, "-" + _describe_error(error))
            raise
        self._store.delete_key(opened_key)

    def report_ended(self, number: int, error: str | None, *, is_skipped: bool = False) -> None:
        """Report to the other ranks that all checkpoints up to `number` have ended. `error` is the
        text of the error of checkpoint `number`, or None."""
        if error is not None:
            self._failed[str(number)] = error
        if is_skipped:
            self._skipped.append(number)
        self._ended = number
        self._store.set("ended", json.dumps([self._ended, self._failed, self._skipped]))

    def has_ended(self, number: int) -> bool:
        """Return whether the leader has reported the end of checkpoint `number`."""
        if number > self._ended and self._store.check(["ended"]):
            self._ended, self._failed, self._skipped = json.loads(self._store.get("ended"))
        return number <= self._ended

    def report_on_save_called(self, number: int) -> None:
        """Tell the leader that this rank has called `on_save` for checkpoint `number`."""
        self._store.set(f"announced/{self._rank}", str(number))

    def announced(self) -> int:
        """Return the number of the latest checkpoint for which all other ranks have called
        `on_save`, or -1."""
        keys = [f"announced/{rank}" for rank in self._others]
        if not self._store.check(keys):
            return -1
        return min(int(self._store.get(key)) for key in keys)

    def wait_until_on_save_called(self, number: int) -> None:
        """Wait until all other ranks have called `on_save` for checkpoint `number`. Give up after
        the process group's timeout."""
        if not poll(lambda: self.announced() >= number, self._store.timeout.total_seconds()):
            log.warning("stillframe: a rank has not ended its training. Its checkpoints stay")

    def wait_until_end_reported(self, number: int) -> None:
        """Wait until the leader has reported the end of checkpoint `number`."""
        poll(lambda: self.has_ended(number))

    def error_of(self, number: int) -> StillframeError | None:
        message = self._failed.get(str(number))
        return None if message is None else self._error(self._leader, message)

    def was_skipped(self, number: int) -> bool:
        return number in self._skipped

    def _wait_for_answer(self, key: str, of: int | None = None) -> str:
        """Wait for the answer of rank `of`, by default the leader, and return it.

        Raises:
            StillframeError: The answer is an error, or does not come in time.
        """
        rank = self._leader if of is None else of
        longest = self._store.timeout.total_seconds()
        if not poll(lambda: self._store.check([key]), _PATIENCE_S):
            log.warning("stillframe: a checkpoint waits for rank %d. %s", rank, _LATE)
            if not poll(lambda: self._store.check([key]), longest - _PATIENCE_S):
                raise self._error(rank, f"nothing came from it in {longest:g} s. {_LATE}")
        answer = self._store.get(key).decode()
        if answer.startswith("-"):
            raise self._error(rank, answer[1:])
        return str(answer[1:])

    def _error(self, rank: int, message: str) -> StillframeError:
        return StillframeError(f"a checkpoint failed on rank {rank}: {message}")


@contextlib.contextmanager
def lead(ranks: Ranks | None, number: int, open_directory: Callable[[], str]) -> Iterator[str]:
    """Open the directory of checkpoint `number` on the leader, and yield its path. At the end of
    the block, wait until the other ranks have written their files.

    Raises:
        StillframeError: Another rank could not write its files. The caller removes the directory.
    """
    if ranks is None:  # a single process
        yield open_directory()
    else:
        with ranks.lead(number, open_directory) as directory:
            yield directory


@dataclasses.dataclass
class LeaderDirectoryWriter:
    """The leader's directory, for another rank that writes a few small files into it."""

    path: str
    durable: bool  # sync the files here, because the leader on another machine cannot

    def save(self, obj: object, name: str) -> None:
        api.save(obj, os.path.join(self.path, name), durable=self.durable)

    def save_safetensors(
        self, tensors: Any, name: str, metadata: dict[str, str] | None = None
    ) -> None:
        path = os.path.join(self.path, name)
        api.save(tensors, path, format="safetensors", metadata=metadata, durable=self.durable)


def ranks_sharing_directory(args: Any) -> Ranks | None:
    """Return the ranks that write one directory together, or None for a single process.

    `args` are `TrainingArguments`. With `save_on_each_node`, each node writes its own directory.

    Raises:
        StillframeError: The ranks have no process group.
    """
    if args.world_size <= 1:
        return None
    if not dist.is_initialized():
        raise StillframeError(
            f"{args.world_size} ranks save checkpoints, and torch.distributed is not initialized:"
            " start them with torchrun or accelerate launch"
        )
    leader, count = 0, args.world_size
    if args.save_on_each_node:
        leader = args.process_index - args.local_process_index  # the first rank of this node
        # Without the variable, all ranks from the leader on are taken to be on this node.
        count = int(os.environ.get("LOCAL_WORLD_SIZE", count - leader))
    return Ranks(args.process_index, leader, others=range(leader + 1, leader + count))


def _describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
