"""What the ranks of a save tell each other.

Where all goes well that is a few numbers each, in one collective: beside a main thread that
computes in Python, whatever lets go of the interpreter lock may wait 5 ms for it. The collectives
of Python objects do so dozens of times each, `torch.distributed`'s of tensors 12 times, and the
group's own method, over memory that is kept, 3 times; the end of what that returns does so twice,
and comes with the next call. Plans, results and errors go round as pickles, where there are any.

Collectives of a save run on a thread beside training's own, and two threads must not use one group.
So saves have groups of their own. Only a group's own methods are called: `torch.distributed`'s know
no group any more once the user has called `destroy_process_group()`, and those of one that is kept
go on to the end of the save.
"""

from __future__ import annotations

import array
import datetime
import pickle
import traceback
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from stillframe.errors import StillframeError

_MOST_WORDS = 7  # of a rank at a time
_Timeout = datetime.timedelta | None  # None: gloo's own


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


# ---- process groups ----


class Groups:
    """Groups of our own with gloo, of all ranks. Made anew where torch.distributed was initialized
    anew.

    A group of the user's that has all ranks is only asked for its timeout. One of ours may be given
    up when a rank is gone, which tells all the others at once; in theirs they would wait for the
    timeout. Groups of fewer ranks are used as they are: to make one, all ranks would have to come.
    """

    def __init__(self) -> None:
        self._world: object = None
        self._saving: dict[_Timeout, dist.ProcessGroup] = {}
        self._calling: dict[_Timeout, dist.ProcessGroup] = {}
        self._lost: dict[_Timeout, str] = {}

    def of_saves(self, given: dist.ProcessGroup | None) -> dist.ProcessGroup:
        """Collective at its first call.

        Args:
            given: The user's.

        Raises:
            StillframeError: It was given up.
        """
        self._look()
        if given is not None and dist.get_world_size(given) < dist.get_world_size():
            return given
        timeout = None if given is None else _timeout_of(given)
        if timeout in self._lost:
            raise StillframeError(
                f"a rank is gone, and with it the group of saves ({self._lost[timeout]}):"
                " initialize torch.distributed anew, or give process_group="
            )
        if timeout not in self._saving:
            self._saving[timeout] = dist.new_group(backend="gloo", timeout=timeout)
        return self._saving[timeout]

    def give_up(self, group: dist.ProcessGroup, why: BaseException) -> None:
        """A collective has failed. Whoever waits for this rank in another would do so until its
        timeout, if this one's connections did not end; a group of the user's stays."""
        for timeout, ours in list(self._saving.items()):
            if ours is group:
                self._lost[timeout] = str(why)
                del self._saving[timeout], ours
                if is_there(group):
                    dist.destroy_process_group(group)

    def any_rank(self, group: dist.ProcessGroup, own: bool) -> bool:
        """Whether it is true on any rank of a group of saves. Collective, while a save may be under
        way.

        Raises:
            ValueError: The group has not all ranks, and all would have to come.
        """
        self._look()
        if dist.get_world_size(group) < dist.get_world_size():
            raise ValueError(
                "when_busy='raise' needs a process_group of all ranks: with fewer use 'wait'"
            )
        timeout = _timeout_of(group)
        if timeout not in self._calling:
            self._calling[timeout] = dist.new_group(backend="gloo", timeout=timeout)
        votes = torch.tensor([int(own)])
        dist.all_reduce(votes, group=self._calling[timeout])
        return bool(votes)

    def _look(self) -> None:
        world = dist.group.WORLD
        if world is not self._world:
            self.__init__()  # type: ignore[misc]
            self._world = world


def is_there(group: dist.ProcessGroup) -> bool:
    """Whether nobody has destroyed it."""
    try:
        dist.get_process_group_ranks(group)
    except Exception:  # of a kind that depends on the version
        return False
    return True


def _timeout_of(group: dist.ProcessGroup) -> _Timeout:
    """Of its collectives on host memory; None where its backend does not tell."""
    backend = group._get_backend(torch.device("cpu"))
    timeout: _Timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout


def refuse_without_cpu(group: dist.ProcessGroup) -> None:
    """
    Raises:
        ValueError: Its collectives cannot take host memory.
    """
    backends = str(dist.get_backend_config(group))
    if "cpu" not in backends and "gloo" not in backends and "mpi" not in backends:
        raise ValueError(
            f"process_group has the backends {backends}, none of them for the CPU: give none, and"
            " stillframe makes one with gloo"
        )
