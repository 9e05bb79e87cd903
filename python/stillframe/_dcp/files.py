"""The data files of one rank: laid out first, so that it is known where everything will stand, and
written when all ranks have agreed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from io import BytesIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from stillframe._dcp import image
from stillframe._save.engine import Engine
from stillframe._save.report import SaveReport

Resolve = Callable[[WriteItem], torch.Tensor | BytesIO]


class RankFiles:
    """
    Args:
        buckets: The items of each file.
        resolve: Gives the tensor or the bytes of an item.
        name: Gives the name of a file by its number.
        wait: Returns when the tensors' bytes are there; called where they are looked at.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[WriteItem]],
        resolve: Resolve,
        directory: str,
        name: Callable[[int], str],
        wait: Callable[[], object] = int,
    ) -> None:
        self._buckets = buckets
        self._files = []
        with torch.no_grad():  # a DTensor's local tensor is to be had for nothing then
            for number, bucket in enumerate(buckets):
                items = [image.Item(resolve(item), item.index.fqn, wait) for item in bucket]
                self._files.append(image.DataFile(os.path.join(directory, name(number)), items))
        self.places = [file.places for file in self._files]

    def start(self, *, durable: bool, engine: Engine | None) -> None:
        """
        Raises:
            SaveError: A file cannot be begun. None is left.
        """
        try:
            for file in self._files:
                file.start(durable=durable, engine=engine)
        except BaseException:
            self._discard()
            raise

    def wait(self) -> None:
        """Waits until all files are written, and durable where they are to be.

        Raises:
            SaveError: The operating system refused a step. No file is left.
        """
        failure = self.settle()
        if failure is not None:
            self._discard()
            raise failure

    def settle(self) -> BaseException | None:
        """Waits for the end of all files; the first error."""
        failures = [file.failure() for file in self._files]
        return next((each for each in failures if each is not None), None)

    def _discard(self) -> None:
        for file in self._files:
            file.discard()

    def paths(self) -> list[str]:
        return [file.path for file in self._files]

    def reports(self) -> list[SaveReport]:
        return [file.report() for file in self._files]

    def results(self) -> list[WriteResult]:
        return [
            WriteResult(
                index=item.index,
                size_in_bytes=length,
                storage_data=_StorageInfo(os.path.basename(file.path), at, length),
            )
            for file, bucket in zip(self._files, self._buckets, strict=True)
            for item, (at, length) in zip(bucket, file.places, strict=True)
        ]


def buckets(
    items: Sequence[WriteItem], nr_files: int, *, one_item_a_file: bool
) -> list[list[WriteItem]]:
    """The items of each file."""
    # Objects first, as PyTorch's writer has them.
    items = sorted(items, key=lambda item: item.type is not WriteItemType.BYTE_IO)
    if one_item_a_file:
        return [[item] for item in items]
    most = -(-sum(map(_nbytes, items)) // nr_files)
    made: list[list[WriteItem]] = []
    room = 0
    for item in items:
        if room <= 0:
            made.append([])
            room = most
        made[-1].append(item)
        room -= _nbytes(item)
    return made


def _nbytes(item: WriteItem) -> int:
    """About what it takes in a file."""
    if item.tensor_data is None:
        return 1024
    size = item.tensor_data.chunk.sizes
    return size.numel() * item.tensor_data.properties.dtype.itemsize + 1024
