"""Process groups for saving: collectives of a save run on a thread beside training's own, and two
threads must not use one group."""

from __future__ import annotations

import torch
import torch.distributed as dist


class Groups:
    """Groups of our own with gloo, of all ranks. Made anew where torch.distributed was initialized
    anew."""

    def __init__(self) -> None:
        self._world: object = None
        self._saving: dist.ProcessGroup | None = None
        self._calling: dist.ProcessGroup | None = None

    def of_saves(self) -> dist.ProcessGroup:
        """Collective at its first call."""
        self._look()
        if self._saving is None:
            self._saving = dist.new_group(backend="gloo")
        return self._saving

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
