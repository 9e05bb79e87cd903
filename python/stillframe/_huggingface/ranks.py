"""Messages between the ranks of a training about their checkpoints.

Each rank writes files of its own into a checkpoint (`rng_state_1.pth`). One rank, the leader, opens
the directory and publishes it, so it has to know that the files of the others are there. All ranks
are in the same call, so they use the key-value store of the process group and no collective:

    leader                               the others
    opens the directory ──"opened"────▶  wait for its path
    writes its files                     write their files
    waits for them     ◀──"written"────
    closes the directory
    later: it is durable ──"ended"────▶  ask at the end of each step until they have the answer

An error travels in place of an answer, so a rank that fails does not leave the others waiting.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from stillframe._save import api
from stillframe.errors import StillframeError

_SHORTEST_S, _LONGEST_S = 0.0002, 0.01  # between two looks at the store
_names = itertools.count()  # every rank makes the same Ranks in the same order


class Ranks:
    """The ranks that write checkpoints together, seen by one of them.

    Args:
        rank: This rank.
        leader: The rank that opens and publishes the directories.
        others: The other ranks.

    Attributes:
        is_leader: Whether this rank is the leader.
    """

    def __init__(self, rank: int, leader: int, others: range) -> None:
        self.is_leader = rank == leader
        self._rank = rank
        self._leader = leader
        self._others = others
        name = f"stillframe/checkpoints/{next(_names)}/{leader}"
        self._store: Any = PrefixStore(name, _get_default_store())
        self._ended = -1
        self._failed: dict[str, str] = {}

    def share(self, what: str, make: Callable[[], str]) -> str:
        """Return what `make()` returns on the leader; an error of it is raised on all ranks."""
        if not self.is_leader:
            return self._answer(what)
        try:
            made = make()
        except BaseException as error:
            self._store.set(what, "-" + _words(error))
            raise
        self._store.set(what, "+" + made)
        return made

    def report_written(self, number: int, error: BaseException | None) -> None:
        """Tell the leader that this rank has written its files of checkpoint `number`, or why it
        has not."""
        said = "+" if error is None else "-" + _words(error)
        self._store.set(f"{number}/written/{self._rank}", said)

    def wait_written(self, number: int, opened: str) -> None:
        """Wait until the other ranks have written their files, and forget checkpoint `number`.

        Args:
            opened: The key that told the others where to write.

        Raises:
            StillframeError: A rank could not write.
        """
        for rank in self._others:
            key = f"{number}/written/{rank}"
            self._answer(key, of=rank)
            self._store.delete_key(key)
        self._store.delete_key(opened)

    def tell_ended(self, number: int, error: str | None) -> None:
        """Tell the others that checkpoint `number` and all before it have ended."""
        if error is not None:
            self._failed[str(number)] = error
        self._ended = number
        self._store.set("ended", json.dumps([self._ended, self._failed]))

    def has_ended(self, number: int) -> bool:
        """Return whether the leader has told that checkpoint `number` has ended."""
        if number > self._ended and self._store.check(["ended"]):
            self._ended, self._failed = json.loads(self._store.get("ended"))
        return number <= self._ended

    def wait_ended(self, number: int) -> None:
        _poll(lambda: self.has_ended(number))

    def error_of(self, number: int) -> StillframeError | None:
        """Return the error of a checkpoint that has ended on the leader, or None."""
        words = self._failed.get(str(number))
        return None if words is None else self._error(self._leader, words)

    def _answer(self, key: str, of: int | None = None) -> str:
        _poll(lambda: self._store.check([key]))
        said = self._store.get(key).decode()
        if said.startswith("-"):
            raise self._error(self._leader if of is None else of, said[1:])
        return str(said[1:])

    def _error(self, rank: int, words: str) -> StillframeError:
        return StillframeError(f"rank {rank} did not save its part of a checkpoint: {words}")


@dataclasses.dataclass
class Beside:
    """The leader's directory, for another rank that writes a few small files into it.

    Attributes:
        path: The directory.
        durable: Sync them here. The leader's own syncs reach them only on the same machine.
    """

    path: str
    durable: bool

    def save(self, obj: object, name: str) -> None:
        api.save(obj, os.path.join(self.path, name), durable=self.durable)

    def save_safetensors(
        self, tensors: Any, name: str, metadata: dict[str, str] | None = None
    ) -> None:
        path = os.path.join(self.path, name)
        api.save(tensors, path, format="safetensors", metadata=metadata, durable=self.durable)


def ranks_of(args: Any) -> Ranks | None:
    """Return the ranks that write one directory together, or None for a process alone.

    Args:
        args: The `TrainingArguments`. With `save_on_each_node`, the ranks of each node write a
            directory of their own.

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
    first, count = 0, args.world_size
    if args.save_on_each_node:
        first = args.process_index - args.local_process_index
        count = int(os.environ.get("LOCAL_WORLD_SIZE", count - first))
    return Ranks(args.process_index, first, range(first + 1, first + count))


def _poll(is_there: Callable[[], bool]) -> None:
    """Wait until `is_there()`. Ctrl-C is answered between two looks."""
    pause = _SHORTEST_S
    while not is_there():
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_S)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
