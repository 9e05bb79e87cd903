"""What a plugin has under way in one process, and the errors of it."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections import deque
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stillframe.errors import StillframeError

if TYPE_CHECKING:
    from stillframe._publish import Publication
    from stillframe.engine import Engine
    from stillframe.handle import SaveHandle

log = logging.getLogger("stillframe")

_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass
class Work:
    """A forked child starts with nothing.

    Attributes:
        pid: The process.
        engine: The plugin's own engine.
        pending: Saves whose end has not been looked at, oldest first.
        errors: Errors of saves that have ended, oldest first, until they are raised or logged.
        newest: The last save; None before the first and when it failed in its call.
        failed: The last save failed in its call, and that was not raised.
        newest_key: Name in the log of the newest link or remove; all earlier ones end before.
        publications: Calls that wait for a save to be durable, in order.
        links: What each link that was made points to (absolute paths), as of the log's end.
        held: Removes (absolute paths) that wait until nothing needs the file, in order.
    """

    pid: int = field(default_factory=os.getpid)
    engine: Engine | None = None
    pending: list[SaveHandle] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    newest: SaveHandle | None = None
    failed: bool = False
    newest_key: bytes | None = None
    publications: deque[Publication] = field(default_factory=deque)
    links: dict[str, str] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)

    def under_way(self) -> bool:
        return bool(
            self.pending or self.publications or self.held or self.newest_key or self.engine
        )

    def needed(self, path: str) -> bool:
        """Whether a link points to the file, or loggers are still to be told of it."""
        return path in self.links.values() or any(
            each.path == path for each in list(self.publications)
        )

    def discard(self, handle: SaveHandle) -> bool:
        """False if a save made by a signal handler in the meantime took `handle` off the list."""
        try:
            self.pending.remove(handle)
        except ValueError:
            return False
        return True

    def collect_ended(self, but: SaveHandle | None = None) -> None:
        """Takes the errors of saves that have ended; not that of `but`, however fast it failed."""
        for handle in list(self.pending):
            if handle is not but and handle.done() and self.discard(handle):
                error = error_of(handle)
                if error is not None:
                    self.errors.append(error)

    def wait_for_saves(self) -> None:
        """What an interrupted wait did not get to is left for the next."""
        while self.pending:
            handle = self.pending[0]
            error = error_of(handle)
            if self.discard(handle) and error is not None:
                self.errors.append(error)

    def take_error(self) -> BaseException | None:
        """The oldest error; its notes name the others, which are logged."""
        if not self.errors:
            return None
        first = self.errors.pop(0)
        for error in self.errors:
            first.add_note(f"Another checkpoint failed as well: {error}")
        self.log_errors()
        return first

    def log_errors(self) -> None:
        while self.errors:
            log_error(self.errors.pop(0))


def error_of(handle: SaveHandle) -> BaseException | None:
    """Waits for the save and collects its error. None too if `wait_all` has raised that already."""
    if handle.done() and handle._failure is not None and handle._failure.collected:
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


def is_remote(path: Any) -> bool:
    return _REMOTE.match(os.fsdecode(path)) is not None


def absolute(path: Any) -> str:
    """The one name of a path: absolute where it is a local one."""
    text = os.fsdecode(path)
    return text if is_remote(text) else os.path.abspath(text)
