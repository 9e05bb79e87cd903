"""`save_state` and `load_state` for Accelerate.

Accelerate writes its own files. Its `save_state` runs on a checkpoint directory under a temporary
name, and `redirect` sends the files that it saves there to stillframe's writers. This module adds
what belongs to the directory: its name, the ranks that fill it, when old ones are removed, and
which one is loaded.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType, ProjectConfiguration

from stillframe._base import paths
from stillframe._check import kinds, newest
from stillframe._huggingface.ranks import Beside, Ranks, ranks_of
from stillframe._huggingface.redirect import redirected
from stillframe._save import api, ordered
from stillframe._save.checkpoint import Checkpoint, checkpoint
from stillframe._save.directory import DirectorySave
from stillframe._save.engine import Engine
from stillframe._save.handle import Deadline, SaveHandle, State, error_of
from stillframe._save.options import OnDurable
from stillframe.errors import SaveError, StillframeError

# Those of the class: a subclass may call ours in their place.
_accelerates_save = Accelerator.save_state
_accelerates_load = Accelerator.load_state

_UNSUPPORTED = {
    DistributedType.FSDP: "FSDP",
    DistributedType.DEEPSPEED: "DeepSpeed",
    DistributedType.MEGATRON_LM: "Megatron-LM",
    DistributedType.XLA: "XLA",
}
_NAME = re.compile(r"checkpoint_(\d+)")
# Accelerate's own files, as opposed to those that hooks and users add.
_OWN = re.compile(
    r"(model|pytorch_model|optimizer|scheduler|sampler|dl_state_dict)(_\d+)?\.(safetensors|bin)"
    r"|(random_states|custom_checkpoint)_\d+\.pkl|scaler\.pt"
)
# Each rank of Accelerate writes these under one name. The leader's stay.
_LEADERS = re.compile(r"scaler\.pt|dl_state_dict(_\d+)?\.bin")
_POLL_S = 0.01


def save_state(
    accelerator: Accelerator,
    output_dir: str | os.PathLike[str] | None = None,
    safe_serialization: bool = True,
    *,
    on_durable: OnDurable | None = None,
    engine: Engine | None = None,
    **save_model_func_kwargs: Any,
) -> SaveHandle:
    """Save what `Accelerator.save_state` saves, in the same files, without stopping training.

    The directory appears when all its files are durable. A directory of the same name is replaced
    as a whole. With several ranks all of them call this, as they do for Accelerate.

    Args:
        accelerator: Its models, optimizers, schedulers, dataloaders and registered objects are
            saved. Its `ProjectConfiguration` counts: `automatic_checkpoint_naming`, `total_limit`,
            `iteration`, `save_on_each_node`. With `total_limit` an old checkpoint is removed when
            the new one is durable, so there may be one more for a while.
        output_dir: The directory. Missing parents are made. It is ignored with automatic naming.
        safe_serialization: Save models as safetensors; False saves `pytorch_model.bin`.
        on_durable: Called as `on_durable(path, report)` when the checkpoint is durable, on the rank
            that writes it.
        engine: The engine to use, `stillframe.default_engine()` by default.
        **save_model_func_kwargs: Passed on to Accelerate.

    Returns:
        The handle of the save. On every rank its `result()` waits until the checkpoint is durable;
        the report is the writing rank's, and None on others.

    Raises:
        ValueError: FSDP, DeepSpeed, Megatron-LM, XLA or tensor parallelism is in use; no directory
            is given; the next automatic name is taken.
        StillframeError: The directory holds files that would be lost, or another rank failed.
        SaveError, BusyError, ForkError, Exception: As `async_save`, and what hooks raise.
    """
    _refuse_unsupported(accelerator)
    config = accelerator.project_configuration
    is_automatic = config.automatic_checkpoint_naming
    path = _directory(accelerator, output_dir)
    saves = _saves_of(accelerator)

    def opened() -> AbstractContextManager[Any]:
        files = checkpoint(path, on_durable=on_durable, engine=engine)
        return _opened(path, files, is_automatic)

    def write(files: Any) -> None:
        with redirected(files), _unnamed(config):
            _accelerates_save(accelerator, files.path, safe_serialization, **save_model_func_kwargs)

    handle = saves.save(path, opened, write)
    if is_automatic and saves.is_leader and handle.state != "skipped":
        saves.rotate(path, config.total_limit)
    return handle


def load_state(
    accelerator: Accelerator,
    input_dir: str | os.PathLike[str] | None = None,
    load_kwargs: dict[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> None:
    """Load with `Accelerator.load_state`, behind the saves in flight.

    Args:
        accelerator: As for `save_state`; all ranks call this.
        input_dir: The directory. Without one, and with `automatic_checkpoint_naming`, the newest
            complete checkpoint is loaded. Damaged and unfinished ones are skipped and logged.
        load_kwargs: Passed on to Accelerate.
        **load_model_func_kwargs: Passed on to Accelerate.

    Raises:
        FileNotFoundError: No checkpoint is complete.
        StillframeError: The rank that looks for the checkpoint failed.
        ValueError, Exception: What `Accelerator.load_state` raises.
    """
    is_automatic = accelerator.project_configuration.automatic_checkpoint_naming
    looks_for_one = input_dir is None and is_automatic
    directory = _checkpoints(accelerator) if looks_for_one else input_dir

    def wait() -> str:
        if directory is not None:
            with contextlib.suppress(OSError):  # Accelerate says what is missing
                ordered.wait_for_directory(os.path.expanduser(directory))
        return ""

    def find() -> str:
        wait()
        return _newest(accelerator) if looks_for_one else ""

    name = _saves_of(accelerator).share(wait, find)
    if looks_for_one:
        input_dir = os.path.join(_checkpoints(accelerator), name)
    _accelerates_load(accelerator, input_dir, load_kwargs, **load_model_func_kwargs)


def _refuse_unsupported(accelerator: Accelerator) -> None:
    kind = _UNSUPPORTED.get(accelerator.distributed_type)
    parallel = accelerator.parallelism_config
    if kind is None and parallel is not None and parallel.tp_enabled:
        kind = "tensor parallelism"
    if kind is not None:
        raise ValueError(
            f"stillframe.accelerate does not save with {kind}: call accelerator.save_state, which"
            " waits until the files are written"
        )


# ---- directories ----


def _checkpoints(accelerator: Accelerator) -> str:
    """Return the directory of automatically named checkpoints."""
    return os.path.join(accelerator.project_dir, "checkpoints")


def _directory(accelerator: Accelerator, output_dir: str | os.PathLike[str] | None) -> str:
    """Return the directory to save to, as Accelerate names it."""
    if accelerator.project_configuration.automatic_checkpoint_naming:
        name = f"checkpoint_{accelerator.save_iteration}"
        return os.path.join(_checkpoints(accelerator), name)
    if output_dir is None:
        raise ValueError(
            "save_state needs output_dir, or an Accelerator with"
            " ProjectConfiguration(automatic_checkpoint_naming=True)"
        )
    return paths.as_text(output_dir)


@contextlib.contextmanager
def _opened(path: str, opening: Checkpoint, is_automatic: bool) -> Iterator[Checkpoint]:
    """Open the checkpoint, and refuse to replace what is none."""
    if is_automatic and api.exists(path):
        raise ValueError(
            f"{path} exists already: set ProjectConfiguration(iteration=...) to the number of the"
            " next checkpoint"
        )
    try:
        paths.make_directories(os.path.dirname(os.path.abspath(path)), durable=True)
    except OSError as error:
        raise SaveError(error.errno or errno.EIO, str(error.strerror), path, "open") from None
    with opening as files:
        yield files
        save = files.handle
        if isinstance(save, DirectorySave) and (lost := _lost(path, save)):
            raise StillframeError(
                f"{path} was not saved: the directory is replaced as a whole, and its"
                f" {', '.join(lost)} would be lost. Save to a directory of its own"
            )


def _lost(path: str, save: DirectorySave) -> list[str]:
    """Return what is in the old directory, and neither in the new one nor Accelerate's."""
    old = set(os.listdir(path)) if os.path.isdir(path) else set()
    new = {name.split("/")[0] for name in save.names}.union(os.listdir(save.directory))
    return sorted(name for name in old - new if not _OWN.fullmatch(name))


