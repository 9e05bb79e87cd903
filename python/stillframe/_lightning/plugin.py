"""Defines the checkpoint plugin of `stillframe.lightning` and `stillframe.pytorch_lightning`.

This module imports neither package. The two public modules make subclasses with their package's
`CheckpointIO` as a base and its `TorchCheckpointIO` as the reader. The class `Checkpoints` does the
work of the methods.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, ClassVar

from stillframe._lightning.callers import calling_trainer, iter_checkpoint_ios
from stillframe._lightning.checkpoints import Checkpoints
from stillframe._lightning.writers import OnError, PluginOptions, Writers, refuse_nested_plugin
from stillframe._save.engine import Engine
from stillframe._save.options import DEFAULT_IN_FLIGHT, OnDurable, Size, WhenBusy

# The plugins of this process. The entry point adds a companion only if there are any.
live: weakref.WeakSet[CheckpointPlugin] = weakref.WeakSet()


class CheckpointPlugin:
    """Saves checkpoints asynchronously and durably: a drop-in for Lightning's `AsyncCheckpointIO`.

    Args:
        checkpoint_io: Another CheckpointIO to save, load and remove with. It gets a snapshot in
            pool memory, on a thread of stillframe's, and decides about files and durability. Its
            `teardown` is called too. By default stillframe writes the files itself.
        engine: The engine to save with, `stillframe.default_engine()` by default. The plugin does
            not close it. A plugin with `engine=` cannot be pickled, so it does not work with a
            strategy that spawns processes.
        pool_bytes: The most memory of the staging pool: bytes, or "4GiB". `pool_bytes`,
            `max_in_flight` and `when_busy` give the plugin its own engine, which is made at the
            first save and closed at teardown.
        max_in_flight: How many saves may be under way (not yet durable).
        when_busy: What a save does at that limit: "wait", or "raise" a `BusyError`. "skip" is
            refused, because ModelCheckpoint removes the previous file after a skipped save too.
        durable: Sync file and directory before a checkpoint counts as saved. With False, a power
            failure may lose or damage the checkpoint.
        overlap: Copy storages that only the optimizer changes under the next forward and backward.
            False copies everything in the call.
        check_mutation: Compare a checksum of every byte, to find code that writes to the state at
            the wrong time. Slow.
        on_durable: Called as `on_durable(path, report)` on a separate thread once a checkpoint is
            durable.
        on_error: "raise": the next save, or the end of the training, raises an error of a save.
            "warn": warn of the error and go on.
        deadline: Seconds that saves may still take after a signal that ends the training: SIGTERM,
            counted from Lightning's `SIGTERMException`, or SLURM's requeue signal. A save that
            cannot be durable by then is given up and logged. None waits for all saves.
        mirror: The URL of a directory in a store. Each durable checkpoint is uploaded there in the
            background; see docs/remote.md. Links are not uploaded. A checkpoint is removed only
            after its upload.
        storage_options: For the mirror's store; see `stillframe.async_save`.
        log_metrics: Log `checkpoint/call_ms`, `checkpoint/gate_ms`, `checkpoint/durable_s` and
            `checkpoint/bytes` of each durable checkpoint to the Trainer's loggers. `gate_ms` is the
            wait before `optimizer.step()`.

    Raises:
        TypeError, ValueError: An option that `Engine` refuses, an engine that skips saves,
            `engine=` together with an option of the engine, a mirror that is no URL, or a
            stillframe plugin as `checkpoint_io`.
    """

    _reader: ClassVar[type[Any]]  # TorchCheckpointIO of the package

    def __init__(
        self,
        checkpoint_io: Any | None = None,
        *,
        engine: Engine | None = None,
        pool_bytes: Size | None = None,
        max_in_flight: int = DEFAULT_IN_FLIGHT,
        when_busy: WhenBusy = "wait",
        durable: bool = True,
        overlap: bool = True,
        check_mutation: bool = False,
        on_durable: OnDurable | None = None,
        on_error: OnError = "raise",
        log_metrics: bool = False,
        deadline: float | None = None,
        mirror: str | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        name = type(self).__name__
        refuse_nested_plugin(checkpoint_io, CheckpointPlugin, name)
        options = PluginOptions(
            engine=engine,
            pool_bytes=pool_bytes,
            max_in_flight=max_in_flight,
            when_busy=when_busy,
            durable=durable,
            overlap=overlap,
            check_mutation=check_mutation,
            on_durable=on_durable,
            on_error=on_error,
            log_metrics=log_metrics,
            deadline=deadline,
            mirror=mirror,
            storage_options=storage_options,
        )
        writers = Writers(self._reader, checkpoint_io, options)
        self._checkpoints = Checkpoints(name, writers)
        self._register_plugin()

    def _register_plugin(self) -> None:
        register_with_loaded_packages(type(self))
        live.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._register_plugin()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Save `checkpoint` to the file `path`.

        When the call returns depends on the caller: see docs/lightning.md. Missing parent
        directories are created. A symbolic link at `path` is replaced, not followed.

        Raises:
            TypeError: `storage_options` was given, the checkpoint cannot be pickled, or the
                strategy is one of XLA's.
            StillframeError: This save failed in the call. Or an earlier save failed, and its error
                was not raised yet; then this save goes on.
        """
        trainer = calling_trainer(self, "save_checkpoint")
        self._checkpoints.save(trainer, checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load and check a checkpoint, once earlier saves of `path` have ended.

        Load as `stillframe.load` does, or with `checkpoint_io`. The ranks of a machine together
        read the file from the disk once. `map_location` and `weights_only` are those of the
        installed Lightning's `TorchCheckpointIO.load_checkpoint`, with the same defaults. If
        `torch.load` was replaced, that method itself is called.

        Raises:
            CorruptCheckpointError: The file is damaged.
        """
        return self._checkpoints.load(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove the file, link or directory `path`, once every save submitted before has ended.

        If the last of those saves failed, `path` is kept and a warning is logged. So a rotation
        always leaves at least one durable checkpoint. A missing `path` is not an error. If the
        caller's saves are durable on return, the remove is done when this returns.
        """
        self._checkpoints.remove(calling_trainer(self, "remove_checkpoint"), path)

    def teardown(self) -> None:
        """Wait for this plugin's saves, links and removes.

        If that takes more than a second, a line on stderr says so. `teardown` may be called again,
        and the plugin can be used afterwards. Fabric never calls it: use `stillframe.wait_all()`
        there.

        Raises:
            StillframeError: The oldest error that was not raised yet; its notes name the others.
                The errors are only logged while an exception of the training is being handled.
        """
        self._checkpoints.tear_down(calling_trainer(self, "teardown"))


# Python's own errors about arguments shall name the class that users know.
CheckpointPlugin.__init__.__qualname__ = "AsyncCheckpointIO.__init__"


def _plugin_of(trainer: Any) -> CheckpointPlugin | None:
    """Return the stillframe plugin that `trainer` saves with, possibly inside another CheckpointIO.
    Return None if there is none."""
    for io in iter_checkpoint_ios(trainer.strategy):
        if isinstance(io, CheckpointPlugin):
            return io
    return None


def checkpoints_of(trainer: Any) -> Checkpoints | None:
    """Return the checkpoints of the plugin that `trainer` saves with, for the companion."""
    plugin = _plugin_of(trainer)
    return None if plugin is None else plugin._checkpoints


def register(trainer: Any) -> bool:
    """Register a Trainer that is being made. Return True if it saves with a stillframe plugin, and
    so gets the companion. The entry point calls this."""
    checkpoints = checkpoints_of(trainer)
    if checkpoints is not None:
        checkpoints.register(trainer)
        # A launcher with a start method may fork the training's processes. The client of the
        # store, which an upload makes, does not work in a forked child.
        launcher = getattr(trainer.strategy, "launcher", None)
        may_fork = hasattr(launcher, "_start_method")
        if not may_fork:
            checkpoints.resume_uploads(trainer)
    return checkpoints is not None


def saves_with_plugin_alone(trainer: Any) -> bool:
    """Return whether `trainer` saves with a stillframe plugin that neither wraps another
    CheckpointIO nor is wrapped."""
    outermost = next(iter_checkpoint_ios(getattr(trainer, "strategy", None)), None)
    return (
        isinstance(outermost, CheckpointPlugin)
        and outermost._checkpoints.writers.wrapped_io is None
    )


def register_with_loaded_packages(cls: type[CheckpointPlugin]) -> None:
    """Make `cls` a virtual subclass of every loaded package's CheckpointIO, because the packages'
    Trainers check for their class with isinstance."""
    for name in ("lightning.fabric.plugins", "lightning_fabric.plugins"):
        base = getattr(sys.modules.get(name), "CheckpointIO", None)
        if base is not None:
            base.register(cls)
