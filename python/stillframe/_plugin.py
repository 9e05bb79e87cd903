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
right after) and while loggers are still to be told of it; see `Work.held`.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from stillframe import _core, _inner, _links, _ordered, _ranks, _strategies, gate, paths
from stillframe._caller import Fabric, calling_trainer, inside_signal_handler, io_chain
from stillframe._inner import Inner
from stillframe._publish import Publication, logger_call, metrics_call
from stillframe._waiting import WaitingLine
from stillframe._work import Work, absolute, error_of, is_failure, log_error, warn
from stillframe._work import is_remote as _is_remote
from stillframe._wraps import Wraps
from stillframe.engine import Engine, default_engine, exists, remove, wait_for_path
from stillframe.handle import SaveHandle, SaveReport

log = logging.getLogger("stillframe")

_DEFAULT_IN_FLIGHT = 2
_ON_ERROR = ("raise", "warn")

_NO_COMPANION = (
    "stillframe's companion callback is not among this Trainer's callbacks, so each of its saves"
    " waits until the checkpoint is durable. Create the plugin before the Trainer and pass it as"
    " Trainer(plugins=[...]); the callback comes through the entry points of the installed package."
)

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
        max_in_flight: int = _DEFAULT_IN_FLIGHT,
        when_busy: str = "wait",
        durable: bool = True,
        overlap: bool = True,
        check_mutation: bool = False,
        on_durable: Callable[[Any, SaveReport], object] | None = None,
        on_error: str = "raise",
        log_metrics: bool = False,
    ) -> None:
        _refuse_skipping(when_busy if engine is None else engine._when_busy)
        if on_error not in _ON_ERROR:
            raise ValueError(f"on_error has to be 'raise' or 'warn', not {on_error!r}")
        own = pool_bytes is not None or max_in_flight != _DEFAULT_IN_FLIGHT or when_busy != "wait"
        if engine is not None and own:
            raise ValueError(
                "engine= has its own pool and its own limits: give pool_bytes, max_in_flight and"
                " when_busy to the Engine, not to the plugin."
            )
        if _inner.wraps_ours(checkpoint_io, CheckpointPlugin):
            raise ValueError(
                f"{type(self).__name__}(checkpoint_io=...) takes another CheckpointIO, not one of"
                " stillframe's: it would wait for itself."
            )
        self._inner = None if checkpoint_io is None else Inner(checkpoint_io, self._reader)
        self._max_in_flight, self._when_busy = max_in_flight, when_busy
        if engine is not None:
            self._max_in_flight = engine._max_in_flight
            self._when_busy = engine._when_busy
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
        self._on_error = on_error
        self._log_metrics = log_metrics
        self._enlist()

    def _enlist(self) -> None:
        self._work = Work()
        # Trainers that use this plugin; those of them between on_train_start and on_train_end.
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._training: weakref.WeakSet[Any] = weakref.WeakSet()
        # What the companion has put over methods, for each Trainer between setup and teardown.
        self._wraps: weakref.WeakKeyDictionary[Any, Wraps] = weakref.WeakKeyDictionary()
        self._groups: list[_Group] = []
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
        for name in ("_work", "_known", "_training", "_wraps", "_groups"):
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
            TypeError: `storage_options` was given, the checkpoint cannot be pickled, or the
                strategy is one of XLA's.
            ValueError: `path` is not a local one.
            StillframeError: This save's own error where the call or a wait for durability finds
                it. Otherwise the oldest error of an earlier save that was not raised yet; this
                save has been made all the same.
        """
        trainer = calling_trainer(self, "save_checkpoint")
        # Looked at before anything of ours can fail, which would be an exception being handled too.
        quiet = self._training_failed(trainer)
        group = self._groups[-1] if self._groups else None
        work = self._current_work()
        work.newest, work.failed = None, True
        error: BaseException | None = None
        of_save = True
        try:
            self._save(work, trainer, checkpoint, path, storage_options)
        except Exception as caught:
            error, of_save = caught, work.newest is not None
            if not quiet and group is None and not self._warns(error, of_save):
                raise
        work.collect_ended(but=work.newest)
        if quiet or self._on_error == "warn":
            for each in _taken(work.errors):
                self._tell(each, quiet)
        elif error is None and work.errors:
            error = work.errors.pop(0)
        if error is None:
            return
        if quiet or self._warns(error, of_save):
            self._tell(error, quiet)
        elif group is not None:
            group.error = error
        else:
            raise error

    def _save(
        self, work: Work, trainer: Any, checkpoint: Any, path: Any, storage_options: Any | None
    ) -> None:
        if storage_options is not None and self._inner is None:
            raise TypeError(
                "`Trainer.save_checkpoint(..., storage_options=...)` with `storage_options` arg"
                f" is not supported for `{type(self).__name__}`. Please implement your custom"
                " `CheckpointIO` to define how you'd like to use `storage_options`."
            )
        self._refuse_remote(path)
        if _is_trainer(trainer):
            _strategies.refuse(trainer.strategy)
        asynchronous = self._may_return_early(trainer) and not _for_requeue(path)
        self._make_room(work, absolute(path))
        overlap = self._overlap and asynchronous and not _swaps_weights(trainer)
        handle = self._submit(work, checkpoint, path, storage_options, overlap)
        work.pending.append(handle)
        work.newest, work.failed = handle, False
        if self._log_metrics and _is_trainer(trainer):
            work.publications.append(Publication(handle, None, metrics_call(trainer)))
        if not asynchronous:
            error = error_of(handle)
            work.discard(handle)
            if error is not None:
                work.failed = True
                raise error

    def _submit(
        self, work: Work, checkpoint: Any, path: Any, storage_options: Any, overlap: bool
    ) -> SaveHandle:
        engine = self._get_engine(work)
        if self._inner is not None:
            return self._inner.save(
                checkpoint,
                path,
                self._key(path),
                storage_options=storage_options,
                overlap=overlap,
                engine=engine,
                pending=work.pending,
                max_in_flight=self._max_in_flight,
                when_busy=self._when_busy,
                on_durable=self._on_durable,
            )
        return engine._submit(
            checkpoint,
            path,
            overlap=overlap,
            durable=self._durable,
            check_mutation=self._check_mutation,
            on_durable=self._on_durable,
            follow_link=False,
            create_parents=True,
        )

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
        reader = self._reader() if self._inner is None else self._inner.io
        loaded: dict[str, Any] = reader.load_checkpoint(path, *args, **kwargs)
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        """Removes the file, link or directory `path`, once every save submitted before has ended.

        It is kept, and that is logged, if the last of those saves failed: so a rotation never
        leaves fewer than one durable checkpoint. A missing `path` is no error. Where a save
        would be durable on return, this is done on return.

        Raises:
            ValueError: `path` is not a local one.
        """
        self._refuse_remote(path)
        asynchronous = self._may_return_early(calling_trainer(self, "remove_checkpoint"))
        work = self._current_work()
        name = absolute(path)
        work.links.pop(name, None)
        work.held.append(name)
        self._release(work, all_of_them=not asynchronous)
        if not asynchronous:
            _ordered.wait_for_key(self._key(path))

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
        quiet = self._training_failed(trainer) or (
            # Called by hand in a `finally` or `except`, with no Trainer there to ask.
            not self._trainers(trainer) and sys.exc_info()[0] is not None
        )
        try:
            self._finish(trainer, quiet)
        finally:
            if self._inner is not None:
                self._inner.io.teardown()

    # ---- for the companion ----

    def adopt(self, trainer: Any) -> None:
        """`trainer` was made with this plugin and has the companion."""
        self._known.add(trainer)
        if self._current_work().pending:
            # It may look for the newest checkpoint in a directory before any hook of it runs.
            _core.log_drain(None)

    def attach(self, trainer: Any) -> Wraps:
        """`trainer` is being set up. It does not train yet, though an earlier fit may have broken
        off. Returns where to put what goes over methods."""
        self._known.add(trainer)
        self._training.discard(trainer)
        return self._wraps.setdefault(trainer, Wraps())

    def detach(self, trainer: Any) -> None:
        """Takes everything off that was put over methods for `trainer`."""
        wraps = self._wraps.pop(trainer, None)
        if wraps is not None:
            wraps.restore()

    def training_starts(self, trainer: Any) -> None:
        self._known.add(trainer)
        self._training.add(trainer)

    def training_ends(self, trainer: Any) -> None:
        self._training.discard(trainer)

    def tend(self) -> None:
        """Tells loggers what is due, and lets go of removes that waited for it."""
        work = self._current_work()
        if work.publications:
            self._deliver(work)
        if work.held:
            self._release(work)

    def finish(self, trainer: Any) -> None:
        """As `teardown`; some strategies never call that."""
        self._finish(trainer, self._training_failed(trainer))

    def settle(self) -> None:
        """Waits for everything and tells loggers; errors are left for the next save or the end."""
        work = self._current_work()
        if work.under_way():
            with WaitingLine(work.pending):
                error = self._drain(work, close=False)
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
        work.publications.append(
            Publication(handle, absolute(handle.path), logger_call(tell, callback))
        )
        self._deliver(work)

    def link(self, trainer: Any, target: Any, path: Any) -> None:
        """Makes `path` a link to `target` when all saves submitted before have ended."""
        work = self._current_work()
        source, name = absolute(target), absolute(path)
        durable = self._durable
        self._make_room(work, name)
        work.links[name] = source
        key = self._key(name)
        _ordered.submit(
            key,
            _core.WORK_LINK,
            lambda after_good: _links.make_link(source, name, durable=durable),
        )
        work.newest_key = key
        self._release(work)
        if not self._may_return_early(trainer):
            _ordered.wait_for_key(key)

    def will_exist(self, path: Any, otherwise: Callable[[Any], bool]) -> bool:
        """Whether `path` will be there when the log has run out."""
        if absolute(path) in self._current_work().held:
            return False
        if not _is_remote(path):
            return exists(path)
        known = _core.log_exists(self._key(path))
        return otherwise(path) if known < 0 else bool(known)

    def wait_for(self, path: Any) -> None:
        """Waits for the saves, links and removes of `path` that were submitted before."""
        if _is_remote(path):
            _ordered.wait_for_key(self._key(path))
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

    def _current_work(self) -> Work:
        if self._work.pid != os.getpid():
            self._work = Work()
        return self._work

    def _get_engine(self, work: Work) -> Engine:
        if self._engine is not None:
            return self._engine
        if self._engine_options is None:
            engine = default_engine()
            _refuse_skipping(engine._when_busy)
            return engine
        if work.engine is None:
            work.engine = Engine(**self._engine_options)
        return work.engine

    def _key(self, path: Any) -> bytes:
        if _is_remote(path):
            return os.fsencode(path)
        return paths.key(path, follow_link=False)

    def _refuse_remote(self, path: Any) -> None:
        if self._inner is None and _is_remote(path):
            raise ValueError(
                f"{os.fsdecode(path)!r} is not a local path, and stillframe's plugin saves to local"
                " files only, unless it is given a checkpoint_io for others."
            )

    def _make_room(self, work: Work, path: str) -> None:
        """Something is about to be submitted that makes `path`: removes of it come first."""
        work.links.pop(path, None)
        if path in work.held:
            self._remove(work, path)

    def _release(self, work: Work, all_of_them: bool = False) -> None:
        """Submits the removes that nothing holds back."""
        for path in list(work.held):
            if all_of_them or not work.needed(path):
                self._remove(work, path)

    def _remove(self, work: Work, path: str) -> None:
        while path in work.held:
            work.held.remove(path)
        key = self._key(path)
        if self._inner is None:
            remove(path)
        else:
            self._inner.remove(path, key)
        work.newest_key = key

    def _deliver(self, work: Work) -> None:
        while work.publications and work.publications[0].due():
            work.publications.popleft().deliver()
        self._release(work)

    def _finish(self, trainer: Any, quiet: bool) -> None:
        work = self._current_work()
        error: BaseException | None = None
        if work.under_way():
            with WaitingLine(work.pending):
                error = self._drain(work, close=True)
        if error is not None:
            work.errors.insert(0, error)
        if quiet:
            work.log_errors()
            return
        error = work.take_error()
        if error is not None and self._warns(error):
            self._tell(error, quiet)
            error = None
        if _is_trainer(trainer) and trainer in self._wraps and _ranks.several(trainer):
            error = _ranks.agree(trainer, error)
        if error is not None:
            raise error

    def _drain(self, work: Work, *, close: bool) -> BaseException | None:
        """Waits for everything; what an interrupted wait did not get to is left for the next.

        Returns what a logger raised when it was told of a checkpoint.
        """
        work.wait_for_saves()
        error: BaseException | None = None
        while work.publications:
            try:
                work.publications.popleft().deliver()
            except Exception as caught:
                error = error or caught
        self._release(work, all_of_them=True)
        if work.newest_key is not None:
            _ordered.wait_for_key(work.newest_key)
            work.newest_key = None
        if close and work.engine is not None:
            work.engine.close()
            work.engine = None
        return error

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


def _refuse_skipping(when_busy: str) -> None:
    if when_busy == "skip":
        raise ValueError(
            "when_busy='skip' would lose checkpoints under Lightning: ModelCheckpoint removes the"
            " previous file after a save, also when that save was skipped. Use 'wait' or 'raise'."
        )


def _is_trainer(caller: Any) -> bool:
    return caller is not None and caller is not Fabric


def _for_requeue(path: Any) -> bool:
    """A checkpoint that SLURM's requeue comes right after."""
    return os.path.basename(os.fsdecode(path)).startswith("hpc_ckpt_")


def _swaps_weights(trainer: Any) -> bool:
    """Whether ModelCheckpoint loads older weights for a save and puts the newer back right after:
    with manual optimization, where the module keeps them."""
    module = trainer.lightning_module if _is_trainer(trainer) else None
    return (
        module is not None
        and not module.automatic_optimization
        and isinstance(getattr(module, "saved_models", None), dict)
    )


def _taken(errors: list[BaseException]) -> Iterator[BaseException]:
    while errors:
        yield errors.pop(0)
