"""What `stillframe.lightning` and `stillframe.pytorch_lightning` share: the checkpoint plugin.

It imports neither package. Each of the two modules adds its package's `CheckpointIO` as a base
and names its `TorchCheckpointIO` as the reader; `_companion.py` has the callback that comes
with the plugin.

When a save returns:

    called by                                        the save returns
    a Trainer, from on_train_start to on_train_end   once the state is captured
    a Trainer at any other time                      once it is durable
    a signal handler                                 once it is durable
    Fabric                                           once the state is captured
    your own code                                    as by the Trainers that use the plugin, if
                                                     there are any, otherwise as by Fabric

A Trainer's saves outside training are followed by something that needs the file at once: the
learning rate finder and the batch size scaler read it back, a spawned worker names it to its
parent, a script uploads it. The companion callback tells the plugin when training starts and
ends, and `Trainer.state` when it broke off. A Trainer without the companion never has an
asynchronous save, since nothing would hold its hooks back while the state is being copied.

When an error is raised: once, by the next save (which is made all the same), or by `teardown`;
the oldest first. A save that is durable on return raises its own. While Lightning handles an
exception of the training, errors are logged instead: they must not take its place.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any, ClassVar

from stillframe import gate
from stillframe._caller import Fabric, calling_trainer, inside_signal_handler, io_chain
from stillframe._waiting import WaitingLine
from stillframe.engine import Engine, default_engine, remove, wait_for_path
from stillframe.handle import SaveHandle, SaveReport

log = logging.getLogger("stillframe")

_DEFAULT_IN_FLIGHT = 2
_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")

_NO_COMPANION = (
    "stillframe's companion callback is not among this Trainer's callbacks, so each of its saves"
    " waits until the checkpoint is durable. Create the plugin before the Trainer and pass it as"
    " Trainer(plugins=[...]); the callback comes through the entry points of the installed package."
)

# Plugins alive in this process. The entry point adds a companion only if there is one.
live: weakref.WeakSet[CheckpointPlugin] = weakref.WeakSet()


@dataclass
class _Work:
    """What one process has under way. A forked child starts with nothing.

    Attributes:
        pid: The process.
        engine: The plugin's own engine.
        pending: Saves whose end has not been looked at, oldest first.
        errors: Errors of saves that have ended, oldest first, until they are raised or logged.
        removed: The newest remove; it takes effect after all earlier ones.
    """

    pid: int
    engine: Engine | None = None
    pending: list[SaveHandle] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    removed: str | None = None


class CheckpointPlugin:
    """Saves checkpoints asynchronously and durably: a drop-in for Lightning's `AsyncCheckpointIO`.

    Args:
        engine: The engine to save with. By default the process's own,
            `stillframe.default_engine()`. The plugin does not close it. A plugin with `engine=`
            cannot be pickled, so it cannot be used with a spawning strategy.
        pool_bytes: Cap of the staging pool in bytes. This and the next two give the plugin an
            engine of its own, made at the first save and closed at teardown.
        max_in_flight: How many saves may be not yet durable.
        when_busy: What a save does when that many are: "wait", or "raise" a `BusyError`. "skip"
            is refused, because ModelCheckpoint removes the previous file after a save, whether
            that was made or skipped.
        durable: Sync file and directory before a checkpoint counts as saved. False gives up
            power failures.
        overlap: Copy what only the optimizer changes under the next forward and backward. False
            copies everything in the call.
        check_mutation: Compare a checksum of every byte, to find code that writes to the state
            at a wrong time. Slow.
        on_durable: Called as `on_durable(path, report)` on a thread of its own once a
            checkpoint is durable.

    Raises:
        TypeError, ValueError: What `Engine` refuses, an engine that skips saves, or `engine=`
            together with an option of the engine.
    """

    _reader: ClassVar[type[Any]]  # TorchCheckpointIO of the package

    def __init__(
        self,
        *,
        engine: Engine | None = None,
        pool_bytes: int | None = None,
        max_in_flight: int = _DEFAULT_IN_FLIGHT,
        when_busy: str = "wait",
        durable: bool = True,
        overlap: bool = True,
        check_mutation: bool = False,
        on_durable: Callable[[Any, SaveReport], object] | None = None,
    ) -> None:
        _refuse_skipping(when_busy if engine is None else engine._when_busy)
        own = pool_bytes is not None or max_in_flight != _DEFAULT_IN_FLIGHT or when_busy != "wait"
        if engine is not None and own:
            raise ValueError(
                "engine= has its own pool and its own limits: give pool_bytes, max_in_flight and"
                " when_busy to the Engine, not to the plugin."
            )
        self._engine = engine
        self._engine_options: dict[str, Any] | None = None
        if own:
            self._engine_options = {
                "pool_bytes": pool_bytes,
                "max_in_flight": max_in_flight,
                "when_busy": when_busy,
            }
            Engine(**self._engine_options).close()  # refuses now what it would refuse at a save
        self._durable = durable
        self._overlap = overlap
        self._check_mutation = check_mutation
        self._on_durable = on_durable
        self._enlist()

    def _enlist(self) -> None:
        self._work = _Work(os.getpid())
        # Trainers that use this plugin; those of them between on_train_start and on_train_end.
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._training: weakref.WeakSet[Any] = weakref.WeakSet()
        register_with_loaded_packages(type(self))
        live.add(self)

    def __getstate__(self) -> dict[str, Any]:
        if self._engine is not None:
            raise TypeError(
                f"{type(self).__name__}(engine=...) cannot be pickled: an engine belongs to its"
                " process. With a strategy that spawns its workers give the plugin pool_bytes,"
                " max_in_flight or when_busy instead of an engine."
            )
        state = self.__dict__.copy()
        for name in ("_work", "_known", "_training"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._enlist()

    # ---- CheckpointIO ----

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Saves `checkpoint` to the local file `path`.

        When the call returns depends on who makes it, see the head of this module. Parent
        directories are made. A symbolic link at `path` is replaced, not followed.

        Raises:
            TypeError: `storage_options` was given, or the checkpoint cannot be pickled.
            ValueError: `path` is not a local one.
            StillframeError: This save's own error where the call or a wait for durability finds
                it. Otherwise the oldest error of an earlier save that was not raised yet; this
                save has been made all the same.
        """
        if storage_options is not None:
            raise TypeError(
                "`Trainer.save_checkpoint(..., storage_options=...)` with `storage_options` arg"
                f" is not supported for `{type(self).__name__}`. Please implement your custom"
                " `CheckpointIO` to define how you'd like to use `storage_options`."
            )
        _refuse_remote(path)
        trainer = calling_trainer(self, "save_checkpoint")
        # Looked at before anything of ours can fail, which would be an exception being handled too.
        quiet = self._training_failed(trainer)
        asynchronous = self._may_return_early(trainer)
        work = self._current_work()
        handle = None
        try:
            handle = self._get_engine(work)._submit(
                checkpoint,
                path,
                overlap=self._overlap and asynchronous,
                durable=self._durable,
                check_mutation=self._check_mutation,
                on_durable=self._on_durable,
                follow_link=False,
                create_parents=True,
            )
            work.pending.append(handle)
            if not asynchronous:
                error = _error_of(handle)
                _discard(work.pending, handle)
                if error is not None:
                    raise error
        except Exception as error:
            if not quiet:
                raise
            _log_error(error)
        _collect_ended(work, but=handle)
        if quiet:
            _log_errors(work)
        elif work.errors:
            raise work.errors.pop(0)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Loads with Lightning's own reader, after the saves of `path` that were submitted before.

        Takes `map_location` and `weights_only` as Lightning's
        `TorchCheckpointIO.load_checkpoint` of the installed version does, with that version's
        defaults.
        """
        if not _is_remote(path):
            wait_for_path(path)
        # What was loaded is about to be written over the state that saves in flight may still
        # be copying.
        gate.wait()
        loaded: dict[str, Any] = self._reader().load_checkpoint(path, *args, **kwargs)
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        """Removes the file, link or directory `path`, once every save submitted before has ended.

        It is kept, and that is logged, if the last of those saves failed: so a rotation never
        leaves fewer than one durable checkpoint. A missing `path` is no error. Where a save
        would be durable on return, this is done on return.

        Raises:
            ValueError: `path` is not a local one.
        """
        _refuse_remote(path)
        asynchronous = self._may_return_early(calling_trainer(self, "remove_checkpoint"))
        remove(path)
        if asynchronous:
            self._current_work().removed = os.path.abspath(os.fsdecode(path))
        else:
            wait_for_path(path, follow_link=False)

    def teardown(self) -> None:
        """Waits for this plugin's saves and removes.

        A line on stderr says so when that takes more than a second. May be called again, and
        the plugin used again. Fabric never calls it: use `stillframe.wait_all()` there.

        Raises:
            StillframeError: The oldest error that was not raised yet; its notes name the
                others. Nothing is raised, but logged, while an exception of the training is
                being handled.
        """
        trainer = calling_trainer(self, "teardown")
        quiet = self._training_failed(trainer) or (
            # Called by hand in a `finally` or `except`, with no Trainer there to ask.
            not self._trainers(trainer) and sys.exc_info()[0] is not None
        )
        work = self._current_work()
        if work.pending or work.removed is not None or work.engine is not None:
            with WaitingLine(work.pending):
                self._drain(work)
        if quiet:
            _log_errors(work)
        elif work.errors:
            first = work.errors.pop(0)
            for error in work.errors:
                first.add_note(f"Another checkpoint failed as well: {error}")
            _log_errors(work)
            raise first

    # ---- for the companion ----

    def attach(self, trainer: Any) -> None:
        """`trainer` has the companion. It does not train yet, though an earlier fit may have
        broken off."""
        self._known.add(trainer)
        self._training.discard(trainer)

    def training_starts(self, trainer: Any) -> None:
        self._known.add(trainer)
        self._training.add(trainer)

    def training_ends(self, trainer: Any) -> None:
        self._training.discard(trainer)

    # ---- inside ----

    def _may_return_early(self, trainer: Any) -> bool:
        """Whether a save made now for `trainer` (see `calling_trainer`) is asynchronous."""
        if inside_signal_handler():
            return False
        if trainer is Fabric:
            return True
        if trainer is not None and trainer not in self._known:
            self._known.add(trainer)
            log.warning(_NO_COMPANION)
            return False
        trainers = self._trainers(trainer)
        # With no Trainer on the stack, one that uses this plugin may still be behind the call:
        # a launcher saves a spawned worker's result so, after training.
        return not trainers or any(
            each in self._training and each.state.status == "running" for each in trainers
        )

    def _training_failed(self, trainer: Any) -> bool:
        """Whether Lightning handles an exception of the training, which no error may replace.

        An exception alone says nothing: a fit that goes well may have been started inside an
        `except` block.
        """
        return sys.exc_info()[0] is not None and any(
            each.state.status == "interrupted" for each in self._trainers(trainer)
        )

    def _trainers(self, trainer: Any) -> list[Any]:
        if trainer is Fabric:
            return []
        return list(self._known) if trainer is None else [trainer]

    def _current_work(self) -> _Work:
        if self._work.pid != os.getpid():
            self._work = _Work(os.getpid())
        return self._work

    def _get_engine(self, work: _Work) -> Engine:
        if self._engine is not None:
            return self._engine
        if self._engine_options is None:
            engine = default_engine()
            _refuse_skipping(engine._when_busy)
            return engine
        if work.engine is None:
            work.engine = Engine(**self._engine_options)
        return work.engine

    def _drain(self, work: _Work) -> None:
        """Waits for everything; what an interrupted wait did not get to is left for the next."""
        while work.pending:
            handle = work.pending[0]
            error = _error_of(handle)
            if _discard(work.pending, handle) and error is not None:
                work.errors.append(error)
        if work.removed is not None:
            wait_for_path(work.removed, follow_link=False)
            work.removed = None
        if work.engine is not None:
            work.engine.close()
            work.engine = None


def plugin_of(trainer: Any) -> CheckpointPlugin | None:
    """The plugin of ours that `trainer` saves with, bare or wrapped; None if it uses another."""
    for io in io_chain(trainer.strategy):
        if isinstance(io, CheckpointPlugin):
            return io
    return None


def register_with_loaded_packages(cls: type[CheckpointPlugin]) -> None:
    """Makes `cls` a virtual subclass of every loaded package's CheckpointIO.

    `lightning` and `pytorch_lightning` each have their own, and their Trainers ask for it with
    isinstance. A package that is loaded later is found when the next plugin is made.
    """
    for name in ("lightning.fabric.plugins", "lightning_fabric.plugins"):
        base = getattr(sys.modules.get(name), "CheckpointIO", None)
        if base is not None:
            base.register(cls)


def _refuse_skipping(when_busy: str) -> None:
    if when_busy == "skip":
        raise ValueError(
            "when_busy='skip' would lose checkpoints under Lightning: ModelCheckpoint removes the"
            " previous file after a save, also when that save was skipped. Use 'wait' or 'raise'."
        )


def _is_remote(path: Any) -> bool:
    return _REMOTE.match(os.fsdecode(path)) is not None


def _refuse_remote(path: Any) -> None:
    if _is_remote(path):
        raise ValueError(
            f"{os.fsdecode(path)!r} is not a local path, and stillframe's plugin saves to local"
            " files only."
        )


def _error_of(handle: SaveHandle) -> BaseException | None:
    """Waits for the save and collects its error. None too if `wait_all` has raised that already."""
    if handle.done() and handle._failure is not None and handle._failure.collected:
        return None
    try:
        return handle.exception()
    except CancelledError as cancelled:
        return cancelled


def _discard(pending: list[SaveHandle], handle: SaveHandle) -> bool:
    """False if a save made by a signal handler in the meantime took `handle` off the list."""
    try:
        pending.remove(handle)
    except ValueError:
        return False
    return True


def _collect_ended(work: _Work, but: SaveHandle | None) -> None:
    """Takes the errors of saves that have ended; not that of `but`, however fast it failed."""
    for handle in list(work.pending):
        if handle is not but and handle.done() and _discard(work.pending, handle):
            error = _error_of(handle)
            if error is not None:
                work.errors.append(error)


def _log_errors(work: _Work) -> None:
    while work.errors:
        _log_error(work.errors.pop(0))


def _log_error(error: BaseException) -> None:
    log.error("a checkpoint was not saved: %s", error, exc_info=error)