def _newest(accelerator: Accelerator) -> str:
    """Return the name of the newest complete checkpoint."""
    directory = _checkpoints(accelerator)
    found = None
    if os.path.isdir(directory):
        found = newest.find(directory, incomplete=functools.partial(_lacks, accelerator))
    if found is None:
        raise FileNotFoundError(errno.ENOENT, "there is no complete checkpoint", directory)
    return os.path.basename(found)


def _lacks(accelerator: Accelerator, path: str, names: list[str]) -> str | None:
    """Return what a checkpoint lacks that the accelerator loads."""
    if accelerator.distributed_type not in _UNSUPPORTED:  # those have other names
        for stem, parts in (
            ("optimizer", accelerator._optimizers),
            ("scheduler", accelerator._schedulers),
        ):
            for number in range(len(parts)):
                name = f"{stem}_{number}.bin" if number else f"{stem}.bin"
                if name not in names:
                    return f"it has no {name}"
    needs_none = [] if accelerator._optimizers else ["optimizer.bin"]
    return kinds.incomplete(path, names + needs_none)


@contextlib.contextmanager
def _unnamed(config: ProjectConfiguration) -> Iterator[None]:
    """Have Accelerate save to the directory that it is given."""
    is_automatic = config.automatic_checkpoint_naming
    config.automatic_checkpoint_naming = False
    try:
        yield
    finally:
        config.automatic_checkpoint_naming = is_automatic


