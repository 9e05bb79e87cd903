"""`save_state` and `load_state` for Accelerate.

Accelerate's own `save_state` writes into a directory with a temporary name. `redirect` sends these
files to stillframe's writers. This module decides the names of the directories, whether an old
directory may be replaced, and which directory to load.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType, ProjectConfiguration

from stillframe._base import paths
from stillframe._base.disk import Disk
from stillframe._check import kinds, newest
from stillframe._huggingface.accelerator_saves import get_or_create_saves
from stillframe._huggingface.redirect import redirect_saves_to
from stillframe._save import api, ordered
from stillframe._save.checkpoint import Checkpoint, checkpoint
from stillframe._save.directory import DirectorySave
from stillframe._save.engine import Engine
from stillframe._save.handle import SaveHandle
from stillframe._save.options import OnDurable
from stillframe.errors import SaveError, StillframeError

# Accelerate's own methods, kept here because a subclass may override them and call this module.
_accelerates_save = Accelerator.save_state
_accelerates_load = Accelerator.load_state

# Kinds of training that cannot be saved here, with their names for messages.
_UNSUPPORTED = {
    DistributedType.FSDP: "FSDP",
    DistributedType.DEEPSPEED: "DeepSpeed",
    DistributedType.MEGATRON_LM: "Megatron-LM",
    DistributedType.XLA: "XLA",
}
# The names of the files that Accelerate itself writes.
_ACCELERATES_FILES = re.compile(
    r"(model|pytorch_model|optimizer|scheduler|sampler|dl_state_dict)(_\d+)?\.(safetensors|bin)"
    r"|(random_states|custom_checkpoint)_\d+\.pkl|scaler\.pt"
)


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
            saved. These settings of its `ProjectConfiguration` are used:
            `automatic_checkpoint_naming`, `total_limit`, `iteration`, `save_on_each_node`. An old
            checkpoint beyond `total_limit` is removed when the new one is durable.
        output_dir: The directory; ignored with automatic naming. Missing parents are made.
        safe_serialization: Save models as safetensors; False saves `pytorch_model.bin`.
        on_durable: Called as `on_durable(path, report)` when the checkpoint is durable, on the rank
            that writes it.
        engine: The engine to use, `stillframe.default_engine()` by default.
        **save_model_func_kwargs: Passed on to Accelerate.

    Returns:
        The handle of the save. On every rank, `result()` waits until the checkpoint is durable.
        `result()` returns the report on the rank that writes, and None on other ranks.

    Raises:
        ValueError: FSDP, DeepSpeed, Megatron-LM, XLA or tensor parallelism is in use. Or no
            directory is given. Or the next automatic name is taken.
        StillframeError: The directory holds files that would be lost, or another rank failed.
        SaveError, BusyError, ForkError, Exception: As `async_save`, and what hooks raise.
    """
    _refuse_unsupported(accelerator)
    config = accelerator.project_configuration
    is_automatic = config.automatic_checkpoint_naming
    path = _directory(accelerator, output_dir)
    saves = get_or_create_saves(accelerator)

    def open_directory() -> AbstractContextManager[Any]:  # called on the leader only
        files = checkpoint(path, on_durable=on_durable, engine=engine)
        return _open_checkpoint_directory(path, files, is_automatic)

    def write(files: Any) -> None:
        with redirect_saves_to(files), _without_automatic_naming(config):
            _accelerates_save(accelerator, files.path, safe_serialization, **save_model_func_kwargs)

    iteration = config.iteration
    try:
        handle = saves.save(path, open_directory, write)
    except BaseException:
        config.iteration = iteration  # so that the next call takes the same name
        raise
    if is_automatic and saves.is_leader and handle.state != "skipped":
        saves.rotate(path, config.total_limit)
    return handle


