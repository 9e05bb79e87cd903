"""A data file: its contents one after the other, written from where they are."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from stillframe._save.api import engine_or_default
from stillframe._save.engine import Engine
from stillframe._save.handle import SaveHandle
from stillframe._save.parts import Parts, row_of, submit_parts
from stillframe._save.report import SaveReport

Content = memoryview | torch.Tensor


def plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor as one whose bytes stand together in host memory, and are all there is of it:
    itself or a copy. None where torch.save has to say what it is made of."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return None
    if tensor.is_quantized or tensor.is_nested:
        return None
    tensor = tensor.resolve_conj().resolve_neg().cpu()
    if row_of(tensor) is None:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return None if row_of(tensor) is None else tensor


class DataFile:
    """A file that is being written.

    Args:
        path: Where it goes; what stands there is replaced once the file is complete.
        contents: A tensor (`plain`) becomes an archive of torch.save, bytes stand as they are. They
            are read until the file is complete.
        durable: Sync the file and its directory.
        engine: Whose threads write it.

    Attributes:
        places: Where each of the contents begins in the file, and how long it is.
    """

    def __init__(
        self, path: str, contents: Sequence[Content], *, durable: bool, engine: Engine | None
    ) -> None:
        self.path = path
        parts = Parts()
        items = [row_of(each) if isinstance(each, torch.Tensor) else each for each in contents]
        self.places = parts.append([each for each in items if each is not None])
        self._save: SaveHandle = submit_parts(
            engine_or_default(engine), parts, path, owners=contents, durable=durable
        )

    def failure(self) -> BaseException | None:
        """Waits for the end; what went wrong."""
        return self._save.exception()

    def report(self) -> SaveReport:
        report = self._save.result()
        assert report is not None
        return report

    def discard(self) -> None:
        """Removes it, whether it has come into being or not."""
        if self.failure() is None and os.path.exists(self.path):
            os.unlink(self.path)