# ---- the saves of one Accelerator ----


class _Saves:
    """The saves of one Accelerator, seen by one rank.

    Attributes:
        is_leader: This rank opens the directories and removes old ones.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        arguments = SimpleNamespace(
            world_size=accelerator.num_processes,
            process_index=accelerator.process_index,
            local_process_index=accelerator.local_process_index,
            save_on_each_node=False,
        )
        self._all = self._ranks = ranks_of(arguments)
        if accelerator.project_configuration.save_on_each_node:
            arguments.save_on_each_node = True
            self._ranks = ranks_of(arguments)
        self._is_elsewhere = arguments.process_index != arguments.local_process_index
        self._number = 0  # of a call, the same on all ranks
        self._in_flight: list[SaveHandle] = []
        self.is_leader = self._ranks is None or self._ranks.is_leader

    def share(self, wait: Callable[[], str], find: Callable[[], str]) -> str:
        """Return what `find()` returns on rank 0, after `wait()` on the leader of this rank."""
        self._number += 1
        key = f"load/{self._number}"
        if self._ranks is None or self._all is None:
            return find()
        if self._ranks is not self._all:
            self._ranks.share(key, wait)
        return self._all.share(key, find)

    def save(
        self,
        path: str,
        opened: Callable[[], AbstractContextManager[Any]],
        write: Callable[[Any], object],
    ) -> SaveHandle:
        """Have all ranks write into one directory.

        Args:
            path: The directory.
            opened: Opens it, on the leader.
            write: Called with the open checkpoint, on each rank.
        """
        self._number += 1
        if not self.is_leader:
            return self._follow(path, write)
        ranks, number = self._ranks, self._number
        self._in_flight = [each for each in self._in_flight if not each.done()]
        try:
            with contextlib.ExitStack() as block:
                files: Any = None

                def open_it() -> str:
                    nonlocal files
                    files = block.enter_context(opened())
                    directory: str = files.path
                    return directory

                if ranks is None:
                    open_it()
                    write(files)
                else:
                    ranks.share(f"{number}/opened", open_it)
                    write(files)
                    ranks.wait_written(number, f"{number}/opened")
        except BaseException as error:
            self._tell_ended(number, None, error)
            raise
        handle: SaveHandle = files.handle
        if not handle.done():  # it is if it was skipped
            self._in_flight.append(handle)
        self._tell_ended(number, handle)
        return handle

    def _follow(self, path: str, write: Callable[[Any], object]) -> SaveHandle:
        """Write into the directory that the leader has opened."""
        ranks, number = self._ranks, self._number
        assert ranks is not None
        directory = ranks.share(f"{number}/opened", str)
        try:
            if not os.path.isdir(directory):
                raise StillframeError(
                    f"{path} is written by a rank on another machine, and its files are not visible"
                    " here. Give a directory on a shared file system, or set save_on_each_node=True"
                )
            write(_OfRank(directory, durable=self._is_elsewhere))
        except BaseException as error:
            ranks.report_written(number, error)
            raise
        ranks.report_written(number, None)
        return _Followed(path, ranks, number)

    def _tell_ended(
        self, number: int, handle: SaveHandle | None, failed: BaseException | None = None
    ) -> None:
        """Tell the other ranks how call `number` ends, once the saves in flight have ended."""
        ranks = self._ranks
        if ranks is None:
            return

        def tell(_: object = None) -> None:
            error = failed if handle is None else error_of(handle)
            ranks.tell_ended(number, None if error is None else str(error))

        if self._in_flight:
            self._in_flight[-1].add_done_callback(tell)
        else:
            tell()

    def rotate(self, path: str, limit: int | None) -> None:
        """Remove the oldest checkpoints beside `path`, behind its save, so that `limit` remain."""
        if limit is None:
            return
        directory, new = os.path.split(path)
        names = {*os.listdir(directory), *(os.path.basename(each.path) for each in self._in_flight)}
        numbers = {
            int(matched[1]): name
            for name in names - {new}
            if (matched := _NAME.fullmatch(name)) and api.exists(os.path.join(directory, name))
        }
        for number in sorted(numbers)[: max(0, len(numbers) + 1 - limit)]:
            api.remove(os.path.join(directory, numbers[number]))


_saves: weakref.WeakKeyDictionary[Accelerator, _Saves] = weakref.WeakKeyDictionary()


def _saves_of(accelerator: Accelerator) -> _Saves:
    if accelerator not in _saves:
        _saves[accelerator] = _Saves(accelerator)
    return _saves[accelerator]


class _OfRank(Beside):
    """The leader's directory, as another rank sees it."""

    def save(self, obj: object, name: str) -> None:
        if not _LEADERS.fullmatch(name):
            super().save(obj, name)


