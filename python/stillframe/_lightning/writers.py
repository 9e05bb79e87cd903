"""Chooses the code that writes, reads and removes a plugin's checkpoints, and the engine.

    if                           checkpoints are written by
    checkpoint_io is given       that CheckpointIO, from a snapshot (`wrapped.py`)
    torch.save was replaced      Lightning's TorchCheckpointIO, from a snapshot
    neither                      stillframe itself

A function that replaced `torch.save` does not keep stillframe's promises. So this case is logged
once, and the report of every such save names it.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from stillframe._base import urls
from stillframe._base.arguments import check_booleans
from stillframe._base.distributed import may_have_other_local_ranks
from stillframe._base.paths import CheckpointPath
from stillframe._lightning.callers import iter_checkpoint_ios
from stillframe._lightning.work import Work
from stillframe._lightning.wrapped import WrappedIO
from stillframe._load.load import load
from stillframe._preemption import in_time
from stillframe._save import uploads
from stillframe._save.api import async_save, engine_or_default, save
from stillframe._save.engine import Engine, limits_of, require_engine
from stillframe._save.handle import SaveHandle
from stillframe._save.options import (
    DEFAULT_IN_FLIGHT,
    EngineOptions,
    OnDurable,
    SaveOptions,
    Size,
    WhenBusy,
)
from stillframe._save.remote import start_save

log = logging.getLogger("stillframe")

OnError = Literal["raise", "warn"]

_REPLACED = (
    "Lightning's TorchCheckpointIO wrote it, as torch.save is not torch's own and that one calls"
    " it: it is not synced."
)
# With these environment variables, torch.load overrides `weights_only`.
_FORCED = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")


@dataclass(frozen=True, slots=True)
class PluginOptions:
    """The options of `CheckpointPlugin`, except for `checkpoint_io`.

    Raises:
        TypeError, ValueError: `Engine` refuses an option, the engine skips saves, or `engine` is
            given together with an option of an engine.
    """

    engine: Engine | None = None
    pool_bytes: Size | None = None
    max_in_flight: int = DEFAULT_IN_FLIGHT
    when_busy: WhenBusy = "wait"
    durable: bool = True
    overlap: bool = True
    check_mutation: bool = False
    on_durable: OnDurable | None = None
    on_error: OnError = "raise"
    log_metrics: bool = False
    deadline: float | None = None
    mirror: str | None = None
    storage_options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.on_error not in get_args(OnError):
            raise ValueError(f"on_error has to be 'raise' or 'warn', not {self.on_error!r}")
        self.save_options(overlap=self.overlap)  # raises what a save would raise
        check_booleans(log_metrics=self.log_metrics)
        if self.deadline is not None:
            in_time.checked_deadline(self.deadline)
        engine_options = self.engine_options()
        if self.engine is not None:
            require_engine(self.engine)
            refuse_skipping(limits_of(self.engine).when_busy)
            if engine_options is not None:
                raise ValueError(
                    "engine= has its own pool and its own limits: give pool_bytes, max_in_flight"
                    " and when_busy to the Engine, not to the plugin."
                )
        elif engine_options is not None:
            refuse_skipping(self.when_busy)
            Engine(**engine_options).close()  # raises now what the first save would raise

    def engine_options(self) -> EngineOptions | None:
        """Return the options of the plugin's own engine. Return None if no such option was given,
        so that the plugin has no engine of its own."""
        given = (self.pool_bytes, self.max_in_flight, self.when_busy)
        if given == (None, DEFAULT_IN_FLIGHT, "wait"):
            return None
        return {
            "pool_bytes": self.pool_bytes,
            "max_in_flight": self.max_in_flight,
            "when_busy": self.when_busy,
        }

    def save_options(self, path: str = "checkpoint", *, overlap: bool) -> SaveOptions:
        """Return the options of a save to `path`. Raise an error if an option is wrong. The default
        path is for a caller that only wants this check."""
        mirror = uploads.new_mirror_upload(
            path,
            self.mirror,
            self.storage_options,
            durable=self.durable,
            follow_link=False,
            create_parents=True,
        )
        return SaveOptions(
            overlap=overlap,
            durable=self.durable,
            check_mutation=self.check_mutation,
            on_durable=self.on_durable,
            follow_link=False,
            create_parents=True,
            mirror=mirror,
        )


def refuse_skipping(when_busy: WhenBusy) -> None:
    """Raise ValueError unless `when_busy` of a plugin's engine is "wait" or "raise"."""
    if when_busy == "skip":
        raise ValueError(
            "when_busy='skip' would lose checkpoints under Lightning: ModelCheckpoint removes the"
            " previous file after a save, also when that save was skipped. Use 'wait' or 'raise'."
        )
    if when_busy not in ("wait", "raise"):
        raise ValueError(f"when_busy has to be 'wait' or 'raise', not {when_busy!r}")


