"""The public functions around engines, and the process's default engine."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from typing import Unpack

from stillframe import _core
from stillframe._base import file_kinds, paths, urls
from stillframe._base.arguments import check_booleans
from stillframe._base.calls import inside_call
from stillframe._save import completion, directory, ordered, uploads
from stillframe._save.engine import Engine, Path, is_closed, is_used, require_engine
from stillframe._save.handle import Deadline, SaveHandle
from stillframe._save.options import (
    EngineOptions,
    Format,
    OnDurable,
    SaveOptions,
    format_of,
)
from stillframe._save.outcome import take_uncollected_failures
from stillframe._save.remote import StorageOptions, remove_object, start_save, will_exist
from stillframe._save.report import SaveReport
from stillframe.errors import StillframeError

_logger = logging.getLogger("stillframe")


class _DefaultEngineHolder:
    """The default engine of one process.

    Attributes:
        engine: The engine, made by the first `get`.
        options: The arguments for a new engine, set by `configure`.
        was_returned: `default_engine()` has returned the engine.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal handler may save inside `get`
        self.engine: Engine | None = None
        self.options: EngineOptions = {}
        self.was_returned = False

    def get(self) -> Engine:
        """Return the engine. Make one if there is none, or if the user has closed it."""
        with self.lock:
            if self.engine is None or is_closed(self.engine):
                self.engine = Engine(**self.options)
                self.was_returned = False
            return self.engine

    def configure(self, options: EngineOptions) -> None:
        with self.lock:
            engine = self.engine
            if engine is not None and self._is_in_use(engine):
                raise StillframeError(
                    "configure() comes too late: the default engine is in use. Call it before the"
                    " first save, snapshot or default_engine(), or save with an Engine of your own."
                    f" In use is {engine!r}"
                )
            Engine(**options).close()  # raises for options that an engine refuses
            self.options = options
            self.engine = None
            if engine is not None:
                engine.close()

    def _is_in_use(self, engine: Engine) -> bool:
        return not is_closed(engine) and (self.was_returned or is_used(engine))

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


_default = _DefaultEngineHolder()


def default_engine() -> Engine:
    """Return the process's default engine. A forked child gets its own."""
    engine = _default.get()
    _default.was_returned = True
    return engine


def engine_or_default(engine: Engine | None) -> Engine:
    """Return `engine`, or the default engine for None. Raise TypeError for another object."""
    if engine is None:
        return _default.get()
    require_engine(engine)
    return engine


def configure(**engine_options: Unpack[EngineOptions]) -> None:
    """Set the options of the default engine before its first use.

    Each of these counts as a use: a save or snapshot that is not refused, `warm_up`, and
    `default_engine()`.

    Args:
        **engine_options: The options of `Engine`: `pool_bytes`, `block_bytes`,
            `writer_threads`, `max_in_flight`, `when_busy`, `shared_memory`. Options left out have
            `Engine`'s defaults, even if an earlier call set them.

    Raises:
        StillframeError: The default engine is in use already.
        TypeError, ValueError: As `Engine` does.
    """
    options = ", ".join(EngineOptions.__annotations__)
    for name in engine_options:
        if name not in EngineOptions.__annotations__:
            raise TypeError(f"configure() has no option {name!r}: an engine's are {options}")
    _default.configure(engine_options)


def close_default_engine() -> None:
    """Close the default engine, if there is one. Called at the end of the process."""
    _default.close()


