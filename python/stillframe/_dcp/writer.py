"""`FileSystemWriter`: DCP's writer that uses the core's threads and commits in one step."""

from __future__ import annotations

import dataclasses
import errno
import functools
import logging
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

from stillframe._base import urls
from stillframe._base.calls import do_nothing
from stillframe._base.paths import CheckpointPath
from stillframe._dcp import checkpoint
from stillframe._dcp.checkpoint import RankFiles, Resolve, buckets
from stillframe._dcp.location import Directory, Location, StorageOptions, is_location, location_of
from stillframe._dcp.side_file import SideFile
from stillframe._dcp.staged import StateDict
from stillframe._dcp.stager import PinnedStager
from stillframe._save.engine import Engine, require_engine
from stillframe._save.report import SaveReport

log = logging.getLogger("stillframe")

Path = str | os.PathLike[str]

_PYTORCHS_WRITER = "torch.distributed.checkpoint.FileSystemWriter"
_VERSION = "1.0.0"  # of the metadata's format, as PyTorch's writer sets it


class FileSystemWriter(StorageWriter, AsyncStager):
    """Writes DCP checkpoints into a directory or below a URL, for `storage_writer=` of `dcp.save`
    and `dcp.async_save`. PyTorch's `FileSystemReader` and `FsspecReader` read them on any number of
    ranks, and `dcp_to_torch_save` converts them.

    The engine's threads write each rank's data, with CRCs and O_DIRECT. Each data file has a new
    name, and is synced before it gets this name. `.metadata` comes last: it is synced and renamed,
    and its directory and the directory's parent are synced. So a path that is saved to again always
    holds the old checkpoint or the new one. If any rank fails, the path holds the old one. Files
    that the new checkpoint does not need are removed afterwards.

    Below a URL (`s3://bucket/step100`) each file is an object, which is sent from the memory of the
    state and is durable when the store has acknowledged it.

    In `dcp.async_save` without `async_stager=`, the writer also stages, as `PinnedStager` does.

    Args:
        path: The directory, created with its parents if it is missing, or a URL. `checkpoint_id=`
            overrides it.
        overwrite: Allow a checkpoint to be replaced. With False, all ranks refuse that.
        durable: Sync files and directories. With False, a power failure may lose or damage the new
            checkpoint, and the old one with it.
        single_file_per_rank: Write one file per rank, or up to `thread_count`. With False, each
            tensor and object gets a file of its own.
        thread_count: The largest number of files per rank. The engine's threads
            (`Engine(writer_threads=)`) work on all of them.
        sync_files: PyTorch's name for `durable`: False means `durable=False`.
        per_thread_copy_ahead: Has no effect: tensors are copied from devices when they are staged.
        cache_staged_state_dict: Has no effect: the pool always reuses its memory.
        _extensions: An argument of PyTorch's writer; any other value than the default is refused.
        serialization_format: The same.
        engine: The engine to use, `stillframe.default_engine()` by default.
        storage_options: For a URL, what fsspec's file system for its scheme takes. By default the
            credentials are those of the environment.

    Attributes:
        save_id: The id of the save in the metadata, new for each save, as in PyTorch's writer.

    Raises:
        TypeError, ValueError: An invalid argument, or one that only PyTorch's writer supports.
    """

    _synchronize_after_execute = False  # DCP need not call `synchronize_staging`

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
        storage_options: StorageOptions = None,
    ) -> None:
        if _extensions:
            raise ValueError(f"_extensions are not supported: use {_PYTORCHS_WRITER}")
        if serialization_format is not SerializationFormat.TORCH_SAVE:
            raise ValueError(f"{serialization_format} is not supported: use {_PYTORCHS_WRITER}")
        if thread_count is not None and (type(thread_count) is not int or thread_count < 1):
            raise ValueError(f"thread_count has to be a positive int, not {thread_count!r}")
        if engine is not None:
            require_engine(engine)
        self._path: str | None = None
        self._location: Location | None = None
        self._storage_options = storage_options
        if path is not None:
            self._set_path(path)
        self._single_file_per_rank = single_file_per_rank
        self._durable = durable and sync_files
        self._nr_files = thread_count or 1  # the most files of this rank
        self._overwrite = overwrite
        self._engine = engine
        self._stager: PinnedStager | None = None
        self.save_id = str(uuid.uuid4())
        self.files_id = checkpoint.new_id()  # the id in the names of this rank's files
        self._rank: int | None = None  # this rank's number if each rank saves for itself
        self._has_directory = False  # the directory was made, or existed
        self._files: RankFiles | None = None
        self._ready: checkpoint.UncommittedCheckpoint | None = (
            None  # to commit; on the coordinator only
        )
        self._is_committing = False  # see `mark_as_committing`
        self.side_file: SideFile | None = None  # committed together with the checkpoint
        self.before_commit: Callable[[], object] = do_nothing  # called at the beginning of `commit`

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle for DCP's upload process, which has an engine and file
        names of its own."""
        return {
            **self.__dict__,
            "_engine": None,
            "_stager": None,
            "_files": None,
            "_ready": None,
            "files_id": checkpoint.new_id(),
            "before_commit": do_nothing,
        }

    # ---- staging ----

    def stage(self, state_dict: StateDict, **_: Any) -> ThreadFuture[StateDict]:
        """Copy `state_dict`, as `PinnedStager.stage` does."""
        if self._stager is None:
            self._stager = PinnedStager(self._engine)
        return self._stager.stage(state_dict)

    def synchronize_staging(self) -> None:
        """Do nothing: the next optimizer step waits for the copy, and the future reports it."""

    def close(self) -> None:
        """Do nothing, since the writer holds no resources. May be called again."""

    # ---- what DCP calls, in this order, for each save ----

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        """Return whether `checkpoint_id` is a path or a URL."""
        return is_location(checkpoint_id)

    @property
    def checkpoint_id(self) -> str | None:
        """The path or URL, which DCP logs; without credentials."""
        return None if self._path is None else urls.shown(self._path)

    def reset(self, checkpoint_id: Path | None = None) -> None:
        """Begin a save.

        Raises:
            TypeError, ValueError: `checkpoint_id` is neither a path nor a URL.
        """
        if checkpoint_id:
            self._set_path(checkpoint_id)
        self.save_id = str(uuid.uuid4())

    def storage_meta(self) -> StorageMeta:
        """Return the path and the save's id, which the metadata contains."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        # Without collectives, each rank saves a checkpoint for itself.
        saves_alone = not kwargs.get("use_collectives", True)
        self._rank = kwargs.get("rank") if saves_alone else None
        # A second save needs a new id. Not in `reset`, because not every caller calls `reset`.
        if self._files is not None:
            self.files_id = checkpoint.new_id()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the directory and refuse an existing checkpoint if `overwrite` is False.

        Raises:
            FileExistsError: A checkpoint exists and `overwrite` is False.
            OSError: The directory cannot be made, or the store does not answer.
        """
        location = self.location
        location.begin(durable=self._durable)
        self._has_directory = True
        if not self._overwrite and location.exists(checkpoint.metadata_name(self._rank)):
            raise FileExistsError(
                errno.EEXIST, "Checkpoint already exists, and overwrite=False", location.shown
            )
        if self._rank is not None:
            return dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{self._rank}_"))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return copies of the plans with the prefix of each rank's file names. A planner may keep
        the plans themselves."""
        prefixed = []
        for rank, plan in enumerate(plans):
            if plan.storage_data is None:
                plan = dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{rank}_"))
            prefixed.append(plan)
        return prefixed

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items and wait until their files are durable.

        Raises:
            SaveError: A system call or a request to the store failed. No file of this rank is left.
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
            metadata: `version`, `storage_data` and `storage_meta` are set after the commit, as
                PyTorch's writer does, because `dcp.save` returns the metadata.

        Raises:
            OSError: See `checkpoint.commit_metadata`.
        """
        storage_data = {each.index: each.storage_data for rank in results for each in rank}
        new = self.describe(metadata, storage_data)
        self.commit(new)
        metadata.version = new.metadata.version
        metadata.storage_data = new.metadata.storage_data
        metadata.storage_meta = new.metadata.storage_meta
        self.remove_unneeded_files()

    # ---- the steps of `write_data` and `finish`, for `JointSave` ----

    def lay_out(
        self, plan: SavePlan, resolve: Resolve, wait: Callable[[], object] = do_nothing
    ) -> RankFiles:
        """Lay out this rank's items in files. Nothing is written. For `wait` see `RankFiles`."""
        prefix = plan.storage_data.prefix
        self._files = RankFiles(
            buckets(plan.items, self._nr_files, one_item_a_file=not self._single_file_per_rank),
            resolve,
            self.location,
            lambda number: checkpoint.data_name(prefix, number, self.files_id),
            wait,
        )
        return self._files

    def start(self) -> None:
        """Start writing the files. Their tensors must not change until the files are written. After
        a SaveError no file of this rank is left."""
        assert self._files is not None
        self._files.start(durable=self._durable, engine=self._engine)

    def reports(self) -> list[SaveReport]:
        """Return the reports of this rank's files, which must be written."""
        return [] if self._files is None else self._files.reports()

    def describe(
        self, metadata: Metadata, storage_data: dict[MetadataIndex, _StorageInfo]
    ) -> checkpoint.UncommittedCheckpoint:
        """Write the metadata under a temporary name. Only the coordinator calls this. Errors are
        those of `checkpoint.prepare_metadata_commit`."""
        # Change a copy, because a later save uses the same object.
        metadata = dataclasses.replace(
            metadata, storage_data=storage_data, storage_meta=self.storage_meta()
        )
        metadata.version = _VERSION
        self._ready = checkpoint.prepare_metadata_commit(
            metadata, self.location, self._rank, self.files_id, durable=self._durable
        )
        return self._ready

    def mark_as_committing(self) -> None:
        """Record that all ranks have written their files. From now on the checkpoint may be
        committed, even if this rank gets an error."""
        self._is_committing = True

    def commit(self, new: checkpoint.UncommittedCheckpoint) -> None:
        """Call `before_commit`, then commit. After an error, discard the new checkpoint."""
        try:
            self.before_commit()
            commit_metadata = functools.partial(
                checkpoint.commit_metadata, new, durable=self._durable
            )
            if self.side_file is None:
                commit_metadata()
            else:
                assert isinstance(new.location, Directory)  # only a local directory has side files
                self.side_file.commit(
                    new.location.path, self.save_id, commit_metadata, durable=self._durable
                )
        except BaseException:
            checkpoint.discard_metadata(new)
            raise

    def remove_unneeded_files(self) -> None:
        """Remove files that the committed checkpoint does not need."""
        assert self._ready is not None
        checkpoint.remove_unreferenced_files(self._ready.metadata, self.location, self._rank)

    def abandon(self) -> None:
        """Remove the files of this rank after a save that failed on all ranks, and the directory if
        it is empty then."""
        if self._ready is not None:
            checkpoint.discard_metadata(self._ready)
        if self._is_committing and not self.location.failed_commit_is_over:
            log.warning(
                "stillframe: files of a failed save stay in %s until the next save: the store may"
                " still make the checkpoint that names them",
                self.location.shown,
            )
            return
        if self._files is not None:
            checkpoint.remove_failed_save_files(self._files.names(), self.location)
        if self._has_directory:
            self.location.remove_if_empty()

    # ---- the rest ----

    @property
    def location(self) -> Location:
        """Return where the files go; raise ValueError if no path was given."""
        if self._location is None:
            raise ValueError("no path to save to: give checkpoint_id=")
        return self._location

    def _set_path(self, path: Path) -> None:
        """Save to this path or URL from now on."""
        target = CheckpointPath.of(path)
        # DCP calls `reset` with the same path again. A relative path is not resolved again, because
        # the working directory may have changed.
        if target.text != self._path:
            self._location = location_of(target, self._storage_options)
            self._path = target.text
