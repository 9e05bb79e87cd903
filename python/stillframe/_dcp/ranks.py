"""The collectives of a save.

In a save without errors, the ranks exchange a few numbers, with one collective for each exchange.
While the main thread computes in Python, each release of the interpreter lock may cost 5 ms. A
collective of Python objects releases it dozens of times, a function of `torch.distributed` for
tensors 12 times, and the group's own method over reused memory 3 times. Freeing the method's result
releases the lock twice more, so the result is kept until the user's next call. Plans, results and
errors are sent as pickles when needed.

A save's collectives run on a thread of their own, and two threads must not use one group, so saves
have their own groups. Only methods of a group are called: after the user's
`destroy_process_group()`, functions of `torch.distributed` no longer know the group, but methods of
a group that is still referenced work until the save has ended.
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

_MAX_NUMBERS = 7  # numbers that a rank can send in one exchange
_Timeout = datetime.timedelta | None  # None: gloo's default


class Ranks:
    """The ranks of one group and their collectives. Used by one thread.

    Args:
        group: None for a process that saves alone. It is referenced only while a save is under way.
        discarded: A list that receives objects that are no longer needed, so that the caller can
            free them at a better time. Until then they keep the group's connections open.

    Attributes:
        rank: This process's rank in the group; rank 0 is the coordinator.
        size: The number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None, discarded: list[Any]) -> None:
        self._group = group
        self._discarded = discarded
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()
        # `_MAX_NUMBERS` numbers (int64) for each rank. The array and the tensor share their memory.
        self._numbers = array.array("q", bytes(8 * _MAX_NUMBERS * self.size))
        self._tensor = torch.frombuffer(self._numbers, dtype=torch.int64)

    def drop_group(self) -> None:
        """Drop the group until the next save, so that the user may destroy it."""
        self._group = None

    def use_group(self, group: dist.ProcessGroup | None) -> None:
        """Use this group until `drop_group`; it has the same ranks as the first one."""
        self._group = group

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0

    def exchange(self, *mine: int) -> list[list[int]]:
        """Return the numbers of all ranks, by rank. Each rank gives equally many, at most
        `_MAX_NUMBERS`. The exchange is a sum of arrays in which each rank fills its own section."""
        if len(mine) > _MAX_NUMBERS:
            raise ValueError(f"{len(mine)} words, and there is room for {_MAX_NUMBERS}")
        if self._group is None:
            return [[*mine]]
        at = self.rank * _MAX_NUMBERS
        for number in range(len(self._numbers)):  # the sections of other ranks must be 0
            self._numbers[number] = 0
        self._numbers[at : at + len(mine)] = array.array("q", mine)
        summed = self._group.allreduce([self._tensor])
        summed.wait()
        self._discarded.append(summed)
        return [
            self._numbers[at : at + len(mine)].tolist()
            for at in range(0, len(self._numbers), _MAX_NUMBERS)
        ]

    def gather(self, mine: Any) -> list[Any] | None:
        """Return the objects of all ranks, by rank, on the coordinator, and None elsewhere."""
        if self._group is None:
            return [mine]
        own, longest = self._as_bytes([mine])
        held = bytearray(longest * self.size if self.is_coordinator else 0)
        self._group.gather(_rows(held, longest), own[0], 0).wait()
        return _objects(held, longest) if self.is_coordinator else None

    def scatter(self, objects: list[Any] | None) -> Any:
        """Return the object that the coordinator has for this rank. `objects` has one object for
        each rank on the coordinator, and is None elsewhere."""
        if self._group is None:
            assert objects is not None
            return objects[0]
        given, longest = self._as_bytes(objects or [])
        held = bytearray(longest)
        self._group.scatter(_rows(held, longest)[0], given, 0).wait()
        return _objects(held, longest)[0]

    def broadcast(self, own: Any) -> Any:
        """Return the coordinator's object on all ranks."""
        if self._group is None:
            return own
        given, longest = self._as_bytes([own] if self.is_coordinator else [])
        if self.is_coordinator:
            self._group.broadcast(given[0], 0).wait()
            return own
        held = bytearray(longest)
        self._group.broadcast(_rows(held, longest)[0], 0).wait()
        return _objects(held, longest)[0]

    def raise_all(self, step: str, mine: BaseException | None) -> None:
        """Exchange the ranks' errors after some rank has reported a failure. All ranks call this.

        Args:
            step: The step of the save that failed, for the error.
            mine: This rank's error; None if it has none.

        Raises:
            CheckpointException: Always; it has the errors of all ranks.
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
        """Pickle this rank's objects, if any, and pad each pickle to the length of the longest
        pickle of any rank. Return the pickles and that length. Unpickling ignores the padding. All
        ranks call this."""
        pickled = [pickle.dumps(each) for each in objects]
        longest = max(length for (length,) in self.exchange(max(map(len, pickled), default=0)))
        filled = bytearray(b"".join(each.ljust(longest, b"\0") for each in pickled))
        return _rows(filled, longest), longest


def _rows(held: bytearray, nbytes: int) -> list[torch.Tensor]:
    """Divide the memory into rows of `nbytes` bytes, and return a tensor over each row."""
    return [*torch.frombuffer(held, dtype=torch.uint8).view(-1, nbytes).unbind()] if held else []


def _objects(held: bytearray, nbytes: int) -> list[Any]:
    """Unpickle each row of `nbytes`."""
    view = memoryview(held)
    return [pickle.loads(view[at : at + nbytes]) for at in range(0, len(held), nbytes)]


def _to_send(error: BaseException | None) -> Any:
    """Return an error in DCP's form: a copy of the error, and a summary of its traceback. They
    reference no frames and can be pickled, even if the error itself cannot."""
    if error is None:
        return None
    summary = traceback.extract_tb(error.__traceback__)
    for frame in summary:
        if hasattr(frame, "_code"):  # Python 3.13 has it, and it cannot be pickled
            object.__setattr__(frame, "_code", None)
    try:
        return pickle.loads(pickle.dumps(error)), summary
    except Exception:
        return StillframeError(f"{type(error).__name__}: {error}"), summary


# ---- process groups ----


class Groups:
    """Our own gloo groups of all ranks, one for each timeout. New groups are made after
    `torch.distributed` was initialized again.

    If a user's group has all ranks, only its timeout is used, for a group of our own. When a rank
    dies, our own group can be destroyed, which wakes the other ranks at once. In the user's group
    they would wait for the timeout. A user's group of fewer ranks is used itself, because all ranks
    would have to take part in making another.
    """

    def __init__(self) -> None:
        self._world: object = None  # torch's group of all ranks when the groups below were made
        self._saving: dict[_Timeout, dist.ProcessGroup] = {}  # for saves, on the thread `sf-dcp`
        self._calling: dict[_Timeout, dist.ProcessGroup] = {}  # for `any_rank`, in the user's call
        self._lost: dict[_Timeout, str] = {}  # why the group for saves was destroyed

    def for_saves(self, given: dist.ProcessGroup | None) -> dist.ProcessGroup:
        """Return the group for a save's collectives. The first call for a timeout makes the group,
        so all ranks have to make that call.

        Args:
            given: The user's group, if any.

        Raises:
            StillframeError: The group was destroyed because a rank is gone.
        """
        self._drop_old_groups()
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
        """Destroy our group after a collective in it has failed. That closes the connections, and
        so wakes ranks that wait for this rank and would otherwise wait for the timeout. A user's
        group is not destroyed."""
        for timeout, ours in list(self._saving.items()):
            if ours is group:
                self._lost[timeout] = str(why)
                del self._saving[timeout], ours
                if group_exists(group):
                    dist.destroy_process_group(group)

    def any_rank(self, group: dist.ProcessGroup, own: bool) -> bool:
        """Return whether `own` is true on any rank. This is a collective in a group that is used
        for nothing else, because a save may be using the saves' group at the same time.

        Raises:
            ValueError: The group does not have all ranks, and making a group needs all of them.
        """
        self._drop_old_groups()
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

    def _drop_old_groups(self) -> None:
        """Forget all groups if `torch.distributed` was initialized again since they were made."""
        world = dist.group.WORLD
        if world is not self._world:
            self.__init__()  # type: ignore[misc]
            self._world = world


def group_exists(group: dist.ProcessGroup) -> bool:
    """Return whether the group has not been destroyed."""
    try:
        dist.get_process_group_ranks(group)
    except Exception:  # the exception's type depends on torch's version
        return False
    return True


def _timeout_of(group: dist.ProcessGroup) -> _Timeout:
    """Return the timeout of a group's collectives on host memory; None if the backend does not
    give it."""
    backend = group._get_backend(torch.device("cpu"))
    timeout: _Timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout


def refuse_without_cpu(group: dist.ProcessGroup) -> None:
    """Refuse a group without a backend for host memory.

    Raises:
        ValueError: The group has no such backend.
    """
    backends = str(dist.get_backend_config(group))
    if "cpu" not in backends and "gloo" not in backends and "mpi" not in backends:
        raise ValueError(
            f"process_group has the backends {backends}, none of them for the CPU: give none, and"
            " stillframe makes one with gloo"
        )
