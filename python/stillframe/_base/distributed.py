"""Whether this process is one of several that talk to each other."""

from __future__ import annotations

import torch.distributed


def is_initialized() -> bool:
    """Whether there is a process group, be it of one rank."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


def has_several_ranks() -> bool:
    return is_initialized() and torch.distributed.get_world_size() > 1
