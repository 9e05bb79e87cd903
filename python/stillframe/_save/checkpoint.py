"""`checkpoint`: several files that become visible as one directory.

    with checkpoint(path) as files:     takes a slot, makes a temporary directory next to `path`
        files.save(obj, name)           submits a save for this file, which shares the slot
        files.save_safetensors(...)     the same for safetensors; `shards.py` splits large dicts
        write(files.path)               anyone may write other files into the directory
    files.handle                        the handle of the directory's save

`directory.py` has the save of the directory. This module has the `with` block and the file names.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from types import TracebackType

from torch import Tensor

from stillframe import _core
from stillframe._base import paths, urls
from stillframe._base.calls import inside_call
from stillframe._save import completion, ordered, uploads
from stillframe._save.api import engine_or_default
from stillframe._save.core_save import CoreSave
from stillframe._save.directory import DirectorySave
from stillframe._save.engine import Engine, Path, limits_of, note_use
from stillframe._save.handle import SaveHandle, SkippedSave, set_mirror, wait_for_end
from stillframe._save.objects import new_remote_checkpoint_save
from stillframe._save.options import Format, OnDurable, SaveOptions, Size, format_of
from stillframe._save.remote import StorageOptions
from stillframe._save.shards import split
from stillframe.errors import BusyError, StillframeError


def checkpoint(
    path: Path,
    *,
    durable: bool = True,
    overlap: bool = True,
    on_durable: OnDurable | None = None,
    mirror: str | None = None,
    storage_options: StorageOptions = None,
    engine: Engine | None = None,
) -> Checkpoint:
    """Save several files that become visible together, as the directory `path`.

        with stillframe.checkpoint("checkpoint-10") as files:
            files.save(model.state_dict(), "model.pt")
            files.save(optimizer.state_dict(), "optimizer.pt")
            with open(os.path.join(files.path, "config.json"), "w") as file:
                json.dump(config, file)
        files.handle.result()   # optional: durable; raises what went wrong

    Inside the block, `files.path` is a temporary directory next to `path`. `files.save` copies an
    object as `async_save` does. Until the block ends, anyone may write other files into
    `files.path`, and into new directories below it.

    The end of the block submits the save and returns. In the background all files are written and
    synced. Then the directory gets its name, in the order of all saves, and its parent is synced.

    An existing directory is replaced as a whole, so it should hold nothing else. The path names the
    old directory or the new one at every moment. The old one is removed when the new one is
    durable. On a file system that cannot exchange two directories (NFS), the path is missing for a
    moment; see docs/guarantees.md.

    At a URL the files become objects below it, sent while the block goes on. Then `files.path` is a
    local directory; files that others write there are sent when the block has ended. A small
    object, `.stillframe.json`, is written last. It marks the objects as one complete checkpoint:
    `exists` and `latest` ignore objects without it. When all bytes of a new checkpoint are in the
    store, the marker of the old one is removed first.

    If the block raises, or any file fails, nothing of the checkpoint is left, and the old directory
    stays. After the end of the block, `load`, `exists` and `remove` find the files of the new
    directory below `path`.

    Args:
        path: The directory, whose parent must exist, or a URL. Links are followed.
        durable: Sync everything. False skips all syncs, also of files that others write.
        overlap: False copies everything during the calls of `files.save`.
        on_durable: Called as `on_durable(path, report)` on a thread of its own when the directory
            is durable.
        mirror: For local paths: the URL of a directory in a store. The files of the durable
            checkpoint are uploaded to a directory of its name there, followed by the object
            `.stillframe.json`; see docs/remote.md.
        storage_options: See `async_save`.
        engine: The engine to use, `default_engine()` by default. When the block begins, the whole
            checkpoint takes one of the `max_in_flight` slots.

    Returns:
        A context manager; `as` gives the `Checkpoint`.

    Raises:
        TypeError, ValueError: Unusable arguments.
        SaveError: (phase "open", when the block begins) The parent is missing or not writable, or
            the path is not a directory.
        BusyError, ForkError, StillframeError: (when the block begins) See `Engine`. In place of a
            BusyError, an engine with `when_busy="skip"` lets the block run, keeps nothing of it,
            and the state of the handle is "skipped".
    """
    # With a mirror the path is local, and the options belong to the mirror's store.
    path_options = storage_options if mirror is None else None
    if not urls.is_remote(path):
        urls.refuse_storage_options(path, path_options)
    options = SaveOptions(
        overlap=overlap,
        durable=durable,
        on_durable=on_durable,
        mirror=uploads.new_mirror_upload(path, mirror, storage_options, durable=durable),
    )
    return Checkpoint(path, options, engine_or_default(engine), path_options)


class Checkpoint:
    """The files of one checkpoint, while its block runs. Made by `checkpoint`; used once."""

    _save: DirectorySave | None = None  # None before the block has begun
    _skipped: SkippedSave | None = None  # the user's handle, if the engine was busy and may skip

    def __init__(
        self,
        path: Path,
        options: SaveOptions,
        engine: Engine,
        storage_options: StorageOptions = None,
    ) -> None:
        self._given = path
        self._text = urls.shown(path) if urls.is_remote(path) else paths.parse_local_path(path)
        self._storage_options = storage_options
        self._options = options
        self._engine = engine

    def __repr__(self) -> str:
        return f"<Checkpoint {self._text!r}>"

    # ---- for users ----

    @property
    def path(self) -> str:
        """The temporary directory that the block fills."""
        return self._require_save().directory

    @property
    def handle(self) -> SaveHandle:
        """The handle of the whole checkpoint. Wait for it after the block."""
        save = self._require_save()
        return save if self._skipped is None else self._skipped

    def save(self, obj: object, name: str) -> None:
        """Save `obj` as a file of the checkpoint; copy it as `async_save` does.

        Args:
            obj: Anything `torch.save` takes.
            name: A path relative to the checkpoint; directories in it are made.

        Raises:
            TypeError, ValueError: `name` is not a relative path, or was saved already.
            StillframeError: The `with` block has ended.
            Exception: As `async_save`. The caller may catch it and go on without this file.
        """
        relative = _normalize_file_name(name)
        self._start_file_save(obj, relative, format_of(relative), None)

    def save_safetensors(
        self,
        tensors: Mapping[str, Tensor],
        name: str,
        metadata: Mapping[str, str] | None = None,
        max_shard_size: Size | None = None,
    ) -> None:
        """Save tensors as a safetensors file of the checkpoint, or as several.

        Args:
            tensors: What `safetensors.torch.save_file` takes.
            name: A path relative to the checkpoint that ends in ".safetensors".
            metadata: Strings that the file's header holds besides the tensors.
            max_shard_size: The most bytes of tensors in one file: an int, or a string such as
                "5GB". A larger dict is split as `save_pretrained` does, into files such as
                "model-00001-of-00003.safetensors" with the index "model.safetensors.index.json".

        Raises:
            TypeError, ValueError, StillframeError: As `save`; or another argument is unusable.
            OSError: The index could not be written.
            Exception: As `safetensors.torch.save_file`, for tensors that it refuses.
        """
        shards = split(tensors, _normalize_file_name(name), max_shard_size)
        if shards.index_name:
            self._reserve_name(shards.index_name)
        for file, part in shards.files.items():
            self._start_file_save(part, file, "safetensors", metadata)
        if shards.index_name and self._skipped is None:
            with open(os.path.join(self.path, shards.index_name), "xb") as index:
                index.write(shards.index)

    # ---- the block ----

    def __enter__(self) -> Checkpoint:
        if self._save is not None:
            raise StillframeError("a checkpoint is used once: call stillframe.checkpoint() again")
        try:
            with inside_call() as nested:
                self._begin(time.perf_counter(), nested)
            return self
        except BaseException:
            self._give_up_if_open("its block did not begin")
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            with inside_call():
                save = self._require_save()
                if self._skipped is not None:
                    save.give_up("the engine was busy")
                elif kind is None:
                    save.launch()
        finally:
            why = "its block raised" if kind is not None else "its end was interrupted"
            self._give_up_if_open(why)  # does nothing after `launch`
        if completion.thread.drain_is_over:  # at exit nobody settles the save later
            wait_for_end(save)

    def __del__(self) -> None:
        self._give_up_if_open("its block was never left")

    def _begin(self, entered: float, nested: bool) -> None:
        """Take a slot and make the temporary directory. `entered` is the time of the entry."""
        ordered.refuse_in_external_work()  # because the call may wait for a slot
        completion.thread.start()
        save: DirectorySave
        if urls.is_remote(self._given):
            save = new_remote_checkpoint_save(
                self._given, self._storage_options, self._options.on_durable, entered=entered
            )
        else:
            save = self._new_directory_save(entered)
        self._save = save
        try:
            set_mirror(save, self._options.mirror)
            save.take_slot(self._engine, nested=nested)
        except BusyError:
            if limits_of(self._engine).when_busy != "skip":
                raise
            self._skipped = SkippedSave(self._text)
        save.open()  # even if the save is skipped, because the block writes into the directory
        note_use(self._engine)

    def _new_directory_save(self, entered: float) -> DirectorySave:
        durable = self._options.durable
        target = paths.target(
            self._given, follow_link=True, create_parents=False, durable=durable, directory=True
        )
        return DirectorySave(
            self._text,
            self._given,
            self._options.on_durable,
            entered=entered,
            folder=_core.Folder(target.directory, target.name, durable),
            key=os.path.join(target.directory, target.name),
        )

    def _give_up_if_open(self, why: str) -> None:
        """Give the save up for the reason `why`, unless the block has ended already."""
        save = self._save
        if save is not None and save.is_open():
            save.give_up(why)
            save.close()

    def _require_save(self) -> DirectorySave:
        """Return the save, or raise StillframeError if the block has not begun."""
        if self._save is None:
            raise StillframeError("use it as `with stillframe.checkpoint(path) as files:`")
        return self._save

    def _reserve_name(self, name: str) -> None:
        """Reserve the name of a file, and make the directories in it."""
        save = self._require_save()
        save.refuse_closed()
        if name in save.names:
            raise ValueError(f"{name} was saved already in this checkpoint")
        os.makedirs(os.path.dirname(os.path.join(save.directory, name)), exist_ok=True)
        save.names.add(name)

    def _start_file_save(
        self, obj: object, name: str, format: Format, metadata: Mapping[str, str] | None
    ) -> None:
        """Start the save of a file; if the call raises, the name is free again."""
        save = self._require_save()
        self._reserve_name(name)
        if self._skipped is not None:  # the engine was busy: nothing is saved
            return
        created: list[CoreSave] = []  # gets the file's save, once it exists
        try:
            options = SaveOptions(
                overlap=self._options.overlap,
                durable=self._options.durable,
                follow_link=False,
                wait_for_slot=True,
                ordered=False,
                format=format,
                metadata=metadata,
                shown=os.path.join(self._text, name),
            )
            save.submit_file(self._engine, obj, name, options, created.append)
        except BaseException:
            save.names.discard(name)
            for file in created:
                save.drop(file)
            raise


def _normalize_file_name(name: object) -> str:
    """Return a file's name without "." and empty components. Raise TypeError or ValueError if the
    name is not below the checkpoint."""
    if not isinstance(name, (str, os.PathLike)):
        raise TypeError(f"a file's name has to be a str, not {type(name).__name__}")
    text = paths.parse_local_path(name)
    parts = text.split("/")
    if text.startswith("/") or ".." in parts or parts[-1] in ("", "."):
        raise ValueError(
            f"{text!r} is not a file in the checkpoint: give a relative name without '..'"
        )
    return "/".join(part for part in parts if part not in ("", "."))
