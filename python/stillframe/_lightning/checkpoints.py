"""The checkpoints of one plugin: when a save returns, and where its errors are raised.

When a save returns:

    called by                                        the save returns
    a Trainer, from on_train_start to on_train_end   once the state is captured
    a Trainer at any other time                      once it is durable
    a signal handler                                 once it is durable
    a Trainer that saves a `hpc_ckpt_*` file         once it is durable
    Fabric                                           once the state is captured
    a user's own code                                as for the Trainers that use the plugin if
                                                     there are any, otherwise as for Fabric

After a save outside training, Lightning or the user may read the file at once. In a Trainer without
the companion (`companion.py`), every save is durable when it returns.

A save that is durable on return raises its own error. Other errors are raised by the next save,
which is made nevertheless, or by `teardown`. While Lightning handles an exception of the training,
errors are only logged, so that they do not replace that exception.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from stillframe import _core
from stillframe._base.paths import CheckpointPath
from stillframe._lightning import ranks, rotation
from stillframe._lightning.callers import (
    inside_signal_handler,
    is_inside_save_checkpoint,
    refuse_xla_strategy,
    signal_handler_frame,
)
from stillframe._lightning.publish import (
    DurableSaveCallback,
    make_logger_notifier,
    make_metrics_logger,
)
from stillframe._lightning.trainers import Trainers, is_trainer, swaps_weights_during_save
from stillframe._lightning.work import FailedHandle, Work, is_save_failure, log_error, warn
from stillframe._lightning.writers import Writers
from stillframe._save import ordered, uploads
from stillframe._save.handle import SaveHandle, wait_for_end
from stillframe._watch import gate

log = logging.getLogger("stillframe")

# Called as `submit(work, target, overlap)`: starts a save and returns its handle. `overlap` says
# whether bytes may be copied after the call.
Submit = Callable[[Work, CheckpointPath, bool], SaveHandle]


class Checkpoints:
    """The checkpoints of one plugin.

    Attributes:
        name: The name of the plugin's class, for messages.
        writers: Has the options, and chooses the code that writes a checkpoint.
        trainers: The Trainers that use the plugin.
    """

    def __init__(self, name: str, writers: Writers) -> None:
        self.name = name
        self.writers = writers
        self._reset_process_state()

    def _reset_process_state(self) -> None:
        """Set the attributes that are not pickled, because they belong to this process."""
        self._work = self._make_plugin_saves()
        self.trainers = Trainers()
        self._in_together = False  # a block of `together` is running

    def __getstate__(self) -> dict[str, Any]:
        if self.writers.options.engine is not None:
            raise TypeError(
                f"{self.name}(engine=...) cannot be pickled: an engine belongs to its"
                " process. With a strategy that spawns its workers give the plugin pool_bytes,"
                " max_in_flight or when_busy instead of an engine."
            )
        return {"name": self.name, "writers": self.writers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset_process_state()

    # ---- for the plugin, whose methods Lightning calls ----

    def save(self, trainer: Any, checkpoint: Any, path: Any, storage_options: Any | None) -> None:
        """Save a checkpoint, with the arguments and errors of `CheckpointPlugin.save_checkpoint`.

        Args:
            trainer: The caller: a Trainer, the type `Fabric`, or None. The other methods take the
                same argument.
        """

        def submit(work: Work, target: CheckpointPath, overlap: bool) -> SaveHandle:
            is_ours = self.writers.wrapped_io is None  # stillframe writes the file itself
            if storage_options is not None and is_ours and not target.remote:
                raise TypeError(
                    "`Trainer.save_checkpoint(..., storage_options=...)` with `storage_options` arg"
                    f" is not supported for `{self.name}`. Please implement your"
                    " custom `CheckpointIO` to define how you'd like to use `storage_options`."
                )
            return self.writers.submit(work, checkpoint, target, storage_options, overlap)

        self.save_with(submit, trainer, path)

    def save_with(self, submit: Submit, trainer: Any, path: Any) -> None:
        """Make a save with `submit`, and raise the oldest error that was not reported. Inside
        `together`, raise nothing."""
        # Asked before the save, whose own error would look like an error of the training.
        quiet = self.trainers.training_failed(trainer)
        work = self._current_work()
        in_handler = inside_signal_handler()
        newest_before = work.newest, work.newest_returns_early
        # The newest save counts as failed until `work.add` says that it was made.
        work.newest, work.newest_returns_early = FailedHandle(repr(path)), False
        save = functools.partial(self._save, work, submit, trainer, path, in_handler)
        try:
            self._save_and_report(work, save, path, quiet)
            error = None if self._in_together else work.pop_next_error()
        finally:
            if in_handler:  # for the call that the handler interrupted, its own save is the newest
                work.newest, work.newest_returns_early = newest_before
        if error is None:
            return
        if (
            is_trainer(trainer)
            and ranks.has_several_ranks(trainer)
            and is_inside_save_checkpoint(trainer)
        ):
            # The other ranks wait in this barrier, which this rank would not reach after the error.
            trainer.strategy.barrier("Trainer.save_checkpoint")
        raise error

    def _save_and_report(
        self, work: Work, save: Callable[[], None], path: Any, quiet: bool
    ) -> None:
        """Make a save. Add its error to `work`, or report the error if it must not be raised. With
        `quiet`, only log errors."""
        error: BaseException | None = None
        try:
            save()
        except Exception as caught:
            error = caught
        if error is not None and (quiet or self._should_warn_of(work, error)):
            if not work.newest_call_succeeded():
                # ModelCheckpoint will now remove the previous file. This makes the log keep it.
                rotation.append_failed_save_entry(path)
            self._report(error, quiet)
            error = None
        if quiet or self.writers.options.on_error == "warn":
            self._report_all(work, quiet)
        if error is not None:
            work.add_error_without_save(repr(path), error, first=True)

    def _save(self, work: Work, submit: Submit, trainer: Any, path: Any, in_handler: bool) -> None:
        """Start a save, and wait until it is durable unless it may return early."""
        if is_trainer(trainer):
            refuse_xla_strategy(trainer.strategy)
        target = CheckpointPath.of(path)
        # True: the call returns before the checkpoint is durable.
        returns_early = not in_handler and self.trainers.can_return_before_durable(trainer)
        if _is_for_requeue(target):
            returns_early = False
        work.rotation.make_room(target)
        overlap = (
            self.writers.options.overlap
            and returns_early
            and not swaps_weights_during_save(trainer)
        )
        handle = submit(work, target, overlap)
        work.add(handle, early=returns_early)
        if self.writers.options.log_metrics and is_trainer(trainer):
            work.rotation.publications.append(
                DurableSaveCallback(handle, target=None, call=make_metrics_logger(trainer))
            )
        if not returns_early:
            self._wait_to_deadline_if_signaled(work)
            wait_for_end(handle)

    def load(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint, as `CheckpointPlugin.load_checkpoint` describes."""
        target = CheckpointPath.of(path)
        self.wait_for(target)
        gate.wait()  # the caller will overwrite state that saves in flight may still copy
        loaded: dict[str, Any] = self.writers.load(target, *args, **kwargs)
        return loaded

    def remove(self, trainer: Any, path: Any) -> None:
        """Remove a checkpoint, as `CheckpointPlugin.remove_checkpoint` describes."""
        may_return_early = not inside_signal_handler() and self.trainers.can_return_before_durable(
            trainer
        )
        rotation = self._current_work().rotation
        rotation.remove(CheckpointPath.of(path))
        if not may_return_early:
            # While a Trainer is set up, a file stays until ModelCheckpoint has replaced the link to
            # it. At other times no later call would remove the file, so remove it now.
            rotation.release(all_of_them=not self.trainers.is_set_up(trainer))
            rotation.wait()

    def tear_down(self, trainer: Any) -> None:
        """Wait for everything and raise errors, as `CheckpointPlugin.teardown` describes. Tear down
        the wrapped CheckpointIO too."""
        # Without a Trainer, the user has made this call, perhaps in a `finally` or `except` block.
        has_trainer = bool(self.trainers.of_caller(trainer))
        in_users_block = not has_trainer and sys.exc_info()[0] is not None
        quiet = in_users_block or self.trainers.training_failed(trainer)
        try:
            self._wait_close_and_raise(trainer, quiet)
        finally:
            try:
                self.writers.tear_down()
            except Exception as error:
                if not quiet:
                    raise
                log.error("the wrapped CheckpointIO was not torn down: %s", error, exc_info=error)

    # ---- for the companion ----

    def register(self, trainer: Any) -> None:
        """Register a Trainer that was made with this plugin and has the companion."""
        self.trainers.add(trainer)
        if self._current_work().saves:
            # The Trainer may look for the newest checkpoint before the companion's hooks run.
            _core.log_drain(None)

    def resume_uploads(self, trainer: Any) -> None:
        """Upload checkpoints in the Trainer's directories that earlier processes did not upload."""
        options = self.writers.options
        if options.mirror is not None and trainer.is_global_zero:
            directories = [getattr(each, "dirpath", None) for each in trainer.checkpoint_callbacks]
            # `uploads.resume` uses only the parent directories of the paths.
            paths = [os.path.join(each, "checkpoint") for each in directories if each]
            resumed = [trainer.ckpt_path] if trainer.ckpt_path else []
            uploads.resume(options.mirror, options.storage_options, *paths, *resumed)

    def notify(self) -> None:
        """Notify loggers of durable checkpoints, and submit the removes that waited for that."""
        self._current_work().rotation.notify()

    def finish(self, trainer: Any) -> None:
        """Do the work of `tear_down` for strategies that never call the plugin's `teardown`."""
        self._wait_close_and_raise(trainer, self.trainers.training_failed(trainer))

    def settle(self) -> None:
        """Wait for saves, links and removes, and notify loggers. Raise none of their errors."""
        work = self._current_work()
        if work.under_way():
            self._wait_to_deadline_if_signaled(work)
            work.drain(close=False)

    def publish(self, notify: Callable[[Any], object], checkpoint_callback: Any) -> None:
        """Call `notify(checkpoint_callback)` once the last checkpoint is durable. Call it now if
        stillframe has saved no checkpoint, and never if the call of the last save raised."""
        work = self._current_work()
        handle = work.newest
        if handle is None:
            notify(checkpoint_callback)
            return
        if not work.newest_call_succeeded():
            return
        work.rotation.publications.append(
            DurableSaveCallback(
                handle,
                CheckpointPath.of(handle.path),
                make_logger_notifier(notify, checkpoint_callback),
            )
        )
        work.rotation.notify()

    def link(self, trainer: Any, target: Any, path: Any) -> None:
        """Make `path` a link to `target` when all saves submitted before have ended."""
        rotation = self._current_work().rotation
        rotation.link(CheckpointPath.of(target), CheckpointPath.of(path))
        # At these times the caller may read the link at once.
        if inside_signal_handler() or not self.trainers.can_return_before_durable(trainer):
            rotation.wait()

    def will_exist(self, path: Any, otherwise: Callable[[Any], bool]) -> bool:
        """Do the work of `Rotation.will_exist`."""
        return self._current_work().rotation.will_exist(CheckpointPath.of(path), otherwise)

    def wait_for(self, target: CheckpointPath) -> None:
        """Wait for the saves, links and removes of `target` that were submitted before."""
        if target.remote:
            ordered.wait_for_saves_of_key(target.key())
        else:
            ordered.wait_for_saves_of_path(target.given)

    @contextmanager
    def together(self, strategy: Any) -> Iterator[None]:
        """Run a save in the block. If the save fails on one rank, raise the error on all ranks. It
        is raised after the block, when all ranks have passed Lightning's barrier."""
        if self._in_together:  # the outer block raises the error
            yield
            return
        work = self._current_work()
        newest_before = work.newest
        self._in_together = True
        try:
            yield
        finally:
            self._in_together = False
        if work.newest is newest_before:  # this rank has saved nothing
            error, call_failed = ranks.agree(strategy, None)
        else:
            call_failed = not work.newest_call_succeeded()
            error, call_failed = ranks.agree(strategy, work.pop_next_error(), call_failed)
        if call_failed:
            # The save failed on some rank, so it fails on this rank too. Drop this rank's own error
            # of it, because `error` is raised.
            work.wait_and_drop_newest_error()
        if error is not None:
            raise error

    # ---- private ----

    def _current_work(self) -> Work:
        if self._work.pid != os.getpid():  # in a forked child
            self._work = self._make_plugin_saves()
        return self._work

    def _make_plugin_saves(self) -> Work:
        return Work(self.writers.remover_of, durable=self.writers.options.durable)

    def _wait_close_and_raise(self, trainer: Any, quiet: bool) -> None:
        """Wait for everything and close the plugin's engine. Raise the first error, or with `quiet`
        only log the errors."""
        work = self._current_work()
        if work.under_way():
            self._wait_to_deadline_if_signaled(work)
            work.drain(close=True)
        if quiet or self.writers.options.on_error == "warn":
            self._report_all(work, quiet)
        if quiet:
            return
        error = work.pop_errors_as_one()
        if self.trainers.is_set_up(trainer) and ranks.has_several_ranks(trainer):
            error, _ = ranks.agree(trainer.strategy, error)
        if error is not None:
            raise error

    def _wait_to_deadline_if_signaled(self, work: Work) -> None:
        """If a signal ends the training, wait for saves until the deadline at most."""
        deadline_s = self.writers.options.deadline
        if deadline_s is None:
            return
        # Either the signal's handler is running, or Lightning has raised an exception for it.
        ending = signal_handler_frame() or sys.exc_info()[1]
        if isinstance(ending, FrameType) or type(ending).__name__ == "SIGTERMException":
            work.wait_to_deadline_or_give_up(ending, deadline_s)

    def _should_warn_of(self, work: Work, error: BaseException) -> bool:
        """Return whether to warn of an error. A mistake in the arguments is always raised."""
        return self.writers.options.on_error == "warn" and (
            work.newest_call_succeeded() or is_save_failure(error)
        )

    def _report_all(self, work: Work, quiet: bool) -> None:
        while (error := work.pop_next_error()) is not None:
            self._report(error, quiet)

    def _report(self, error: BaseException, quiet: bool) -> None:
        """Log an error if `quiet`, otherwise warn of it."""
        if quiet:
            log_error(error)
        else:
            warn(error)


def _is_for_requeue(target: CheckpointPath) -> bool:
    """Return whether the job is requeued by SLURM right after this checkpoint."""
    return os.path.basename(target.text).startswith("hpc_ckpt_")
