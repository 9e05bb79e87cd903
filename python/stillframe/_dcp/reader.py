"""`Reader`: PyTorch's FileSystemReader, with checksums compared before anything is loaded."""

from __future__ import annotations

import os
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from stillframe._dcp.check import refuse_damaged_items


class Reader(FileSystemReader):
    """PyTorch's `FileSystemReader`, for `storage_reader=` of `dcp.load`. With `verify=True` it
    compares the CRCs of everything that a rank is about to read, before any state is changed.

    So every item is read twice, the second time mostly from the page cache. Checkpoints of any
    writer can be read. Of items without CRCs only the structure is checked.

    Args:
        path: The checkpoint's directory.
        verify: Compare the CRCs.

    If anything is damaged, the load raises DCP's `CheckpointException` on every rank, with a
    `CorruptCheckpointError` that names the item and the file for each rank that found damage.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True) -> None:
        super().__init__(path)
        self._verify = verify

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items.

        Raises:
            CorruptCheckpointError: An item is damaged. No state was changed.
        """
        if self._verify:
            infos = {
                item.storage_index: self.storage_data[item.storage_index] for item in plan.items
            }
            refuse_damaged_items(
                os.fspath(self.path),
                [
                    (str(index.fqn), info.relative_path, info.offset, info.length)
                    for index, info in infos.items()
                    if not getattr(info, "transform_descriptors", None)
                ],
            )
        done: Future[Any] = super().read_data(plan, planner)
        return done
