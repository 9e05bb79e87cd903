"""Functions for the processes of the loan tests, in a module that they can import."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from typing import Any

import torch


def seen(tree: Any) -> list[float]:
    """Return the first and the last element of each tensor."""
    return [float(tensor[index]) for tensor in tree.values() for index in (0, -1)]


def fill(tree: Any, value: float) -> None:
    for tensor in tree.values():
        tensor.fill_(value)


def refuse_torchs_memory() -> None:
    def refused(*_: Any) -> Any:
        raise AssertionError("a storage was moved to memory of torch's")

    torch.UntypedStorage._share_fd_cpu_ = refused


def work(first: Any, link: Connection, grandchilds: Connection) -> None:
    """Run the commands that come over `link`; answer with the contents of the received trees."""
    refuse_torchs_memory()
    kept = [first]
    del first
    while True:
        item = link.recv()
        if isinstance(item, dict):
            kept.append(item)
        elif item == "forget the last":
            kept.pop()
        elif item == "write":
            fill(kept[-1], 99)
        elif item == "leave a grandchild" and os.fork() == 0:
            grandchilds.recv()
            grandchilds.send([seen(tree) for tree in kept])
            os._exit(0)
        link.send([seen(tree) for tree in kept])
