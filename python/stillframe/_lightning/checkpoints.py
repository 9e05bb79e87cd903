"""The checkpoints of one plugin: when a save returns, and where its errors are raised.

When a save returns:

    called by                                        the save returns
    a Trainer, from on_train_start to on_train_end   once the state is captured
    a Trainer at any other time                      once it is durable
    a signal handler                                 once it is durable
    a Trainer that saves a `hpc_ckpt_*` file         once it is durable
    Fabric                                           once the state is captured
    your own code                                    as for the Trainers that use the plugin if
                                                     there are any, otherwise as for Fabric

After a save outside training, something needs the file at once: the learning rate finder and the
batch size scaler read it back, a spawned worker passes its name to the parent, a script uploads it,
or a job is requeued. The companion callback tells the plugin when training starts and ends, and
`Trainer.state` tells it when training was interrupted. A Trainer without the companion never saves
asynchronously, because nothing would delay its hooks while the state is being copied.

An error is raised once, by the next save (which is still made) or by `teardown`, oldest first. A
save that is durable on return raises its own error. While Lightning handles an exception of the
training, errors are only logged, so that they do not replace that exception. In a Trainer with
several ranks, all of them raise, after the barrier of the save (`ranks.py`).

A remove is delayed while a link points to the file (with `save_last="link"` a new link follows
soon), and until loggers have been told of the file (`rotation.py`).

If a save is refused in its call and the plugin only warns, ModelCheckpoint does not know that and
removes the previous file. So such a save gets a failed entry in the log, and the remove behind it
is dropped.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from stillframe import _core
from stillframe._base.paths import Place
from stillframe._lightning import ranks, rotation, sharded_save, strategies
from stillframe._lightning.caller import inside_signal_handler, meets_others_later
from stillframe._lightning.options import PluginOptions
from stillframe._lightning.pending import (
    Work,
    error_of,
    is_failure,
    log_error,
    warn,
)
from stillframe._lightning.publish import Publication, logger_call, metrics_call
from stillframe._lightning.rotation import Rotation
from stillframe._lightning.sharded_save import Parts
from stillframe._lightning.trainers import Trainers, is_trainer, swaps_weights
from stillframe._lightning.waiting import WaitingLine
from stillframe._lightning.writers import Writers
from stillframe._save import ordered
from stillframe._save.handle import SaveHandle, SkippedSave
from stillframe._watch import gate

if TYPE_CHECKING:
    from stillframe._lightning.wrapped import Inner

log = logging.getLogger("stillframe")


# Starts a save to a target, given the plugin's work and whether copying may go on after the call.
Submit = Callable[[Work, Place, bool], SaveHandle]


# For saves that several ranks make together: the error of each save, to be raised after their
# barrier, and whether its call failed.
Group = list[tuple[BaseException | None, bool]]


class Checkpoints:
    """All saves, loads and removes of one plugin.

    Args:
        name: The name of the plugin's class, as the user wrote it.
        writers: Writes and loads the files.
        options: The plugin's options.

    Attributes:
        trainers: The Trainers that use the plugin; the companion tells when they train.
    """

    def __init__(self, name: str, writers: Writers, options: PluginOptions) -> None:
        self.name = name
        self._writers = writers
        self._options = options
        self._begin()

    def _begin(self) -> None:
        self._work = self._new_work()
        self.trainers = Trainers()
        self._groups: list[Group] = []

    def __getstate__(self) -> dict[str, Any]:
        if self._options.engine is not None:
            raise TypeError(
                f"{self.name}(engine=...) cannot be pickled: an engine belongs to its"
                " process. With a strategy that spawns its workers give the plugin pool_bytes,"
                " max_in_flight or when_busy instead of an engine."
            )
        state = self.__dict__.copy()
        for name in ("_work", "trainers", "_groups"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    # ---- for the plugin: what Lightning calls; see there ----

    def save(self, trainer: Any, checkpoint: Any, path: Any, storage_options: Any | None) -> None:
        def submit(work: Work, place: Place, overlap: bool) -> SaveHandle:
            return self._writers.submit(work, checkpoint, place, storage_options, overlap)

        if storage_options is None or self._writers.inner is not None:
            self._save_with(submit, trainer, path)
        else:
            self._save_with(self._refuse_storage_options, trainer, path)

    def save_sharded(self, trainer: Any, parts: Parts, place: Place) -> None:
        """Save a sharded checkpoint into the directory `place`. All ranks call this together."""

        def submit(work: Work, place: Place, overlap: bool) -> SaveHandle:
            options = self._options.save_options(overlap=overlap)
            return sharded_save.submit(parts, place, options, engine=self._writers.engine_of(work))

        self._save_with(submit, trainer, place.given)

    def _save_with(self, submit: Submit, trainer: Any, path: Any) -> None:
        # First of all: a failure of ours below would also count as an exception being handled.
        quiet = self.trainers.failed(trainer)
        group = self._groups[-1] if self._groups else None
        work = self._current_work()
        in_handler = inside_signal_handler()
        interrupted, work.newest = work.newest, SkippedSave(repr(path))  # until the save is made
        save = functools.partial(self._save, work, submit, trainer, path, in_handler)
        try:
            error = self._outcome(work, save, path, quiet)
            unmade = not work.is_newest_made()
        finally:
            if in_handler:  # the interrupted call goes on with its own save
                work.newest = interrupted
        if group is not None:
            group.append((error, unmade))
            return
        if error is None:
            return
        if is_trainer(trainer) and ranks.several(trainer) and meets_others_later(trainer):
            trainer.strategy.barrier("Trainer.save_checkpoint")
        raise error

    def _outcome(
        self, work: Work, save: Callable[[], None], path: Any, quiet: bool
    ) -> BaseException | None:
        """Save and return the error to raise: the save's own, or else the oldest one not raised
        yet. Errors that must not be raised are logged, or warned of, here."""
        error: BaseException | None = None
        of_save = True
        try:
            save()
        except Exception as caught:
            error, of_save = caught, work.is_newest_made()
        work.collect_ended(but=work.newest)
        if error is not None and (quiet or self._warns(error, of_save)):
            if not of_save:
                rotation.note_unmade(path)
            self._tell(error, quiet)
            error = None
        if quiet or self._options.on_error == "warn":
            while (earlier := work.next_error()) is not None:
                self._tell(earlier, quiet)
        return work.next_error() if error is None else error

    def _save(
        self,
        work: Work,
        submit: Submit,
        trainer: Any,
        path: Any,
        in_handler: bool,
    ) -> None:
        if is_trainer(trainer):
            strategies.refuse(trainer.strategy)
        place = Place.of(path)
        asynchronous = not in_handler and self.trainers.may_save_early(trainer)
        asynchronous = asynchronous and not _for_requeue(place)
        work.rotation.make_room(place)
        overlap = self._options.overlap and asynchronous and not swaps_weights(trainer)
        handle = submit(work, place, overlap)
        work.pending.append(handle)
        work.newest = handle
        if self._options.log_metrics and is_trainer(trainer):
            work.rotation.publications.append(Publication(handle, None, metrics_call(trainer)))
        if not asynchronous:
            error = error_of(handle)
            work.discard(handle)
            if error is not None:
                raise error

    def _refuse_storage_options(self, work: Work, place: Place, overlap: bool) -> SaveHandle:
        raise TypeError(
            "`Trainer.save_checkpoint(..., storage_options=...)` with `storage_options` arg"
            f" is not supported for `{self.name}`. Please implement your custom"
            " `CheckpointIO` to define how you'd like to use `storage_options`."
        )

    def load(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        place = Place.of(path)
        self.wait_for(place)
        # The caller is about to overwrite its state with the loaded one, and saves in flight may
        # still be copying that state.
        gate.wait()
        loaded: dict[str, Any] = self._writers.load(place, *args, **kwargs)
        return loaded

    def remove(self, trainer: Any, path: Any) -> None:
        asynchronous = not inside_signal_handler() and self.trainers.may_save_early(trainer)
        rotation = self._current_work().rotation
        rotation.remove(Place.of(path))
        if not asynchronous:
            # While a Trainer is set up, a link's target is removed when the link is made again.
            rotation.release(all_of_them=not self.trainers.is_set_up(trainer))
            rotation.wait()

    def tear_down(self, trainer: Any) -> None:
        quiet = self.trainers.failed(trainer) or (
            # The user called it in a `finally` or `except`, and no Trainer knows of an exception.
            not self.trainers.behind(trainer) and sys.exc_info()[0] is not None
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

    def register(self, trainer: Any) -> None:
        """Register a Trainer that was made with this plugin and has the companion."""
        self.trainers.add(trainer)
        if self._current_work().pending:
            # The Trainer may search a directory for its newest checkpoint before any hook runs.
            _core.log_drain(None)

    def notify(self) -> None:
        """Tell loggers of durable checkpoints, and submit the removes that waited for that."""
        self._current_work().rotation.notify()

    def finish(self, trainer: Any) -> None:
        """Do what `tear_down` does, for strategies that never call it."""
        self._finish(trainer, self.trainers.failed(trainer))

    def settle(self) -> None:
        """Wait for everything and tell loggers. Errors are left for the next save or the end."""
        work = self._current_work()
        if work.under_way():
            with WaitingLine(work.pending):
                error = work.drain(close=False)
            if error is not None:
                work.errors.insert(0, error)

    def publish(self, tell: Callable[[Any], object], checkpoint_callback: Any) -> None:
        """Call `tell(checkpoint_callback)` once the last checkpoint is durable, or at once if this
        plugin did not save it."""
        work = self._current_work()
        handle = work.newest
        if handle is None:
            tell(checkpoint_callback)
        if handle is None or not work.is_newest_made():
            return
        work.rotation.publications.append(
            Publication(handle, Place.of(handle.path), logger_call(tell, checkpoint_callback))
        )
        work.rotation.notify()

    def link(self, trainer: Any, target: Any, path: Any) -> None:
        """Make `path` a link to `target` when all saves submitted before have ended."""
        rotation = self._current_work().rotation
        rotation.link(Place.of(target), Place.of(path))
        if inside_signal_handler() or not self.trainers.may_save_early(trainer):
            rotation.wait()

    def will_exist(self, path: Any, otherwise: Callable[[Any], bool]) -> bool:
        """Tell whether `path` will exist when the log has been carried out."""
        return self._current_work().rotation.will_exist(Place.of(path), otherwise)

    def wait_for(self, place: Place) -> None:
        """Wait for the saves, links and removes of `place` that were submitted before."""
        if place.remote:
            ordered.wait_for_key(place.key())
        else:
            ordered.wait_for_path(place.given)

    @contextmanager
    def together(self, strategy: Any) -> Iterator[None]:
        """Return a context for a save that all ranks of `strategy` make together, so that all of
        them raise its error."""
        if self._groups:
            yield
            return
        group: Group = []
        self._groups.append(group)
        try:
            yield
        finally:
            self._groups.remove(group)
        error, unmade = ranks.agree(strategy, *(group[-1] if group else (None, False)))
        if unmade:
            self._current_work().forget_newest()  # its error is the one raised here
        if error is not None:
            raise error

    # ---- inside ----

    def _current_work(self) -> Work:
        if self._work.pid != os.getpid():
            self._work = self._new_work()
        return self._work

    @property
    def inner(self) -> Inner | None:
        """The CheckpointIO that the user gave, if any."""
        return self._writers.inner

    def _new_work(self) -> Work:
        return Work(Rotation(self._writers.remover_of, durable=self._options.durable))

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
        if self._options.on_error == "warn":
            while (each := work.next_error()) is not None:
                warn(each)
        error = work.take_error()
        if self.trainers.is_set_up(trainer) and ranks.several(trainer):
            error, _ = ranks.agree(trainer.strategy, error)
        if error is not None:
            raise error

    def _warns(self, error: BaseException, of_save: bool) -> bool:
        """Tell whether to warn of the error instead of raising it. Wrong arguments are raised."""
        return self._options.on_error == "warn" and (of_save or is_failure(error))

    def _tell(self, error: BaseException, quiet: bool) -> None:
        if quiet:
            log_error(error)
        else:
            warn(error)


def _for_requeue(place: Place) -> bool:
    """Tell whether it is the checkpoint that Lightning saves before SLURM requeues the job."""
    return os.path.basename(place.text).startswith("hpc_ckpt_")
