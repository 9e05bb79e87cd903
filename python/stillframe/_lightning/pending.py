"""The saves that a plugin has under way in one process, and their errors."""

from __future__ import annotations

import logging
import os
import warnings
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stillframe._save.handle import SaveHandle, SkippedSave, is_collected
from stillframe.errors import StillframeError

if TYPE_CHECKING:
    from stillframe._lightning.rotation import Rotation
    from stillframe._save.engine import Engine

log = logging.getLogger("stillframe")


@dataclass
class Work:
    """Saves and their errors. A forked child starts with an empty one.

    A signal handler may save at any moment, even in the middle of a method here. So each method
    takes an element off a list in one atomic step, without a check before it.

    Attributes:
        rotation: Links, removes and notices to loggers that follow the saves.
        pid: The process's id.
        engine: The plugin's own engine.
        pending: Saves whose result has not been taken yet, oldest first.
        errors: Errors of ended saves, oldest first, until they are raised or logged.
        newest: The last save; None before the first. A save that failed in its call is a
            SkippedSave.
    """

    rotation: Rotation
    pid: int = field(default_factory=os.getpid)
    engine: Engine | None = None
    pending: list[SaveHandle] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    newest: SaveHandle | None = None

    def under_way(self) -> bool:
        return bool(self.pending or self.engine or self.rotation.under_way())

    def use(self, made: Engine) -> Engine:
        """Return the engine: `made`, unless a signal handler made one in the meantime."""
        if self.engine is None:
            self.engine = made
        else:
            made.close()
        return self.engine

    def discard(self, handle: SaveHandle) -> bool:
        """Take `handle` off the list; return False if a signal handler's save did so before."""
        try:
            self.pending.remove(handle)
        except ValueError:
            return False
        return True

    def is_newest_made(self) -> bool:
        """Tell whether the last save got beyond its call."""
        return not isinstance(self.newest, SkippedSave)

    def forget_newest(self) -> None:
        """Wait for the last save and drop its error, which has been raised already."""
        handle = self.newest
        if handle is not None and self.discard(handle):
            error_of(handle)

    def collect_ended(self, but: SaveHandle | None = None) -> None:
        """Collect the errors of saves that have ended, except that of `but`."""
        for handle in list(self.pending):
            if handle is not but and handle.done() and self.discard(handle):
                error = error_of(handle)
                if error is not None:
                    self.errors.append(error)
        self._collect_of_links()

    def _collect_of_links(self) -> None:
        while True:
            try:
                self.errors.append(self.rotation.errors.popleft())
            except IndexError:
                return

    def drain(self, *, close: bool) -> BaseException | None:
        """Wait for everything. An interrupted wait leaves the rest for the next call.

        Args:
            close: Close the plugin's own engine, too.

        Returns:
            The exception of a logger that was told of a checkpoint, if any.
        """
        while self.pending:
            for handle in list(self.pending):
                error = error_of(handle)
                if self.discard(handle) and error is not None:
                    self.errors.append(error)
        raised = self.rotation.finish()
        self._collect_of_links()
        if close:
            engine, self.engine = self.engine, None
            if engine is not None:
                engine.close()
        return raised

    def next_error(self) -> BaseException | None:
        """Take the oldest error off the list and return it."""
        try:
            return self.errors.pop(0)
        except IndexError:
            return None

    def take_error(self) -> BaseException | None:
        """Take all errors: return the oldest one with notes that name the others, and log those."""
        first = self.next_error()
        while first is not None and (error := self.next_error()) is not None:
            first.add_note(f"Another checkpoint failed as well: {error}")
            log_error(error)
        return first

    def log_errors(self) -> None:
        while (error := self.next_error()) is not None:
            log_error(error)


def error_of(handle: SaveHandle) -> BaseException | None:
    """Wait for the save and collect its error. Return None if `wait_all` has raised it already."""
    if is_collected(handle):
        return None
    try:
        return handle.exception()
    except CancelledError as cancelled:
        return cancelled


def log_error(error: BaseException) -> None:
    log.error("a checkpoint was not saved: %s", error, exc_info=error)


def warn(error: BaseException) -> None:
    """Log and warn, as `on_error="warn"` does instead of raising."""
    log.warning("a checkpoint was not saved: %s", error, exc_info=error)
    warnings.warn(f"a checkpoint was not saved: {error}", UserWarning, stacklevel=2)


def is_failure(error: BaseException) -> bool:
    """Tell whether a save failed, as opposed to being called with wrong arguments."""
    return isinstance(error, (StillframeError, OSError, CancelledError))
