"""Implements the companion callback for `lightning` and `pytorch_lightning`.

A save copies most of the state under the next forward and backward. The optimizer's step waits for
the copy, but Lightning lets other code write to the state between steps. Weight averaging, for
example, swaps the weights for validation. So this callback waits before such code until the saves
in flight have copied their state. For this it is first in the Trainer's list of callbacks.

It does not wait in the hooks of a training batch, because the copy runs there. If a callback writes
to a storage in these hooks, saves capture that storage in the call, or fail with a
TornSnapshotError.

From `setup` until `teardown` or an exception, this callback replaces methods of the Trainer's
objects. They know nothing of saves in flight, because they do not go through the CheckpointIO:

    ModelCheckpoint.file_exists       sees the saves and removes in flight
    ModelCheckpoint._link_checkpoint  links in the order of saves and removes
    Logger.after_save_checkpoint      is called once the checkpoint is durable
    Logger.finalize                   is called after all calls of `after_save_checkpoint`
    Trainer.save_checkpoint           with several ranks: an error of one rank is raised on all
    resume_start                      with several ranks: all load after rank 0's saves
    Strategy.save_checkpoint          and others that `sharded.py` lists, if each rank saves a part

It does nothing in a Trainer that saves with another plugin.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from stillframe._base.paths import CheckpointPath
from stillframe._lightning import ranks, sharded
from stillframe._lightning.callers import (
    note_signal_handlers,
    refuse_xla_strategy,
    sharded_model_key,
    warn_if_bypassed,
)
from stillframe._lightning.checkpoints import Checkpoints
from stillframe._lightning.plugin import checkpoints_of
from stillframe._lightning.publish import overrides_after_save
from stillframe._lightning.trainers import Method, Wraps
from stillframe._watch import gate


class CompanionHooks:
    """The companion's hooks, mixed in before the package's Callback."""

    def _wait(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Wait until saves in flight have copied their state, and notify loggers."""
        checkpoints = checkpoints_of(trainer)
        if checkpoints is not None:
            gate.wait()
            checkpoints.notify()

    def _notify_loggers(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        checkpoints = checkpoints_of(trainer)
        if checkpoints is not None:
            checkpoints.notify()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        checkpoints = checkpoints_of(trainer)
        if checkpoints is None:
            return
        refuse_xla_strategy(trainer.strategy)
        gate.wait()
        wraps = checkpoints.trainers.register_at_setup(trainer)
        if trainer.callbacks[0] is not self:
            # A new list, because Lightning is iterating over the old list.
            wraps.exchange(
                trainer,
                "callbacks",
                [self, *(each for each in trainer.callbacks if each is not self)],
            )
        if stage == "fit" and trainer.is_global_zero:
            warn_if_bypassed(trainer.strategy, checkpoints.name)
        _wrap_methods(wraps, checkpoints, trainer)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._wait(trainer, pl_module)
        checkpoints = checkpoints_of(trainer)
        if checkpoints is not None:  # every ModelCheckpoint knows its directory now
            sharded.refuse_urls(trainer)
            checkpoints.resume_uploads(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.on_train_epoch_start(trainer, pl_module)
        checkpoints = checkpoints_of(trainer)
        if checkpoints is not None:
            checkpoints.trainers.record_training_start(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if checkpoints_of(trainer) is not None:
            note_signal_handlers()
            self._wait(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        checkpoints = checkpoints_of(trainer)
        if checkpoints is not None:
            checkpoints.trainers.record_training_end(trainer)
            gate.wait()
            checkpoints.settle()  # users' hooks run next, and may read the best checkpoint
            if ranks.has_several_ranks(trainer):
                trainer.strategy.barrier("stillframe: checkpoints are durable")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end(trainer)  # Lightning calls no `teardown` after an exception

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._end(trainer)

    def _end(self, trainer: Any) -> None:
        """Wait for all saves, raise their errors, and restore the replaced methods."""
        checkpoints = checkpoints_of(trainer)
        if checkpoints is not None:
            gate.wait()
            try:
                checkpoints.finish(trainer)
            finally:
                checkpoints.trainers.tear_down(trainer)

    on_train_batch_start = on_train_batch_end = _notify_loggers
    on_fit_end = _wait
    on_sanity_check_start = on_sanity_check_end = _wait
    on_train_epoch_end = _wait
    on_validation_start = on_validation_end = _wait
    on_validation_epoch_start = on_validation_epoch_end = _wait
    on_validation_batch_start = on_validation_batch_end = _wait
    on_test_start = on_test_end = _wait
    on_test_epoch_start = on_test_epoch_end = _wait
    on_test_batch_start = on_test_batch_end = _wait
    on_predict_start = on_predict_end = _wait
    on_predict_epoch_start = on_predict_epoch_end = _wait
    on_predict_batch_start = on_predict_batch_end = _wait


def _wrap_methods(wraps: Wraps, checkpoints: Checkpoints, trainer: Any) -> None:
    """Replace the methods that the head of this file lists."""
    for callback in trainer.callbacks:
        if hasattr(callback, "file_exists") and hasattr(callback, "_fs"):  # a ModelCheckpoint
            wraps.put(callback, "file_exists", partial(_file_exists, checkpoints, callback))
        if hasattr(callback, "_link_checkpoint"):  # a ModelCheckpoint
            wraps.put(
                callback, "_link_checkpoint", partial(_link_after_saves, checkpoints, callback)
            )
    for logger in trainer.loggers:
        if overrides_after_save(logger):
            wraps.put(logger, "after_save_checkpoint", checkpoints.publish)
        wraps.put(logger, "finalize", partial(_finalize_logger_after_saves, checkpoints))
    if sharded_model_key(trainer.strategy) is not None:
        sharded.wrap_methods(wraps, checkpoints, trainer)
    if trainer.world_size > 1:
        wraps.put(trainer, "save_checkpoint", partial(_save_together, checkpoints, trainer))
        connector = trainer._checkpoint_connector
        wraps.put(
            connector, "resume_start", partial(_load_after_rank_0_saves, checkpoints, trainer)
        )


class _InFlightAwareFileSystem:
    """A file system whose `exists` takes saves and removes in flight into account."""

    def __init__(self, checkpoints: Checkpoints, file_system: Any) -> None:
        self._checkpoints = checkpoints
        self._file_system = file_system

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file_system, name)

    def exists(self, path: Any, *args: Any, **kwargs: Any) -> bool:
        return self._checkpoints.will_exist(
            path, lambda path: bool(self._file_system.exists(path, *args, **kwargs))
        )


def _file_exists(
    checkpoints: Checkpoints, callback: Any, original: Method, *args: Any, **kwargs: Any
) -> Any:
    """Call ModelCheckpoint's `file_exists` with a file system that knows saves in flight."""
    # The original method is needed, because it sends rank 0's result to the other ranks.
    file_system = callback._fs
    callback._fs = _InFlightAwareFileSystem(checkpoints, file_system)
    try:
        return original(*args, **kwargs)
    finally:
        callback._fs = file_system


def _link_after_saves(
    checkpoints: Checkpoints,
    callback: Any,
    original: Method,
    trainer: Any,
    filepath: Any,
    linkpath: Any,
) -> None:
    """Make ModelCheckpoint's link when the saves before the link have ended."""
    method = getattr(type(callback), "_link_checkpoint", None)
    if not getattr(method, "__module__", "").endswith("callbacks.model_checkpoint"):
        # A subclass overrides the method, and may need the file.
        if trainer.is_global_zero:
            checkpoints.wait_for(CheckpointPath.of(filepath))
        original(trainer, filepath, linkpath)
        return
    if trainer.is_global_zero and os.path.abspath(filepath) != os.path.abspath(linkpath):
        checkpoints.link(trainer, filepath, linkpath)
    trainer.strategy.barrier()


def _finalize_logger_after_saves(
    checkpoints: Checkpoints, original: Method, *args: Any, **kwargs: Any
) -> Any:
    """Call the logger's `finalize` once the logger was notified of all checkpoints."""
    checkpoints.settle()
    return original(*args, **kwargs)


def _save_together(
    checkpoints: Checkpoints, trainer: Any, original: Method, *args: Any, **kwargs: Any
) -> None:
    """Save, and raise the error of one rank on all ranks, in place of `Trainer.save_checkpoint`."""
    if not ranks.has_several_ranks(trainer):
        original(*args, **kwargs)
        return
    with checkpoints.together(trainer.strategy):
        original(*args, **kwargs)


def _load_after_rank_0_saves(
    checkpoints: Checkpoints,
    trainer: Any,
    original: Method,
    checkpoint_path: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Load when rank 0 has no save to that path in flight, in place of `resume_start`."""
    if checkpoint_path and ranks.has_several_ranks(trainer):
        if trainer.is_global_zero:
            checkpoints.wait_for(CheckpointPath.of(checkpoint_path))
        trainer.strategy.barrier()
    return original(checkpoint_path, *args, **kwargs)
