"""A data file: items one after the other, each a whole archive of torch.save.

The core makes a tensor's archive around bytes that it writes from where they are. What it cannot
describe (quantized and sparse tensors, types without a storage class, Python objects) torch.save
has put into memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from io import BytesIO

import torch

from stillframe._save.api import engine_or_default
from stillframe._save.engine import Engine
from stillframe._save.handle import SaveHandle
from stillframe._save.parts import Parts, Row, row_of, submit_parts
from stillframe._save.report import SaveReport


class Item:
    """One archive: what the core needs, and who has the bytes.

    Args:
        wait: Called before the bytes themselves are looked at, which most tensors are spared.

    Raises:
        ValueError: `data` is a meta tensor; it says its `name`.
    """

    __slots__ = ("owner", "row")

    def __init__(
        self,
        data: torch.Tensor | BytesIO,
        name: str = "a tensor",
        wait: Callable[[], object] = int,
    ) -> None:
        self.owner: object = None
        self.row: Row | memoryview
        if isinstance(data, torch.Tensor):
            tensor, row = data, row_of(data)
            if row is None:
                if data.is_meta:
                    raise ValueError(
                        f"{name} is on the meta device and has no bytes to save: give it memory"
                        " (`to_empty`, `torch.empty_like(..., device='cpu')`), or leave it out"
                    )
                wait()
                tensor = _plain(data.detach())
                row = row_of(tensor)
            if row is not None:
                self.row, self.owner = row, tensor
                return
            data = BytesIO()
            torch.save(tensor, data)
        self.row = data.getbuffer()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU whose bytes are all there is of it, and stand together, if it can be."""
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    if tensor.layout is not torch.strided:
        return tensor
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor if row_of(tensor) is not None else tensor.contiguous()


class DataFile:
    """A file that is laid out, and then written.

    Args:
        path: Where it goes; what stands there is replaced once the file is complete.
        items: Their bytes may not change before the end.

    Attributes:
        places: Offset and length of each item.
    """

    def __init__(self, path: str, items: Sequence[Item]) -> None:
        self.path = path
        self._parts = Parts()
        self.places = self._parts.append([item.row for item in items])
        self._owners = [item.owner for item in items if item.owner is not None]
        self._save: SaveHandle | None = None

    def start(self, *, durable: bool, engine: Engine | None) -> None:
        """
        Args:
            durable: Sync the file and its directory.
            engine: Whose threads write it.
        """
        self._save = submit_parts(
            engine_or_default(engine),
            self._parts,
            self.path,
            owners=self._owners,
            durable=durable,
        )
        self._owners = []

    def failure(self) -> BaseException | None:
        """Waits for the end; what went wrong."""
        return None if self._save is None else self._save.exception()

    def report(self) -> SaveReport:
        assert self._save is not None
        report = self._save.result()
        assert report is not None
        return report

    def discard(self) -> None:
        """Removes it, if it has come into being."""
        if self._save is not None and self.failure() is None and os.path.exists(self.path):
            os.unlink(self.path)