class Writers:
    """The writers of one plugin.

    Attributes:
        wrapped_io: The CheckpointIO that was given; None if stillframe itself writes.

    Raises:
        TypeError: `checkpoint_io` is not a CheckpointIO.
    """

    def __init__(
        self, reader: type[Any], checkpoint_io: Any | None, options: PluginOptions
    ) -> None:
        if checkpoint_io is not None:
            _refuse_non_checkpoint_io(checkpoint_io)
        self._reader = reader
        self.options = options
        self.wrapped_io = None if checkpoint_io is None else WrappedIO(checkpoint_io, reader)
        self._has_warned = False

    def submit(
        self,
        work: Work,
        checkpoint: Any,
        target: CheckpointPath,
        storage_options: Any,
        overlap: bool,
    ) -> SaveHandle:
        engine = self.engine_of(work)
        wrapped_io = self._writer_of(target)
        options = self.options.save_options(target.name, overlap=overlap)
        if wrapped_io is None:
            return start_save(engine, checkpoint, target.given, options, storage_options)
        return wrapped_io.save(
            checkpoint,
            target,
            storage_options=storage_options,
            options=options,
            engine=engine,
            pending=work.saves,
        )

    def remover_of(self, target: CheckpointPath) -> WrappedIO | None:
        """Return the CheckpointIO that removes a file; None for stillframe itself."""
        return self.wrapped_io

    def load(self, target: CheckpointPath, *args: Any, **kwargs: Any) -> Any:
        if self.wrapped_io is not None:
            return self.wrapped_io.io.load_checkpoint(target.given, *args, **kwargs)
        return read(self._reader().load_checkpoint, target, args, kwargs)

    def tear_down(self) -> None:
        if self.wrapped_io is not None:
            self.wrapped_io.io.teardown()

    def _writer_of(self, target: CheckpointPath) -> WrappedIO | None:
        """Return the CheckpointIO that writes a file; None for stillframe itself."""
        writer = self.remover_of(target)
        # If other code has replaced torch.save, call the replacement: it may encrypt, for example.
        # stillframe's own functions do not count as replacements.
        is_replaced = torch.save not in (torch.serialization.save, save, async_save)
        if writer is None and is_replaced:
            writer = WrappedIO(self._reader(), self._reader, _REPLACED)
            if not self._has_warned:
                self._has_warned = True
                log.warning("stillframe: %s: %s", urls.shown(target.text), writer.sentence)
        return writer

    def engine_of(self, work: Work) -> Engine:
        """Return the plugin's own engine, the engine given as `engine=`, or the default engine."""
        options = self.options.engine_options()
        if options is None:
            engine = engine_or_default(self.options.engine)
            refuse_skipping(limits_of(engine).when_busy)
            return engine
        if work.engine is not None:
            return work.engine
        return work.use(Engine(**options))


def refuse_nested_plugin(checkpoint_io: Any, ours: type[Any], name: str) -> None:
    """Raise ValueError if `checkpoint_io` is a plugin of class `ours`, or wraps one. `name` is for
    the message."""
    if any(isinstance(io, ours) for io in (checkpoint_io, *iter_checkpoint_ios(checkpoint_io))):
        raise ValueError(
            f"{name}(checkpoint_io=...) takes another CheckpointIO, not one of stillframe's: it"
            " would wait for itself."
        )


def _refuse_non_checkpoint_io(checkpoint_io: Any) -> None:
    """Raise TypeError now for an object that is no CheckpointIO, not at the first save."""
    is_class = isinstance(checkpoint_io, type)
    names = ("save_checkpoint", "load_checkpoint", "remove_checkpoint")
    if is_class or not all(callable(getattr(checkpoint_io, name, None)) for name in names):
        raise TypeError(f"checkpoint_io has to be a CheckpointIO, not {checkpoint_io!r}")


def read(reader: Callable[..., Any], target: CheckpointPath, args: Any, kwargs: Any) -> Any:
    """Load what `reader(target.given, *args, **kwargs)` would return.

    `reader` is the `load_checkpoint` of Lightning's own CheckpointIO.

    Raises:
        CorruptCheckpointError: The file is damaged.
        FileNotFoundError: There is no such file.
        Exception: The reader's own errors.
    """
    path = target.given
    load_arguments = _arguments(reader, target, args, kwargs)
    if load_arguments is None:
        return reader(path, *args, **kwargs)
    if not target.remote and not os.path.exists(path):
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    return load(path, **load_arguments, shared=may_have_other_local_ranks())


def _arguments(
    reader: Callable[..., Any], target: CheckpointPath, args: Any, kwargs: Any
) -> dict[str, Any] | None:
    """Return the arguments with which `load` returns what the reader would return. Return None if
    the reader itself must be called."""
    path = target.given
    # The reader replaces "~" by the home directory.
    if not isinstance(path, (str, os.PathLike)) or str(path).startswith("~"):
        return None
    # If other code has replaced torch.load, call the replacement: it may decrypt, for example.
    if torch.load not in (torch.serialization.load, load):
        return None
    if any(name in os.environ for name in _FORCED):
        return None
    try:
        bound = inspect.signature(reader).bind(path, *args, **kwargs)
    except TypeError:
        return None  # the reader raises this itself
    # The reader loads every storage to the CPU by default.
    map_location = bound.arguments.get("map_location", "cpu")
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    del arguments["path"]
    arguments["map_location"] = map_location
    # None means torch.load's own default, which is True. Older versions of Lightning pass False.
    weights_only = arguments.get("weights_only", False)
    arguments["weights_only"] = True if weights_only is None else weights_only
    if arguments.keys() != {"map_location", "weights_only"}:
        return None  # a newer Lightning's reader, with parameters that `load` does not know
    return arguments
