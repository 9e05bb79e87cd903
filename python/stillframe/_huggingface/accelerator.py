"""`save_state` and `load_state` for Accelerate.

Accelerate writes its own files. Its `save_state` runs on a checkpoint directory under a temporary
name, and `redirect` sends the files that it saves there to stillframe's writers. This module
handles the directories: their names, which of them may be replaced, and which one to load.
`accelerator_saves.py` has the ranks that fill a directory, and the removal of old ones.
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
from stillframe._huggingface.accelerator_saves import saves_of
from stillframe._huggingface.redirect import redirected
from stillframe._save import api, ordered
from stillframe._save.checkpoint import Checkpoint, checkpoint
from stillframe._save.directory import DirectorySave
from stillframe._save.engine import Engine
from stillframe._save.handle import SaveHandle
from stillframe._save.options import OnDurable
from stillframe.errors import SaveError, StillframeError

# Accelerate's own methods. A subclass may have overridden them by methods that call this module.
_accelerates_save = Accelerator.save_state
_accelerates_load = Accelerator.load_state

_UNSUPPORTED = {
    DistributedType.FSDP: "FSDP",
    DistributedType.DEEPSPEED: "DeepSpeed",
    DistributedType.MEGATRON_LM: "Megatron-LM",
    DistributedType.XLA: "XLA",
}
# Accelerate's own files, as opposed to those that hooks and users add.
_OWN = re.compile(
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
        The handle of the save. On every rank its `result()` waits until the checkpoint is durable.
        It returns the report on the rank that writes, and None on other ranks.

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
    saves = saves_of(accelerator)

    def opened() -> AbstractContextManager[Any]:
        files = checkpoint(path, on_durable=on_durable, engine=engine)
        return _opened(path, files, is_automatic)

    def write(files: Any) -> None:
        with redirected(files), _without_automatic_naming(config):
            _accelerates_save(accelerator, files.path, safe_serialization, **save_model_func_kwargs)

    iteration = config.iteration
    try:
        handle = saves.save(path, opened, write)
    except BaseException:
        config.iteration = iteration  # on every rank, so that the next call takes the same name
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

    # Both functions return a string, because `share` sends the result to other ranks.
    def wait() -> str:
        if directory is not None:
            with contextlib.suppress(OSError):  # Accelerate says what is missing
                ordered.wait_for_directory(os.path.expanduser(directory))
        return ""

    def find() -> str:
        wait()
        return _newest(accelerator) if looks_for_one else ""

    name = saves_of(accelerator).share(wait, find)
    if looks_for_one:
        input_dir = os.path.join(_checkpoints(accelerator), name)
    _accelerates_load(accelerator, input_dir, load_kwargs, **load_model_func_kwargs)


def _refuse_unsupported(accelerator: Accelerator) -> None:
    """Raise ValueError for a kind of training whose checkpoints cannot be redirected."""
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
    """Open the checkpoint. At the end of the block, refuse to replace an old directory if that
    would delete files that are not Accelerate's.

    Args:
        path: The checkpoint's directory.
        opening: A context manager that opens the checkpoint.
        is_automatic: The path was named automatically, so it must not exist yet.
    """
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
    """Return the names of files that the replacement of the old directory would delete: those that
    the new directory does not have, without Accelerate's own files."""
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


def _lacks(accelerator: Accelerator, path: str, names: list[str], disk: Disk) -> str | None:
    """Return which file a checkpoint lacks that the accelerator would load; None if it has all.
    This is the argument `incomplete` of `newest.find`."""
    # The kinds of training that are not supported name their files differently.
    if accelerator.distributed_type not in _UNSUPPORTED:
        for stem, parts in (
            ("optimizer", accelerator._optimizers),
            ("scheduler", accelerator._schedulers),
        ):
            for number in range(len(parts)):
                name = f"{stem}_{number}.bin" if number else f"{stem}.bin"
                if name not in names:
                    return f"it has no {name}"
    # `kinds.incomplete` wants an optimizer.bin. Without optimizers the file counts as present.
    not_needed = [] if accelerator._optimizers else ["optimizer.bin"]
    return kinds.incomplete(path, names + not_needed, disk)


@contextlib.contextmanager
def _without_automatic_naming(config: ProjectConfiguration) -> Iterator[None]:
    """Inside the block, have Accelerate save to the directory that it is given."""
    is_automatic = config.automatic_checkpoint_naming
    config.automatic_checkpoint_naming = False
    try:
        yield
    finally:
        config.automatic_checkpoint_naming = is_automatic
