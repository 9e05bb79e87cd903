"""Process groups for saving: collectives of a save run on a thread beside training's own, and two
threads must not use one group."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

from stillframe.errors import StillframeError

_Timeout = datetime.timedelta | None  # None: gloo's own


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