def async_save(
    obj: object,
    path: Path,
    *,
    overlap: bool = True,
    durable: bool = True,
    check_mutation: bool = False,
    on_durable: OnDurable | None = None,
    format: Format | None = None,
    metadata: Mapping[str, str] | None = None,
    mirror: str | None = None,
    storage_options: StorageOptions = None,
    engine: Engine | None = None,
) -> SaveHandle:
    """Save `obj` to `path` as `torch.save` would, without stopping training.

    A path that ends in ".safetensors" gets a safetensors file instead.

    The file holds the state as it is now. Values that only an optimizer's step changes are copied
    after the call, under the next forward and backward. The next step waits for the copy by itself.
    Everything else is copied before the call returns: see docs/guarantees.md.

    Args:
        obj: Anything `torch.save` takes. For safetensors: a dict of names and tensors, contiguous
            and without common memory, as `safetensors.torch.save_file` takes.
        path: A local path in an existing directory, or a URL such as "s3://bucket/run/step100.pt".
            Links are followed. At a URL the object is the old or the new one at every moment.
            Durable then means that the store has acknowledged the object: see docs/remote.md.
        overlap: False copies everything during the call.
        durable: Sync the file and its directory. False skips both: after a power failure the path
            holds the old file, the new one, or a damaged one, which `load` notices.
        check_mutation: Compute a checksum of all bytes that are copied after the call, once at the
            call and once when they are copied. If the two differ, code has written at the wrong
            time, and the save fails. Slow.
        on_durable: Called as `on_durable(path, report)` on a thread of its own when the file is
            durable.
        format: "torch" or "safetensors", whatever the path's ending.
        metadata: For safetensors: names and strings that the file's header holds as `__metadata__`.
        mirror: For local paths: the URL of a directory in a store, such as "s3://bucket/run/". The
            durable file is uploaded there in the background, under its own name: see
            docs/remote.md.
        storage_options: Credentials and other options of the path's or the mirror's store, as
            fsspec takes them. By default they come from the environment.
        engine: The engine to use, `default_engine()` by default.

    Raises:
        TypeError, ValueError: Unusable arguments.
        SaveError: (phase "open") The parent directory is missing, or the path is a directory or not
            a regular file.
        BusyError, ForkError, StillframeError: See `Engine`.
        Exception: What `torch.save` raises for an object it cannot save; a note says where in
            `obj` it is. For safetensors: what `safetensors.torch.save_file` raises.
    """
    options = SaveOptions(
        overlap=overlap,
        durable=durable,
        check_mutation=check_mutation,
        on_durable=on_durable,
        format=format_of(path) if format is None else format,
        metadata=metadata,
        mirror=uploads.new_mirror_upload(path, mirror, storage_options, durable=durable),
    )
    # With a mirror the path is local, and the options belong to the mirror's store.
    path_options = storage_options if mirror is None else None
    return start_save(engine_or_default(engine), obj, path, options, path_options)


def save(
    obj: object,
    path: Path,
    *,
    durable: bool = True,
    format: Format | None = None,
    metadata: Mapping[str, str] | None = None,
    mirror: str | None = None,
    storage_options: StorageOptions = None,
    engine: Engine | None = None,
) -> SaveReport:
    """Save `obj` to `path` as `torch.save` would and return when the file is durable.

    A path that ends in ".safetensors" gets a safetensors file instead. If the engine has no free
    slot, `save` waits for one, whatever the engine's `when_busy` says.

    Args:
        obj: Anything `torch.save` takes. It is copied during the call.
        path: A local path or a URL; see `async_save`.
        durable: Sync the file and its directory; see `async_save`.
        format: See `async_save`.
        metadata: See `async_save`.
        mirror: See `async_save`. The call does not wait for the upload.
        storage_options: See `async_save`.
        engine: The engine to use, `default_engine()` by default.

    Returns:
        What the save did, and what it cost.

    Raises:
        SaveError: The operating system refused a step; the old file is untouched.
        TypeError, ValueError, ForkError, StillframeError, Exception: As `async_save`.
    """
    # Nothing is deferred: this thread takes no optimizer step before the call returns.
    options = SaveOptions(
        overlap=False,
        durable=durable,
        wait_for_slot=True,
        format=format_of(path) if format is None else format,
        metadata=metadata,
        mirror=uploads.new_mirror_upload(path, mirror, storage_options, durable=durable),
    )
    path_options = storage_options if mirror is None else None  # as in `async_save`
    handle = start_save(engine_or_default(engine), obj, path, options, path_options)
    report: SaveReport = handle.result()
    return report


def remove(
    path: Path, *, wait_for_mirror: bool = True, storage_options: StorageOptions = None
) -> None:
    """Remove a file, link or directory tree, in the order of submission; return at once.

    The remove runs when every save submitted before it has ended, and only if the last of them
    became durable. Otherwise the name stays and a warning is logged. So removing an old checkpoint
    after saving a new one always leaves at least one. An error of the operating system is logged.

    In a process that saves with a mirror, a file that still has to be uploaded is removed only
    after its upload. Until then `exists` returns False for it. It is not removed if a later save
    replaces it. If the process ends before the upload, the file stays and a line is printed.

    Args:
        path: A local path, or the URL of an object or of all objects below it. A missing path is
            not an error. Of a symbolic link, only the link is removed. A directory is removed with
            everything in it. If it is a checkpoint of torch.distributed.checkpoint, its `.metadata`
            is removed first.
        wait_for_mirror: False removes the file at once, so it is not uploaded.
        storage_options: See `async_save`.

    Raises:
        TypeError, ValueError: `path` is not a path, or the store does not take the options.
        StillframeError: The interpreter is exiting.
    """
    check_booleans(wait_for_mirror=wait_for_mirror)
    if urls.is_remote(path):
        remove_object(path, storage_options)
        return
    urls.refuse_storage_options(path, storage_options)
    key = paths.key(path, follow_link=False)
    _warn_of_tilde(path, _core.log_exists(key))
    completion.thread.start()
    if uploads.postpone_remove(key, lambda: _start_postponed_remove(key), wait=wait_for_mirror):
        return  # the remove will be submitted after the upload
    _core.log_remove(key)
    if completion.thread.drain_is_over and not ordered.is_in_external_work():
        _core.log_drain(None)  # at exit nobody else waits for the remove


