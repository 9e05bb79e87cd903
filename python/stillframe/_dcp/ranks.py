"""The collectives of a save.

In a save with a kept plan and without errors, the ranks only exchange a few numbers. New plans,
results and errors are sent as pickles.

While the main thread computes in Python, each release of the interpreter lock may cost 5 ms. A
collective of Python objects releases the lock dozens of times. The group's own method over reused
memory, which is used here, does so 3 times.

Saves have their own groups, because two threads must not use one group. Only methods of a group are
called. After the user's `destroy_process_group()`, functions of `torch.distributed` no longer know
the group, but the methods still work.
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

_COORDINATOR = 0  # the coordinator's rank
_MAX_NUMBERS = 7  # numbers that a rank can send in one exchange
_Timeout = datetime.timedelta | None  # None: gloo's default


class Ranks:
    """The ranks of one group and their collectives. Used by one thread.

    Args:
        group: None for a process that saves alone.
        discarded: Receives objects that are no longer needed, so that the caller frees them at a
            better time. Until then they keep the group's connections open.
    """

    def __init__(self, group: dist.ProcessGroup | None, discarded: list[Any]) -> None:
        self._group = group
        self._discarded = discarded
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()
        # A section of `_MAX_NUMBERS` int64 for each rank. Array and tensor share their memory.
        self._numbers = array.array("q", bytes(8 * _MAX_NUMBERS * self.size))
        self._tensor = torch.frombuffer(self._numbers, dtype=torch.int64)

    def drop_group(self) -> None:
        """Drop the group until the next save, so that the user may destroy it."""
        self._group = None

    def use_group(self, group: dist.ProcessGroup | None) -> None:
        """Use this group, which has the same ranks as the first one, until `drop_group`."""
        self._group = group

    @property
    def is_coordinator(self) -> bool:
        return self.rank == _COORDINATOR

    def exchange(self, *mine: int) -> list[list[int]]:
        """Return the numbers of all ranks, by rank. All ranks give equally many numbers, at most
        `_MAX_NUMBERS`."""
        if len(mine) > _MAX_NUMBERS:
            raise ValueError(f"{len(mine)} numbers, and there is room for {_MAX_NUMBERS}")
        if self._group is None:
            return [[*mine]]
        # Each rank fills its own section, and the sections of other ranks with 0. The sum of the
        # ranks' arrays has all sections.
        for index in range(len(self._numbers)):
            self._numbers[index] = 0
        begin = self.rank * _MAX_NUMBERS
        self._numbers[begin : begin + len(mine)] = array.array("q", mine)
        collective = self._group.allreduce([self._tensor])
        collective.wait()
        self._discarded.append(collective)  # freeing it here would release the interpreter lock
        return [
            self._numbers[at : at + len(mine)].tolist()
            for at in range(0, len(self._numbers), _MAX_NUMBERS)
        ]

    def gather(self, mine: Any) -> list[Any] | None:
        """Return the objects of all ranks, by rank, on the coordinator; None on other ranks."""
        if self._group is None:
            return [mine]
        sent, row_nbytes = self._pickle_to_padded_rows([mine])
        received = bytearray(row_nbytes * self.size if self.is_coordinator else 0)
        self._group.gather(
            _split_rows_to_tensors(received, row_nbytes), sent[0], _COORDINATOR
        ).wait()
        return _objects(received, row_nbytes) if self.is_coordinator else None

    def scatter(self, objects: list[Any] | None) -> Any:
        """Return the object that the coordinator has for this rank. On the coordinator, `objects`
        has one object for each rank; on other ranks it is None."""
        if self._group is None:
            assert objects is not None
            return objects[0]
        sent, row_nbytes = self._pickle_to_padded_rows(objects or [])
        received = bytearray(row_nbytes)
        self._group.scatter(
            _split_rows_to_tensors(received, row_nbytes)[0], sent, _COORDINATOR
        ).wait()
        return _objects(received, row_nbytes)[0]

    def broadcast(self, mine: Any) -> Any:
        """Return the coordinator's object on all ranks."""
        if self._group is None:
            return mine
        sent, row_nbytes = self._pickle_to_padded_rows([mine] if self.is_coordinator else [])
        if self.is_coordinator:
            self._group.broadcast(sent[0], _COORDINATOR).wait()
            return mine
        received = bytearray(row_nbytes)
        self._group.broadcast(_split_rows_to_tensors(received, row_nbytes)[0], _COORDINATOR).wait()
        return _objects(received, row_nbytes)[0]

    def raise_errors_of_all_ranks(self, step: str, mine: BaseException | None) -> None:
        """Exchange the ranks' errors after a rank has failed in a step, and raise
        CheckpointException with all of them. All ranks call this."""
        errors: list[Any] = [_to_picklable_error(mine)]  # by rank
        if self._group is not None:
            sent, row_nbytes = self._pickle_to_padded_rows(errors)
            received = bytearray(row_nbytes * self.size)
            self._group.allgather(_split_rows_to_tensors(received, row_nbytes), sent[0]).wait()
            errors = _objects(received, row_nbytes)
        failures = {rank: error for rank, error in enumerate(errors) if error is not None}
        raise CheckpointException(step, failures)

    def _pickle_to_padded_rows(self, objects: list[Any]) -> tuple[list[torch.Tensor], int]:
        """Return the pickles of this rank's objects as rows, and the length of a row: that of the
        longest pickle of any rank. Shorter pickles are padded; unpickling ignores the padding. All
        ranks call this."""
        pickled = [pickle.dumps(each) for each in objects]
        longest_here = max(map(len, pickled), default=0)
        longest = max(length for (length,) in self.exchange(longest_here))
        padded = bytearray(b"".join(each.ljust(longest, b"\0") for each in pickled))
        return _split_rows_to_tensors(padded, longest), longest


