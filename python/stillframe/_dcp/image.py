"""A data file out of parts: the only place that knows how the core is given one.

The parts are put together in ordinary memory and saved as one tensor. So a file is itself a
torch.save archive, and the parts begin where that has its tensor.
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Sequence

import torch

from stillframe._dcp.archive import view_of
from stillframe._save.api import engine_or_default
from stillframe._save.engine import Engine, submit
from stillframe._save.handle import SaveHandle
from stillframe._save.options import SaveOptions
from stillframe._save.report import SaveReport

MOST_BYTES = 128 << 20  # of one file: what is put together at a time

Part = bytes | memoryview | torch.Tensor  # tensors are flat and of bytes


def length(parts: Sequence[Part]) -> int:
    return sum(map(_length, parts))


def _length(part: Part) -> int:
    return part.numel() if isinstance(part, torch.Tensor) else len(part)


class DataFile:
    """A file that is being written.

    Args:
        path: Where it goes; what stands there is replaced once the file is complete.
        parts: Copied in the call.
        durable: Sync the file and its directory.
        engine: Whose threads write it.
    """

    def __init__(
        self, path: str, parts: Sequence[Part], *, durable: bool, engine: Engine | None
    ) -> None:
        self.path = path
        image = torch.empty(length(parts), dtype=torch.uint8)
        view, at = view_of(image), 0
        for part in parts:
            end = at + _length(part)
            if isinstance(part, torch.Tensor):
                image[at:end].copy_(part)
            else:
                view[at:end] = part
            at = end
        options = SaveOptions(overlap=False, durable=durable, follow_link=False, wait_for_slot=True)
        self._save: SaveHandle = submit(engine_or_default(engine), image, path, options)

    def failure(self) -> BaseException | None:
        """Waits for the end; what went wrong."""
        return self._save.exception()

    def report(self) -> SaveReport:
        report = self._save.result()
        assert report is not None
        return report

    def start(self) -> int:
        """Where the first part begins in the file."""
        with zipfile.ZipFile(self.path) as archive, open(self.path, "rb") as file:
            (record,) = (each for each in archive.infolist() if each.filename.endswith("/data/0"))
            file.seek(record.header_offset + 26)
            name, extra = struct.unpack("<HH", file.read(4))
            return int(record.header_offset + 30 + name + extra)

    def discard(self) -> None:
        """Removes it, whether it has come into being or not."""
        if self.failure() is None and os.path.exists(self.path):
            os.unlink(self.path)
