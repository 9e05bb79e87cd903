"""`Reader`: PyTorch's own, which compares checksums first."""

from __future__ import annotations

import os
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from stillframe._dcp.check import refuse_wrong_items


class Reader(FileSystemReader):
    """PyTorch's `FileSystemReader`, for `storage_reader=` of `dcp.load`, which with `verify=True`
    compares the CRCs of all that a rank is about to read before it sets a byte of its state.

    Every item is read once more for that, mostly from the system's cache. Checkpoints of any writer
    can be read; what was written without CRCs is only looked at.

    Args:
        path: The checkpoint's directory.
        verify: Compare.

    On damage every rank's load raises DCP's `CheckpointException`, which shows the
    `CorruptCheckpointError` with the item and the file of each rank that found some.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True) -> None:
        super().__init__(path)
        self._verify = verify

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads this rank's items.

        Raises:
            CorruptCheckpointError: One is damaged. Nothing was read.
        """
        if self._verify:
            infos = {
                item.storage_index: self.storage_data[item.storage_index] for item in plan.items
            }
            refuse_wrong_items(
                os.fspath(self.path),
                [
                    (str(index.fqn), info.relative_path, info.offset, info.length)
                    for index, info in infos.items()
                    if not getattr(info, "transform_descriptors", None)
                ],
            )
        done: Future[Any] = super().read_data(plan, planner)
        return done
