"""`Reader`: PyTorch's FileSystemReader, with checksums compared before anything is loaded."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
from collections.abc import Iterator
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from stillframe._base import urls
from stillframe._base.paths import CheckpointPath
from stillframe._dcp.check import refuse_damaged_items
from stillframe._dcp.fetch import Item, ItemPrefetcher
from stillframe._dcp.location import Prefix, StorageOptions, is_location

Path = str | os.PathLike[str]


class Reader(FileSystemReader):
    """PyTorch's `FileSystemReader`, for `storage_reader=` of `dcp.load`, also for URLs. With
    `verify=True` it compares the CRCs of everything that a rank is about to read, before any state
    is changed.

    So every item is read twice, the second time mostly from the page cache. From a store, an item
    is fetched twice unless it fits into a quarter of the free memory, together with the items
    before it. Checkpoints of any writer can be read. In items without CRCs only the structure is
    checked.

    If anything is damaged, the load raises DCP's `CheckpointException` on every rank. It has a
    `CorruptCheckpointError`, with the item and the file, of each rank that found damage.

    Args:
        path: The checkpoint's directory or URL.
        verify: Compare the CRCs.
        storage_options: For a URL, what fsspec's file system for its scheme takes. By default the
            credentials are those of the environment.

    Raises:
        TypeError, ValueError: `path` or `storage_options` cannot be used.
    """

    def __init__(
        self, path: Path, *, verify: bool = True, storage_options: StorageOptions = None
    ) -> None:
        super().__init__(path)
        self._verify = verify
        self._storage_options = storage_options
        self._set_path(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        """Return whether `checkpoint_id` is a path or a URL."""
        return is_location(checkpoint_id)

    def reset(self, checkpoint_id: Path | None = None) -> None:
        """Begin a load."""
        super().reset()
        if checkpoint_id:
            self._set_path(checkpoint_id)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items.

        Raises:
            CorruptCheckpointError: An item is damaged. No state was changed.
            OSError: The disk or the store does not give an item's bytes.
        """
        stored = {item.storage_index: self.storage_data[item.storage_index] for item in plan.items}
        items = [
            Item(
                info.relative_path,
                info.offset,
                info.length,
                name=str(index.fqn),
                is_checkable=not getattr(info, "transform_descriptors", None),
            )
            for index, info in stored.items()
        ]
        if isinstance(self.fs, _RemoteFileSystem):
            return self._read_from_store(self.fs, items, plan, planner)
        if self._verify:
            refuse_damaged_items(
                os.fspath(self.path),
                [
                    (each.name, each.file, each.offset, each.length)
                    for each in items
                    if each.is_checkable
                ],
            )
        return self._read_with_pytorch(plan, planner)

    def _read_from_store(
        self, objects: _RemoteFileSystem, items: list[Item], plan: LoadPlan, planner: LoadPlanner
    ) -> Future[None]:
        """Read items from a store, in the order of their offsets."""

        def offset(item: Any) -> tuple[str, int]:
            info = self.storage_data[item.storage_index]
            return info.relative_path, info.offset

        with objects.fetched(items, verify=self._verify) as fetched:
            if self._verify:
                fetched.check()
            plan = dataclasses.replace(plan, items=sorted(plan.items, key=offset))
            return self._read_with_pytorch(plan, planner)

    def _read_with_pytorch(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        done: Future[Any] = super().read_data(plan, planner)
        return done

    def _set_path(self, path: Path) -> None:
        """Set `fs` and `path`, through which PyTorch's reader reads files."""
        target = CheckpointPath.of(path)
        if target.remote:
            self.fs: Any = _RemoteFileSystem(Prefix(target.text, self._storage_options))
            self.path: Any = target.shown  # without credentials, because DCP logs it
            return
        urls.refuse_storage_options(path, self._storage_options)
        self.fs = FileSystem()
        self.path = self.fs.init_path(urls.local_path_of_file_url(target.text))


class _RemoteFileSystem:
    """The files below a URL, with the methods of `FileSystem` that PyTorch's reader calls."""

    def __init__(self, location: Prefix) -> None:
        self._location = location
        self._fetched: ItemPrefetcher | None = None

    @contextlib.contextmanager
    def fetched(self, items: list[Item], *, verify: bool) -> Iterator[ItemPrefetcher]:
        """Inside the block, have `create_stream` open data files with only these items."""
        with ItemPrefetcher(self._location, items, verify=verify) as self._fetched:
            try:
                yield self._fetched
            finally:
                self._fetched = None

    def concat_path(self, path: Path, suffix: str) -> str:
        return suffix  # a name below the URL, which `create_stream` takes

    @contextlib.contextmanager
    def create_stream(self, path: str, mode: str) -> Iterator[io.IOBase]:
        if self._fetched is None:  # outside `fetched`, only the metadata is read
            yield io.BytesIO(self._location.read(path))
            return
        with self._fetched.open(path) as data:
            yield data
