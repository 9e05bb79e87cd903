"""Whether this process is one of several that talk to each other."""

from __future__ import annotations

import os

import torch.distributed


def is_initialized() -> bool:
    """Return whether there is a process group, even of one rank."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


def may_have_ranks_beside() -> bool:
    """Return whether other ranks may run on this machine. It asks none of them, because a dead or
    missing rank would never answer."""
    if not is_initialized() or torch.distributed.get_world_size() == 1:
        return False
    return os.environ.get("LOCAL_WORLD_SIZE") != "1"  # torchrun sets it, other launchers may not
