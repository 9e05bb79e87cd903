"""What the ranks of a save tell each other.

Where all goes well that is a few numbers each, in one collective: beside a main thread that
computes in Python, whatever lets go of the interpreter lock may wait 5 ms for it. The collectives
of Python objects do so dozens of times each, `torch.distributed`'s of tensors 12 times, and the
group's own method, over memory that is kept, 3 times; the end of what that returns does so twice,
and comes with the next call. Plans, results and errors go round as pickles, where there are any.

Only the group's own methods are called: `torch.distributed`'s know no group any more once the user
has called `destroy_process_group()`, and those of one that is kept go on to the end of the save.
"""

from __future__ import annotations

import array
import pickle
import traceback
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from stillframe.errors import StillframeError

_MOST_WORDS = 7  # of a rank at a time


class Ranks:
    """Those of one group. Used by one thread.

    Args:
        group: None for a process that saves alone. It is kept while a save is under way only.
        spent: Gets what is not needed any more, for who knows a better time for its end. It keeps
            the group's connections.
    """

    def __init__(self, group: dist.ProcessGroup | None, spent: list[Any]) -> None:
        self._group = group
        self._spent = spent
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()
        self._words = array.array("q", bytes(8 * _MOST_WORDS * self.size))
        self._tensor = torch.frombuffer(self._words, dtype=torch.int64)

    def rest(self) -> None:
        """Until the next save has its group: the user may destroy it."""
        self._group = None

    def go_on(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    @property
    def coordinates(self) -> bool:
        return self.rank == 0

    def words(self, *mine: int) -> list[list[int]]:
        """Of all ranks, as many each: _MOST_WORDS at most, where a rank's begin in the sum."""
        if len(mine) > _MOST_WORDS:
            raise ValueError(f"{len(mine)} words, and there is room for {_MOST_WORDS}")
        if self._group is None:
            return [[*mine]]
        at = self.rank * _MOST_WORDS
        for number in range(len(self._words)):  # the others' are what they add to it
            self._words[number] = 0
        self._words[at : at + len(mine)] = array.array("q", mine)
        summed = self._group.allreduce([self._tensor])
        summed.wait()
        self._spent.append(summed)
        return [
            self._words[at : at + len(mine)].tolist()
            for at in range(0, len(self._words), _MOST_WORDS)
        ]

    def gathered(self, mine: Any) -> list[Any] | None:
        """On the coordinator, of all ranks."""
        if self._group is None:
            return [mine]
        own, longest = self._as_bytes([mine])
        held = bytearray(longest * self.size if self.coordinates else 0)
        self._group.gather(_rows(held, longest), own[0], 0).wait()
        return _objects(held, longest) if self.coordinates else None

    def scattered(self, objects: list[Any] | None) -> Any:
        """The coordinator's for this rank."""
        if self._group is None:
            assert objects is not None
            return objects[0]
        given, longest = self._as_bytes(objects or [])
        held = bytearray(longest)
        self._group.scatter(_rows(held, longest)[0], given, 0).wait()
        return _objects(held, longest)[0]

    def broadcast(self, coordinators: Any) -> Any:
        """What the coordinator has, on all ranks."""
        if self._group is None:
            return coordinators
        given, longest = self._as_bytes([coordinators] if self.coordinates else [])
        held = bytearray(longest)
        self._group.broadcast((given or _rows(held, longest))[0], 0).wait()
        return coordinators if given else _objects(held, longest)[0]

    def refuse(self, step: str, mine: BaseException | None) -> None:
        """All ranks call it once one of them has said that it failed.

        Raises:
            CheckpointException: Always; it shows every rank's error.
        """
        all_of_them: list[Any] = [_to_send(mine)]
        if self._group is not None:
            own, longest = self._as_bytes(all_of_them)
            held = bytearray(longest * self.size)
            self._group.allgather(_rows(held, longest), own[0]).wait()
            all_of_them = _objects(held, longest)
        failures = {rank: each for rank, each in enumerate(all_of_them) if each is not None}
        raise CheckpointException(step, failures)

    def _as_bytes(self, objects: list[Any]) -> tuple[list[torch.Tensor], int]:
        """Pickles of this rank's objects, and the length of the longest of any rank, which these
        are filled up to: no pickle is read beyond its end."""
        pickled = [pickle.dumps(each) for each in objects]
        longest = max(length for (length,) in self.words(max(map(len, pickled), default=0)))
        filled = bytearray(b"".join(each.ljust(longest, b"\0") for each in pickled))
        return _rows(filled, longest), longest


def _rows(held: bytearray, nbytes: int) -> list[torch.Tensor]:
    """The memory, in parts of `nbytes` each."""
    return [*torch.frombuffer(held, dtype=torch.uint8).view(-1, nbytes).unbind()] if held else []


def _objects(held: bytearray, nbytes: int) -> list[Any]:
    """What is pickled in each part."""
    view = memoryview(held)
    return [pickle.loads(view[at : at + nbytes]) for at in range(0, len(held), nbytes)]


def _to_send(error: BaseException | None) -> Any:
    """An error and where it comes from, as DCP has them: a copy, without frames and what they hold,
    that can be pickled whatever the error holds."""
    if error is None:
        return None
    summary = traceback.extract_tb(error.__traceback__)
    for frame in summary:
        if hasattr(frame, "_code"):  # of Python 3.13, which no pickle takes
            object.__setattr__(frame, "_code", None)
    try:
        return pickle.loads(pickle.dumps(error)), summary
    except Exception:
        return StillframeError(f"{type(error).__name__}: {error}"), summary