def _split_rows_to_tensors(memory: bytearray, nbytes: int) -> list[torch.Tensor]:
    """Return a tensor over each row of `nbytes` bytes."""
    if not memory:
        return []
    return [*torch.frombuffer(memory, dtype=torch.uint8).view(-1, nbytes).unbind()]


def _objects(memory: bytearray, nbytes: int) -> list[Any]:
    """Unpickle each row of `nbytes` bytes."""
    view = memoryview(memory)
    return [pickle.loads(view[at : at + nbytes]) for at in range(0, len(memory), nbytes)]


def _to_picklable_error(error: BaseException | None) -> Any:
    """Return an error as DCP sends it: a copy that can be pickled, and a summary of the
    traceback."""
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
    """Our own gloo groups of all ranks, one for each timeout.

    When a rank dies, our own group can be destroyed, which wakes the other ranks at once. In the
    user's group they would wait for the timeout. A user's group of fewer ranks is used itself,
    because all ranks would have to take part in making another group.
    """

    def __init__(self) -> None:
        self._world: object = None  # torch's group of all ranks when the groups below were made
        # Saves use one group, on the thread `sf-dcp`; `any_rank_votes_true` another, on the
        # caller's thread.
        self._save_groups: dict[_Timeout, dist.ProcessGroup] = {}
        self._call_groups: dict[_Timeout, dist.ProcessGroup] = {}
        self._why_destroyed: dict[_Timeout, str] = {}  # by the timeout of a group for saves

    def get_or_create_save_group(self, given: dist.ProcessGroup | None) -> dist.ProcessGroup:
        """Return the group for a save's collectives. `given` is the user's group, if any. All ranks
        have to call this, because the first call for a timeout makes the group. Raise
        StillframeError if the group was destroyed, because a rank is gone."""
        self._drop_old_groups()
        if given is not None and dist.get_world_size(given) < dist.get_world_size():
            return given
        timeout = None if given is None else _timeout_of(given)
        if timeout in self._why_destroyed:
            raise StillframeError(
                f"a rank is gone, and with it the group of saves ({self._why_destroyed[timeout]}):"
                " initialize torch.distributed anew, or give process_group="
            )
        if timeout not in self._save_groups:
            self._save_groups[timeout] = dist.new_group(backend="gloo", timeout=timeout)
        return self._save_groups[timeout]

    def give_up(self, group: dist.ProcessGroup, why: BaseException) -> None:
        """Destroy our group after a collective in it has failed. This wakes the ranks that wait for
        this rank. A user's group is not destroyed."""
        for timeout, ours in list(self._save_groups.items()):
            if ours is group:
                self._why_destroyed[timeout] = str(why)
                del self._save_groups[timeout]
                if group_exists(group):
                    dist.destroy_process_group(group)

    def any_rank_votes_true(self, group: dist.ProcessGroup, vote: bool) -> bool:
        """Return whether any rank votes True. Raise ValueError if the group does not have all
        ranks. The collective uses another group than saves, because a save may be under way."""
        self._drop_old_groups()
        if dist.get_world_size(group) < dist.get_world_size():
            raise ValueError(
                "when_busy='raise' needs a process_group of all ranks: with fewer use 'wait'"
            )
        timeout = _timeout_of(group)
        if timeout not in self._call_groups:
            self._call_groups[timeout] = dist.new_group(backend="gloo", timeout=timeout)
        nr_true = torch.tensor([int(vote)])
        dist.all_reduce(nr_true, group=self._call_groups[timeout])  # the sum over all ranks
        return bool(nr_true)

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
    """Return the timeout of a group's collectives on host memory; None if it is unknown."""
    backend = group._get_backend(torch.device("cpu"))
    options = getattr(backend, "options", None)
    timeout: _Timeout = getattr(options, "_timeout", None)
    return timeout


def refuse_without_cpu(group: dist.ProcessGroup) -> None:
    """Raise ValueError if the group has no backend for host memory."""
    backends = str(dist.get_backend_config(group))
    if "cpu" not in backends and "gloo" not in backends and "mpi" not in backends:
        raise ValueError(
            f"process_group has the backends {backends}, none of them for the CPU: give none, and"
            " stillframe makes one with gloo"
        )