_exiting = threading.Event()
_followers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def _stop_followers() -> None:
    """End the threads before the interpreter: one that is in the store then aborts the process."""
    _exiting.set()
    for thread in list(_followers):
        thread.join()


atexit.register(_stop_followers)


class _Followed(SaveHandle):
    """The handle of a save on a rank that does not lead it. A thread asks how it has ended."""

    def __init__(self, path: str, ranks: Ranks, number: int) -> None:
        super().__init__(path, path)
        self._outcome.cancellable = False
        self._ranks, self._number = ranks, number
        self._over = threading.Event()
        thread = threading.Thread(target=self._follow, name="sf-follow", daemon=True)
        _followers.add(thread)
        thread.start()

    @property
    def state(self) -> State:
        self._birth.refuse_child()
        if not self._outcome.settled:
            return "writing"
        return "durable" if self._outcome.error is None else "failed"

    def _is_staged(self) -> bool:
        return True  # this rank's files were written in the call

    def _wait_until_ended(self, deadline: Deadline) -> None:
        self._birth.refuse_child()
        if not self._over.wait(deadline.left()):
            raise self._timeout_error(deadline, "durable")

    def _follow(self) -> None:
        error: Exception | None
        try:
            while not self._ranks.has_ended(self._number):
                if _exiting.wait(_POLL_S):
                    raise StillframeError("the interpreter is exiting")
            error = self._ranks.error_of(self._number)
        except Exception as lost:  # the store is gone
            error = StillframeError(
                f"the rank that saves {self._path} did not tell how the save ended: {lost}"
            )
        self._outcome.settle(None, error, is_known=True)  # the leader's process reports it
        self._outcome.notify()
        self._over.set()