def load_state(
    accelerator: Accelerator,
    input_dir: str | os.PathLike[str] | None = None,
    load_kwargs: dict[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> None:
    """Load with `Accelerator.load_state`, after the saves in flight.

    Args:
        accelerator: As for `save_state`; all ranks call this.
        input_dir: The directory. Without one, and with `automatic_checkpoint_naming`, the newest
            complete checkpoint is loaded. Damaged checkpoints are skipped and logged.
        load_kwargs: Passed on to Accelerate.
        **load_model_func_kwargs: Passed on to Accelerate.

    Raises:
        FileNotFoundError: No checkpoint is complete.
        StillframeError: The rank that looks for the checkpoint failed.
        ValueError, Exception: What `Accelerator.load_state` raises.
    """
    is_automatic = accelerator.project_configuration.automatic_checkpoint_naming
    finds_newest = input_dir is None and is_automatic
    directory = _checkpoints(accelerator) if finds_newest else input_dir

    def wait_for_saves() -> str:
        if directory is not None:
            with contextlib.suppress(OSError):  # the load below raises Accelerate's own error
                ordered.wait_for_saves_in_directory(os.path.expanduser(directory))
        return ""  # `share` needs a string

    def wait_and_find_newest_name() -> str:
        wait_for_saves()
        return _newest_checkpoint_name(accelerator) if finds_newest else ""

    # Only rank 0 looks for the checkpoint. The leaders of other machines wait for their saves.
    name = get_or_create_saves(accelerator).share(wait_for_saves, wait_and_find_newest_name)
    if finds_newest:
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
    """Return the parent directory of automatically named checkpoints."""
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
    return paths.parse_local_path(output_dir)


@contextlib.contextmanager
def _open_checkpoint_directory(
    path: str, opening: Checkpoint, is_automatic: bool
) -> Iterator[Checkpoint]:
    """Open the checkpoint with `opening`. At the end of the block, fail if the save would delete
    files that are not Accelerate's. An automatically named path must not exist yet."""
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
        if not isinstance(save, DirectorySave):  # the engine was busy, so the save is skipped
            return
        lost = _files_that_save_would_delete(path, save)
        if lost:
            raise StillframeError(
                f"{path} was not saved: the directory is replaced as a whole, and its"
                f" {', '.join(lost)} would be lost. Save to a directory of its own"
            )


def _files_that_save_would_delete(path: str, save: DirectorySave) -> list[str]:
    """Return the names of files in the old directory that the save would delete. Accelerate's own
    files do not count."""
    old = set(os.listdir(path)) if os.path.isdir(path) else set()
    new = {name.split("/")[0] for name in save.names}.union(os.listdir(save.directory))
    return sorted(name for name in old - new if not _ACCELERATES_FILES.fullmatch(name))


def _newest_checkpoint_name(accelerator: Accelerator) -> str:
    """Return the name of the newest complete checkpoint, or raise FileNotFoundError."""
    directory = _checkpoints(accelerator)
    path = None
    if os.path.isdir(directory):
        path = newest.find(directory, incomplete=functools.partial(_why_incomplete, accelerator))
    if path is None:
        raise FileNotFoundError(errno.ENOENT, "there is no complete checkpoint", directory)
    return os.path.basename(path)


def _why_incomplete(
    accelerator: Accelerator, path: str, names: list[str], disk: Disk
) -> str | None:
    """Return a sentence about a file that the checkpoint lacks, or None if it has all files.
    `names` are the names of its files."""
    # The unsupported kinds of training name their files differently.
    if accelerator.distributed_type not in _UNSUPPORTED:
        for stem, objects in (
            ("optimizer", accelerator._optimizers),
            ("scheduler", accelerator._schedulers),
        ):
            for number in range(len(objects)):
                name = f"{stem}_{number}.bin" if number else f"{stem}.bin"
                if name not in names:
                    return f"it has no {name}"
    if not accelerator._optimizers:
        # `kinds.incomplete` asks for an optimizer.bin in any case, and this file is not needed.
        names = [*names, "optimizer.bin"]
    return kinds.incomplete(path, names, disk)


@contextlib.contextmanager
def _without_automatic_naming(config: ProjectConfiguration) -> Iterator[None]:
    """Let Accelerate save to the directory that is passed to it."""
    is_automatic = config.automatic_checkpoint_naming
    config.automatic_checkpoint_naming = False
    try:
        yield
    finally:
        config.automatic_checkpoint_naming = is_automatic
