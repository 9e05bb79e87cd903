"""What `stillframe.lightning` and `stillframe.pytorch_lightning` share: the checkpoint plugin.

It imports neither package. Each of the two modules adds its package's `CheckpointIO` as a base
and names its `TorchCheckpointIO` as the reader; `_companion.py` has the callback that comes
with the plugin.

When a save returns:

    called by                                        the save returns
    a Trainer, from on_train_start to on_train_end   once the state is captured
    a Trainer at any other time                      once it is durable
    a signal handler                                 once it is durable
    a Trainer that saves a `hpc_ckpt_*`              once it is durable
    Fabric                                           once the state is captured
    your own code                                    as by the Trainers that use the plugin, if
                                                     there are any, otherwise as by Fabric

A Trainer's saves outside training are followed by something that needs the file at once: the
learning rate finder and the batch size scaler read it back, a spawned worker names it to its
parent, a script uploads it, a job is requeued. The companion callback tells the plugin when
training starts and ends, and `Trainer.state` when it broke off. A Trainer without the companion
never has an asynchronous save, since nothing would hold its hooks back while the state is being
copied.

When an error is raised: once, by the next save (which is made all the same), or by `teardown`;
the oldest first. A save that is durable on return raises its own. While Lightning handles an
exception of the training, errors are logged instead: they must not take its place. Where a Trainer
has several ranks, all of them raise, behind the barrier of the save (`_ranks.py`).

A remove is held back while a link points to the file (`save_last="link"`: the link is made anew
right after) and while loggers are still to be told of it (`_rotation.py`).
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from stillframe import _core
from stillframe._lightning import ranks as _ranks
from stillframe._lightning import rotation as _rotation
from stillframe._lightning import strategies as _strategies
from stillframe._lightning.caller import (
    calling_trainer,
    inside_signal_handler,
    io_chain,
    meets_others_later,
)
from stillframe._lightning.pending import (
    Work,
    absolute,
    error_of,
    is_failure,
    is_remote,
    log_error,
    warn,
)
from stillframe._lightning.publish import Publication, logger_call, metrics_call
from stillframe._lightning.rotation import Rotation
from stillframe._lightning.trainers import Trainers, is_trainer, swaps_weights
from stillframe._lightning.waiting import WaitingLine
from stillframe._lightning.wraps import Wraps
from stillframe._lightning.writers import DEFAULT_IN_FLIGHT, Writers, refuse_ours
from stillframe._save import gate
from stillframe._save import ordered as _ordered
from stillframe._save.engine import Engine, wait_for_path
from stillframe._save.handle import SaveReport

if TYPE_CHECKING:
    from stillframe._lightning.wrapped import Inner

log = logging.getLogger("stillframe")

_ON_ERROR = ("raise", "warn")

# Plugins alive in this process. The entry point adds a companion only if there is one.
live: weakref.WeakSet[CheckpointPlugin] = weakref.WeakSet()


class _Group:
    """A save of a Trainer with several ranks, whose error is raised behind their barrier."""

    error: BaseException | None = None


class CheckpointPlugin:
    """Saves checkpoints asynchronously and durably: a drop-in for Lightning's `AsyncCheckpointIO`.

    Args:
        checkpoint_io: Another CheckpointIO to save, load and remove with. It gets a snapshot in
            memory of the pool, on a thread of its own, and decides about files and durability;
            its `teardown` is called. By default stillframe writes the files itself.
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
        on_error: "raise" what failed, at the next save or at the end, or "warn" of it and train
            on.
        log_metrics: Log `checkpoint/call_ms`, `checkpoint/gate_ms`, `checkpoint/durable_s` and
            `checkpoint/bytes` of each checkpoint to the Trainer's loggers, once it is durable.

    Raises:
        TypeError, ValueError: What `Engine` refuses, an engine that skips saves, `engine=`
            together with an option of the engine, or a plugin of ours as `checkpoint_io`.
    """

    _reader: ClassVar[type[Any]]  # TorchCheckpointIO of the package

    def __init__(
        self,
        checkpoint_io: Any | None = None,
        *,
        engine: Engine | None = None,
        pool_bytes: int | None = None,
        max_in_flight: int = DEFAULT_IN_FLIGHT,
        when_busy: str = "wait",
        durable: bool = True,
        overlap: bool = True,
        check_mutation: bool = False,
        on_durable: Callable[[Any, SaveReport], object] | None = None,
        on_error: str = "raise",
        log_metrics: bool = False,
    ) -> None:
        if on_error not in _ON_ERROR:
            raise ValueError(f"on_error has to be 'raise' or 'warn', not {on_error!r}")
        refuse_ours(checkpoint_io, CheckpointPlugin)
        self._writers = Writers(
            self._reader,
            checkpoint_io,
            engine=engine,
            pool_bytes=pool_bytes,
            max_in_flight=max_in_flight,
            when_busy=when_busy,
            durable=durable,
            check_mutation=check_mutation,
            on_durable=on_durable,
        )
        self._durable = durable
        self._overlap = overlap
        self._on_error = on_error
        self._log_metrics = log_metrics
        self._enlist()

    def _enlist(self) -> None:
        self._work = self._new_work()
        self._trainers = Trainers()
        self._groups: list[_Group] = []
        register_with_loaded_packages(type(self))
        live.add(self)

    def __getstate__(self) -> dict[str, Any]:
        if self._writers.engine is not None:
            raise TypeError(
                f"{type(self).__name__}(engine=...) cannot be pickled: an engine belongs to its"
                " process. With a strategy that spawns its workers give the plugin pool_bytes,"
                " max_in_flight or when_busy instead of an engine."
            )
        state = self.__dict__.copy()
        for name in ("_work", "_trainers", "_groups"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._enlist()

    # ---- CheckpointIO ----

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Saves `checkpoint` to the file `path`.

        When the call returns depends on who makes it, see the head of this module. Parent
        directories are made. A symbolic link at `path` is replaced, not followed.

        Raises:
            TypeError: `storage_options` was given, the checkpoint cannot be pickled, or the
                strategy is one of XLA's.
            StillframeError: This save's own error where the call or a wait for durability finds
                it. Otherwise the oldest error of an earlier save that was not raised yet; this
                save has been made all the same.
        """
        trainer = calling_trainer(self, "save_checkpoint")
        # Looked at before anything of ours can fail, which would be an exception being handled too.
        quiet = self._trainers.failed(trainer)
        group = self._groups[-1] if self._groups else None
        work = self._current_work()
        in_handler = inside_signal_handler()
        interrupted = work.newest, work.failed
        work.newest, work.failed = None, True
        save = functools.partial(
            self._save, work, trainer, checkpoint, path, storage_options, in_handler
        )
        try:
            error = self._outcome(work, save, path, quiet)
        finally:
            if in_handler:  # the call that it interrupted goes on with its own
                work.newest, work.failed = interrupted
        if error is None:
            return
        if group is not None:
            group.error = error
            return
        if is_trainer(trainer) and _ranks.several(trainer) and meets_others_later(trainer):
            trainer.strategy.barrier("Trainer.save_checkpoint")
        raise error

    def _outcome(
        self, work: Work, save: Callable[[], None], path: Any, quiet: bool
    ) -> BaseException | None:
        """Saves; the error to be raised: the save's own, or the oldest that was not raised yet.
        What is only to be told of is told."""
        error: BaseException | None = None
        of_save = True
        try:
            save()
        except Exception as caught:
            error, of_save = caught, work.newest is not None
        work.collect_ended(but=work.newest)
        if error is not None and (quiet or self._warns(error, of_save)):
            if not of_save:
                _rotation.note_unmade(path)
            self._tell(error, quiet)
            error = None
        if quiet or self._on_error == "warn":
            while (earlier := work.next_error()) is not None:
                self._tell(earlier, quiet)
        return work.next_error() if error is None else error

    def _save(
        self,
        work: Work,
        trainer: Any,
        checkpoint: Any,
        path: Any,
        storage_options: Any | None,
        in_handler: bool,
    ) -> None:
        if storage_options is not None and self._writers.inner is None:
            raise TypeError(
                "`Trainer.save_checkpoint(..., storage_options=...)` with `storage_options` arg"
                f" is not supported for `{type(self).__name__}`. Please implement your custom"
                " `CheckpointIO` to define how you'd like to use `storage_options`."
            )
        if is_trainer(trainer):
            _strategies.refuse(trainer.strategy)
        asynchronous = not in_handler and self._trainers.may_save_early(trainer)
        asynchronous = asynchronous and not _for_requeue(path)
        work.rotation.make_room(absolute(path))
        overlap = self._overlap and asynchronous and not swaps_weights(trainer)
        handle = self._writers.submit(work, checkpoint, path, storage_options, overlap)
        work.pending.append(handle)
        work.newest, work.failed = handle, False
        if self._log_metrics and is_trainer(trainer):
            work.rotation.publications.append(Publication(handle, None, metrics_call(trainer)))
        if not asynchronous:
            error = error_of(handle)
            work.discard(handle)
            if error is not None:
                work.failed = True
                raise error

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Loads with Lightning's own reader (or `checkpoint_io`), after the saves of `path` that
        were submitted before.

        Takes `map_location` and `weights_only` as Lightning's
        `TorchCheckpointIO.load_checkpoint` of the installed version does, with that version's
        defaults.
        """
        self.wait_for(path)
        # What was loaded is about to be written over the state that saves in flight may still
        # be copying.
        gate.wait()
        loaded: dict[str, Any] = self._writers.load(path, *args, **kwargs)
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        """Removes the file, link or directory `path`, once every save submitted before has ended.

        It is kept, and that is logged, if the last of those saves failed: so a rotation never
        leaves fewer than one durable checkpoint. A missing `path` is no error. Where a save
        would be durable on return, this is done on return.
        """
        trainer = calling_trainer(self, "remove_checkpoint")
        asynchronous = not inside_signal_handler() and self._trainers.may_save_early(trainer)
        rotation = self._current_work().rotation
        rotation.remove(absolute(path))
        if not asynchronous:
            # While a Trainer is set up, what a link names goes once that is made anew.
            rotation.release(all_of_them=not self._trainers.is_set_up(trainer))
            rotation.wait()

    def teardown(self) -> None:
        """Waits for this plugin's saves, links and removes.

        A line on stderr says so when that takes more than a second. May be called again, and
        the plugin used again. Fabric never calls it: use `stillframe.wait_all()` there.

        Raises:
            StillframeError: The oldest error that was not raised yet; its notes name the
                others. Nothing is raised, but logged, while an exception of the training is
                being handled.
        """
        trainer = calling_trainer(self, "teardown")
        quiet = self._trainers.failed(trainer) or (
            # Called by hand in a `finally` or `except`, with no Trainer there to ask.
            not self._trainers.behind(trainer) and sys.exc_info()[0] is not None
        )
        try:
            self._finish(trainer, quiet)
        finally:
            try:
                self._writers.tear_down()
            except Exception as error:
                if not quiet:
                    raise
                log.error("the wrapped CheckpointIO was not torn down: %s", error, exc_info=error)

    # ---- for the companion ----

    def adopt(self, trainer: Any) -> None:
        """`trainer` was made with this plugin and has the companion."""
        self._trainers.add(trainer)
        if self._current_work().pending:
            # It may look for the newest checkpoint in a directory before any hook of it runs.
            _core.log_drain(None)

    def attach(self, trainer: Any) -> Wraps:
        """`trainer` is being set up. Returns where to put what goes over methods."""
        return self._trainers.set_up(trainer)

    def detach(self, trainer: Any) -> None:
        """Takes everything off that was put over methods for `trainer`."""
        self._trainers.tear_down(trainer)

    def training_starts(self, trainer: Any) -> None:
        self._trainers.starts(trainer)

    def training_ends(self, trainer: Any) -> None:
        self._trainers.ends(trainer)

    def tend(self) -> None:
        """Tells loggers what is due, and lets go of removes that waited for it."""
        self._current_work().rotation.tell()

    def finish(self, trainer: Any) -> None:
        """As `teardown`; some strategies never call that."""
        self._finish(trainer, self._trainers.failed(trainer))

    def settle(self) -> None:
        """Waits for everything and tells loggers; errors are left for the next save or the end."""
        work = self._current_work()
        if work.under_way():
            with WaitingLine(work.pending):
                error = work.drain(close=False)
            if error is not None:
                work.errors.insert(0, error)

    def publish(self, tell: Callable[[Any], object], callback: Any) -> None:
        """`tell(callback)` once the last checkpoint is durable; at once if it was not ours."""
        work = self._current_work()
        if work.newest is None:
            if not work.failed:
                tell(callback)
            return
        handle = work.newest
        work.rotation.publications.append(
            Publication(handle, absolute(handle.path), logger_call(tell, callback))
        )
        work.rotation.tell()

    def link(self, trainer: Any, target: Any, path: Any) -> None:
        """Makes `path` a link to `target` when all saves submitted before have ended."""
        rotation = self._current_work().rotation
        rotation.link(absolute(target), absolute(path))
        if inside_signal_handler() or not self._trainers.may_save_early(trainer):
            rotation.wait()

    def will_exist(self, path: Any, otherwise: Callable[[Any], bool]) -> bool:
        """Whether `path` will be there when the log has run out."""
        return self._current_work().rotation.will_exist(path, otherwise)

    def wait_for(self, path: Any) -> None:
        """Waits for the saves, links and removes of `path` that were submitted before."""
        if is_remote(path):
            _ordered.wait_for_key(_rotation.key(path))
        else:
            wait_for_path(path)

    @contextmanager
    def group(self, trainer: Any) -> Iterator[None]:
        """Around a save that all ranks of `trainer` make together: they raise together, too."""
        group = _Group()
        self._groups.append(group)
        try:
            yield
        finally:
            self._groups.remove(group)
        error = _ranks.agree(trainer, group.error)
        if error is not None:
            raise error

    # ---- inside ----

    def _current_work(self) -> Work:
        if self._work.pid != os.getpid():
            self._work = self._new_work()
        return self._work

    @property
    def _inner(self) -> Inner | None:
        return self._writers.inner

    def _new_work(self) -> Work:
        return Work(Rotation(self._writers.remover_of, durable=self._durable))

    def _finish(self, trainer: Any, quiet: bool) -> None:
        work = self._current_work()
        error: BaseException | None = None
        if work.under_way():
            with WaitingLine(work.pending):
                error = work.drain(close=True)
        if error is not None:
            work.errors.insert(0, error)
        if quiet:
            work.log_errors()
            return
        error = work.take_error()
        if error is not None and self._warns(error):
            self._tell(error, quiet)
            error = None
        if self._trainers.is_set_up(trainer) and _ranks.several(trainer):
            error = _ranks.agree(trainer, error)
        if error is not None:
            raise error

    def _warns(self, error: BaseException, of_save: bool = True) -> bool:
        """Whether it is warned of; not a mistake in how a save was asked for."""
        return self._on_error == "warn" and (of_save or is_failure(error))

    def _tell(self, error: BaseException, quiet: bool) -> None:
        if quiet:
            log_error(error)
        else:
            warn(error)


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


def _for_requeue(path: Any) -> bool:
    """A checkpoint that SLURM's requeue comes right after."""
    return os.path.basename(os.fsdecode(path)).startswith("hpc_ckpt_")
