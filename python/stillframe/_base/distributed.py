"""Whether this process is one of several that talk to each other."""

from __future__ import annotations

import os

import torch.distributed


def is_initialized() -> bool:
    """Whether there is a process group, be it of one rank."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


def may_have_ranks_beside() -> bool:
    """Whether other ranks may run on this machine. Nobody is asked: one that has died, or that
    never comes, would be waited for."""
    if not is_initialized() or torch.distributed.get_world_size() == 1:
        return False
    return os.environ.get("LOCAL_WORLD_SIZE") != "1"  # torchrun says it, others say nothing
