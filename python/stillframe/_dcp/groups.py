"""Process groups for saving: collectives of a save run on a thread beside training's own, and two
threads must not use one group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from stillframe.errors import StillframeError


class Groups:
    """Groups of our own with gloo, of all ranks. Made anew where torch.distributed was initialized
    anew."""

    def __init__(self) -> None:
        self._world: object = None
        self._saving: dist.ProcessGroup | None = None
        self._calling: dist.ProcessGroup | None = None
        self._lost = ""

    def of_saves(self) -> dist.ProcessGroup:
        """Collective at its first call.

        Raises:
            StillframeError: It was given up.
        """
        self._look()
        if self._lost:
            raise StillframeError(
                f"a rank is gone, and with it the group of saves ({self._lost}): initialize"
                " torch.distributed anew, or give process_group="
            )
        if self._saving is None:
            self._saving = dist.new_group(backend="gloo")
        return self._saving

    def give_up(self, group: dist.ProcessGroup, why: BaseException) -> None:
        """A collective has failed. Whoever waits for this rank in another would do so until its
        timeout, if this one's connections did not end; a group of the user's stays."""
        if group is self._saving:
            self._saving, self._lost = None, str(why)
            dist.destroy_process_group(group)

    def any_rank(self, own: bool) -> bool:
        """Whether it is true on any rank. Collective, while a save may be under way."""
        self._look()
        if self._calling is None:
            self._calling = dist.new_group(backend="gloo")
        votes = torch.tensor([int(own)])
        dist.all_reduce(votes, group=self._calling)
        return bool(votes)

    def _look(self) -> None:
        world = dist.group.WORLD
        if world is not self._world:
            self.__init__()  # type: ignore[misc]
            self._world = world


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