def _start_postponed_remove(key: bytes) -> None:
    """Submit a remove that was postponed until after an upload, also while the process exits."""
    completion.thread.start(under_way=True)
    _core.log_remove(key)


def exists(path: Path, *, storage_options: StorageOptions = None) -> bool:
    """Return whether `path` will exist when all saves and removes submitted so far have ended.

    A checkpoint of torch.distributed.checkpoint exists if its directory has `.metadata`, which is
    written last and removed first.

    Args:
        path: A local path or a URL. A symbolic link exists if its target does.
        storage_options: See `async_save`.

    Raises:
        TypeError, ValueError: `path` is not a path, or the store does not take the options.
        OSError: The store does not answer.
    """
    if urls.is_remote(path):
        return will_exist(path, storage_options)
    urls.refuse_storage_options(path, storage_options)
    key = paths.key(path, follow_link=False)
    if uploads.is_postponed(key):
        return False
    log_answer = _core.log_exists(key)  # 1 or 0; 2: see below; -1: ask the file system
    if log_answer < 0 and os.path.islink(path):  # no entry of the log concerns the link itself
        log_answer = _core.log_exists(paths.key(path, follow_link=True))
    _warn_of_tilde(path, log_answer)
    if log_answer == 2:  # the path is below a checkpoint of several files that is under way
        return directory.will_exist_in_saved_directory(key)
    if log_answer >= 0:
        return bool(log_answer)
    if not os.path.lexists(path):  # a writer that died may have moved it aside
        paths.put_back(paths.parse_local_path(path))
    return file_kinds.exists(path)


def _warn_of_tilde(path: Path, log_answer: int) -> None:
    """Log that "~" is not expanded, if `path` begins with it and nothing is there. `log_answer` is
    what `log_exists` returned for the path."""
    text = paths.parse_local_path(path)
    if log_answer < 0 and paths.tilde_hint(text) and not os.path.lexists(text):
        _logger.warning("stillframe: nothing is at %s%s", text, paths.tilde_hint(text))


def wait_all(timeout: float | None = None, *, mirrors: bool = False) -> None:
    """Wait until every save and remove of the process has ended. Raise the first error of a save
    that no handle has raised yet.

    Call it at the end of a training. Without this call, saves still finish and errors are printed,
    but the process's exit status does not show them.

    Args:
        timeout: Seconds; None waits forever.
        mirrors: Wait also for uploads to mirrors, and for the removes that wait for uploads. The
            wait does not end while a store cannot be reached.

    Raises:
        StillframeError, Exception: The error of a save.
        TimeoutError: `timeout` seconds passed.
    """
    ordered.refuse_in_external_work()
    check_booleans(mirrors=mirrors)
    deadline = Deadline(timeout)
    with inside_call():
        _wait_until_log_is_empty(deadline)
        if mirrors:
            left = uploads.wait(deadline.left())
            if left is not None:
                raise TimeoutError(f"not uploaded yet: {left}")
            _wait_until_log_is_empty(deadline)  # for the removes that waited for uploads
    failures = take_uncollected_failures(first_only=True)
    if failures:
        raise failures[0].error


def _wait_until_log_is_empty(deadline: Deadline) -> None:
    """Wait until the log is empty, or raise TimeoutError. Settle the handles."""
    if not _core.log_drain(deadline.left()):
        raise TimeoutError(f"after {deadline.timeout:g} s: {describe_unfinished_saves()}")
    settle_ended_saves()


def describe_unfinished_saves() -> str:
    """Return words about the saves and removes that have not ended, for messages."""
    count = _core.log_pending()
    words = "save or remove has" if count == 1 else "saves and removes have"
    sentence = f"{count} {words} not ended yet"
    saves = [f"{save.path}: {save.state}" for save in list(completion.in_flight.values())]
    if saves:
        sentence += f" ({', '.join(saves)})"
    unanswered = _core.log_unanswered()  # about a file system that does not answer, or ""
    if unanswered:
        sentence += f"; {unanswered}"
    return sentence


def settle_ended_saves() -> None:
    for handle in list(completion.in_flight.values()):
        handle.done()  # records the outcome, if the save has ended


def _reset_in_forked_child() -> None:
    global _default
    options = _default.options
    _default = _DefaultEngineHolder()
    _default.options = options


os.register_at_fork(after_in_child=_reset_in_forked_child)
