"""What a plugin has under way in one process, and the errors of it."""

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
    """Saves, and the errors of them. A forked child starts with nothing.

    A signal handler may save at any moment, also in the middle of a method here. So each of them
    takes what it takes from a list in one step, and looks for nothing before that.

    Attributes:
        rotation: What is to become of files once saves have ended.
        pid: The process.
        engine: The plugin's own engine.
        pending: Saves whose end has not been looked at, oldest first.
        errors: Errors of saves that have ended, oldest first, until they are raised or logged.
        newest: The last save; None before the first. One that failed in its call is a SkippedSave.
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
        """The engine: `made`, unless a signal handler saved while it was being made."""
        if self.engine is None:
            self.engine = made
        else:
            made.close()
        return self.engine

    def discard(self, handle: SaveHandle) -> bool:
        """False if a save made by a signal handler in the meantime took `handle` off the list."""
        try:
            self.pending.remove(handle)
        except ValueError:
            return False
        return True

    def is_newest_made(self) -> bool:
        """Whether the last save got beyond its call."""
        return not isinstance(self.newest, SkippedSave)

    def forget_newest(self) -> None:
        """Its error has been raised; waits for its end."""
        handle = self.newest
        if handle is not None and self.discard(handle):
            error_of(handle)

    def collect_ended(self, but: SaveHandle | None = None) -> None:
        """Takes the errors of saves that have ended; not that of `but`, however fast it failed."""
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
        """Waits for everything; what an interrupted wait did not get to is left for the next.

        Args:
            close: Close the plugin's own engine, too.

        Returns:
            What a logger raised when it was told of a checkpoint.
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
        """The oldest error, which is no longer kept."""
        try:
            return self.errors.pop(0)
        except IndexError:
            return None

    def take_error(self) -> BaseException | None:
        """The oldest error; its notes name the others, which are logged."""
        first = self.next_error()
        while first is not None and (error := self.next_error()) is not None:
            first.add_note(f"Another checkpoint failed as well: {error}")
            log_error(error)
        return first

    def log_errors(self) -> None:
        while (error := self.next_error()) is not None:
            log_error(error)


def error_of(handle: SaveHandle) -> BaseException | None:
    """Waits for the save and collects its error. None too if `wait_all` has raised that already."""
    if is_collected(handle):
        return None
    try:
        return handle.exception()
    except CancelledError as cancelled:
        return cancelled


def log_error(error: BaseException) -> None:
    log.error("a checkpoint was not saved: %s", error, exc_info=error)


def warn(error: BaseException) -> None:
    """What `on_error="warn"` does instead of raising."""
    log.warning("a checkpoint was not saved: %s", error, exc_info=error)
    warnings.warn(f"a checkpoint was not saved: {error}", UserWarning, stacklevel=2)


def is_failure(error: BaseException) -> bool:
    """Whether it is the failure of a save, and not a mistake in how it was asked for."""
    return isinstance(error, (StillframeError, OSError, CancelledError))
