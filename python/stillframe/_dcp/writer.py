"""`FileSystemWriter`: a rank's data through the core's threads, and the commit."""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
import uuid
from collections.abc import Callable
from concurrent.futures import Future as ThreadFuture
from typing import Any

from torch.distributed.checkpoint.filesystem import (
    SerializationFormat,
    _StorageInfo,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from stillframe._base import paths
from stillframe._dcp import checkpoint
from stillframe._dcp.beside import Beside
from stillframe._dcp.checkpoint import RankFiles, Resolve, buckets
from stillframe._dcp.staged import StateDict
from stillframe._dcp.stager import PinnedStager
from stillframe._save.engine import Engine, refuse_no_engine
from stillframe._save.report import SaveReport

Path = str | os.PathLike[str]

_STOCK = "torch.distributed.checkpoint.FileSystemWriter"
_VERSION = "1.0.0"  # of the metadata's format


class FileSystemWriter(StorageWriter, AsyncStager):
    """Writes checkpoints of DCP into a directory, for `storage_writer=` of `dcp.save` and
    `dcp.async_save`. PyTorch's own `FileSystemReader`, other numbers of ranks and
    `dcp_to_torch_save` read them.

    Each rank's data goes through the threads of its engine, with CRCs and O_DIRECT. Data files have
    names of their save; each is synced before it gets its name. `.metadata` comes last, is synced,
    renamed, and its directory and that one's parent are synced. So a path that is saved to again
    holds the old checkpoint or the new one at every moment, and where any rank fails, the old one.
    Files that the new checkpoint does not need are removed afterwards.

    Given to `dcp.async_save` without `async_stager=`, it stages as `PinnedStager` does.

    Args:
        path: The directory, created with its parents if it is missing. `checkpoint_id=` takes its
            place. For remote directories (`scheme://`) use PyTorch's `FsspecWriter`.
        overwrite: Allow a checkpoint to be replaced. With False that is refused, on all ranks.
        durable: Sync files and directories. With False, a power failure may lose or damage the new
            checkpoint, and the old one with it.
        single_file_per_rank: One file a rank, or as many as `thread_count` says. False gives each
            tensor and object a file of its own.
        thread_count: The most files of a rank. The threads are the engine's
            (`Engine(writer_threads=)`) and work on all of them.
        sync_files: PyTorch's name: False means `durable=False`.
        per_thread_copy_ahead: Has no effect: the engine's copy threads copy tensors from devices
            when they are staged.
        cache_staged_state_dict: Has no effect: the pool always reuses its memory.
        _extensions: PyTorch's own writer has it; anything but the default is refused.
        serialization_format: Likewise.
        engine: The engine to use, `stillframe.default_engine()` by default.

    Attributes:
        save_id: What the metadata calls the save, a new one each time; as PyTorch's writer has it.

    Raises:
        TypeError, ValueError: An invalid argument, or one that only PyTorch's writer supports.
    """

    _synchronize_after_execute = False

    def __init__(
        self,
        path: Path | None = None,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int | None = None,
        per_thread_copy_ahead: int = 0,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Any = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        *,
        durable: bool = True,
        engine: Engine | None = None,
    ) -> None:
        if _extensions:
            raise ValueError(f"_extensions are not supported: use {_STOCK}")
        if serialization_format is not SerializationFormat.TORCH_SAVE:
            raise ValueError(f"{serialization_format} is not supported: use {_STOCK}")
        if thread_count is not None and (type(thread_count) is not int or thread_count < 1):
            raise ValueError(f"thread_count has to be a positive int, not {thread_count!r}")
        if engine is not None:
            refuse_no_engine(engine)
        self._path: str | None = None
        self._place = ""
        if path is not None:
            self._go_to(path)
        self._single_file_per_rank = single_file_per_rank
        self._durable = durable and sync_files
        self._nr_files = thread_count or 1
        self._overwrite = overwrite
        self._engine = engine
        self._stager: PinnedStager | None = None
        self.save_id = str(uuid.uuid4())
        self.files_id = checkpoint.new_id()
        self._rank: int | None = None  # where each rank saves for itself
        self._is_begun = False
        self._files: RankFiles | None = None
        self._new: checkpoint.New | None = None
        self.beside: Beside | None = None
        self.before_commit: Callable[[], object] = int

    def __getstate__(self) -> dict[str, Any]:
        """For the process that DCP saves in: it has engines of its own, and names too."""
        none = dict.fromkeys(("_engine", "_stager", "_files", "_new"))
        return {**self.__dict__, **none, "files_id": checkpoint.new_id(), "before_commit": int}

    # ---- staging ----

    def stage(self, state_dict: StateDict, **_: Any) -> ThreadFuture[StateDict]:
        """As `PinnedStager.stage`."""
        if self._stager is None:
            self._stager = PinnedStager(self._engine)
        return self._stager.stage(state_dict)

    def synchronize_staging(self) -> None:
        """Nothing: the future tells of the end, and the next optimizer step waits for it."""

    def close(self) -> None:
        """Nothing to give back. May be called again."""

    # ---- what DCP calls, in this order, for each save ----

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        """Whether it is a local path."""
        try:
            paths.as_text(checkpoint_id)
        except (TypeError, ValueError):
            return False
        return True

    @property
    def checkpoint_id(self) -> str | None:
        return self._path

    def reset(self, checkpoint_id: Path | None = None) -> None:
        """A save begins.

        Raises:
            TypeError, ValueError: It is not a path, or a remote one.
        """
        if checkpoint_id:
            self._go_to(checkpoint_id)
        self.save_id = str(uuid.uuid4())

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._path, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        alone = not kwargs.get("use_collectives", True)
        self._rank = kwargs.get("rank") if alone else None
        # `reset` is not called by everybody: no name may be used twice.
        if self._files is not None:
            self.files_id = checkpoint.new_id()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """
        Raises:
            FileExistsError: There is a checkpoint, and it is not to be overwritten.
            OSError: The directory cannot be made.
        """
        directory = self.directory
        paths.make_directories(directory, self._durable)
        self._is_begun = True
        existing = checkpoint.metadata_path(directory, self._rank)
        if not self._overwrite and os.path.exists(existing):
            raise FileExistsError(
                errno.EEXIST, "Checkpoint already exists, and overwrite=False", directory
            )
        if self._rank is not None:
            return dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{self._rank}_"))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # Plans may be kept by the planner from save to save, so there is nothing of this one in it.
        return [
            dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{number}_"))
            if plan.storage_data is None
            else plan
            for number, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's items and waits until their files are durable.

        Raises:
            SaveError: The operating system refused a step. No file of this rank stays.
        """
        files = self.lay_out(plan, planner.resolve_data)
        self.start()
        files.wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(files.results())
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint. Only the coordinator calls this.

        Args:
            metadata: Gets `version`, `storage_data` and `storage_meta` once the checkpoint is
                committed: `dcp.save` returns it, and PyTorch's writer fills it too.

        Raises:
            OSError: See `checkpoint.put_in_place`.
        """
        where = {each.index: each.storage_data for rank in results for each in rank}
        new = self.describe(metadata, where)
        self.commit(new)
        metadata.version = new.metadata.version
        metadata.storage_data = new.metadata.storage_data
        metadata.storage_meta = new.metadata.storage_meta
        self.tidy()

    # ---- the steps of these two, for `JointSave` ----

    def lay_out(
        self, plan: SavePlan, resolve: Resolve, wait: Callable[[], object] = int
    ) -> RankFiles:
        """This rank's items in their files; nothing is written.

        Args:
            wait: Returns when the tensors' bytes are there; called where they are looked at.
        """
        prefix = plan.storage_data.prefix
        self._files = RankFiles(
            buckets(plan.items, self._nr_files, one_item_a_file=not self._single_file_per_rank),
            resolve,
            self.directory,
            lambda number: checkpoint.data_name(prefix, number, self.files_id),
            wait,
        )
        return self._files

    def start(self) -> None:
        """Begins to write what is laid out, which may not change before that has ended.

        Raises:
            SaveError: The operating system refused a step. No file of this rank stays.
        """
        assert self._files is not None
        self._files.start(durable=self._durable, engine=self._engine)

    def reports(self) -> list[SaveReport]:
        """Of the files that are written."""
        return [] if self._files is None else self._files.reports()

    def describe(
        self, metadata: Metadata, storage_data: dict[MetadataIndex, _StorageInfo]
    ) -> checkpoint.New:
        """On the coordinator: what is to be committed, all but its name.

        Raises:
            OSError: See `checkpoint.write`.
        """
        # A copy: a plan that is kept gives the same one for the next save.
        metadata = dataclasses.replace(
            metadata, storage_data=storage_data, storage_meta=self.storage_meta()
        )
        metadata.version = _VERSION
        self._new = checkpoint.write(
            metadata, self.directory, self._rank, self.files_id, durable=self._durable
        )
        return self._new

    def commit(self, new: checkpoint.New) -> None:
        """
        Raises:
            OSError: See `checkpoint.put_in_place`.
        """
        try:
            self.before_commit()
            put_in_place = functools.partial(checkpoint.put_in_place, new, durable=self._durable)
            if self.beside is None:
                put_in_place()
            else:
                directory = self.directory
                self.beside.commit(directory, self.save_id, put_in_place, durable=self._durable)
        except BaseException:
            checkpoint.discard(new)
            raise

    def tidy(self) -> None:
        """Removes what the checkpoint that was committed does not need."""
        assert self._new is not None
        checkpoint.remove_unnamed(self._new.metadata, self.directory, self._rank)

    def abandon(self) -> None:
        """Removes what this rank has written of a save that is known to have failed everywhere, and
        with the last rank's files a directory that was not there, or empty."""
        if self._new is not None:
            checkpoint.discard(self._new)
        if self._files is not None:
            checkpoint.remove_files(self._files.paths(), self.directory)
        if self._is_begun:
            checkpoint.remove_if_empty(self.directory)

    # ---- the rest ----

    @property
    def directory(self) -> str:
        """Where the path led when it was given: it stays there, wherever the process goes."""
        if self._path is None:
            raise ValueError("no path to save to: give checkpoint_id=")
        return self._place

    def _go_to(self, path: Path) -> None:
        text = paths.as_text(path)
        if text != self._path:  # DCP resets it on its own thread again
            self._path, self._place = text, os.path.abspath(text)
