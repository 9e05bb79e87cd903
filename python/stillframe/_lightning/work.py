"""The saves that a plugin has under way in one process, and how their errors reach the user.

    a call of the plugin ──▶ `saves` ──pop_next_error──▶ raised by a save or at the end,
                                                         warned of, or logged

An error stays in its handle until it is reported: by the next save, at the end of the training, or
by `stillframe.wait_all`. An error that belongs to no save gets a handle of its own, `FailedHandle`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, TextIO

from stillframe._base.paths import CheckpointPath
from stillframe._base.threads import RunOnceThread
from stillframe._lightning.rotation import Rotation
from stillframe._preemption import in_time
from stillframe._save.handle import SaveHandle, State, is_error_collected, report_of, wait_for_end
from stillframe.errors import StillframeError

if TYPE_CHECKING:
    from stillframe._lightning.wrapped import WrappedIO
    from stillframe._save.engine import Engine

log = logging.getLogger("stillframe")

DELAY_S = 1.0  # a shorter wait shows no line
_REDRAW_S = 0.1  # how often the progress bar is drawn again


class FailedHandle(SaveHandle):
    """A failure of a link, of a logger, or of a call that raised before it made a save."""

    def __init__(self, what: str, error: BaseException | None = None) -> None:
        super().__init__(what)
        self._outcome.settle(None, error)

    @property
    def state(self) -> State:
        return "failed"


class Work:
    """The saves of one plugin in one process, and its files.

    A signal handler may save in the middle of any method here. So each method takes an item from a
    list by one atomic operation, and does not rely on an earlier read of the list.

    Args:
        remover_of, durable: See `Rotation`.

    Attributes:
        rotation: The removes, links and notifications that follow the saves.
        pid: The process that has made this object.
        engine: The engine that the plugin owns and has made, or None.
        saves: Saves under way and saves with unreported errors, in the order of reporting.
        newest: The last save; None before the first save, `FailedHandle` if its call raised.
        newest_returns_early: Whether the newest save's call returns before the save has ended.
        ending: The id of the exception or frame that ends the training, and the time of
            `time.monotonic` by which saves have to be durable.
    """

    def __init__(
        self, remover_of: Callable[[CheckpointPath], WrappedIO | None], *, durable: bool
    ) -> None:
        self.rotation = Rotation(remover_of, durable=durable, failed=self.add_error_without_save)
        self.pid = os.getpid()
        self.engine: Engine | None = None
        self.saves: list[SaveHandle] = []
        self.newest: SaveHandle | None = None
        self.newest_returns_early = False
        self.ending: tuple[int, float] = 0, 0.0

    def under_way(self) -> bool:
        """Return whether `drain` has anything to do or to wait for."""
        return bool(self.saves or self.engine or self.rotation.under_way())

    def use(self, made: Engine) -> Engine:
        """Make `made` the plugin's own engine and return it. If a signal handler has made an engine
        meanwhile, close `made` and return the handler's engine."""
        if self.engine is None:
            self.engine = made
        else:
            made.close()
        return self.engine

    def add(self, handle: SaveHandle, *, early: bool) -> None:
        """Add the newest save. `early`: its call returns before the save has ended. Then the save's
        error is reported after all others, otherwise before them."""
        index = len(self.saves) if early else 0
        self.saves.insert(index, handle)
        self.newest, self.newest_returns_early = handle, early

    def add_error_without_save(
        self, what: str, error: BaseException, *, first: bool = False
    ) -> None:
        """Add an error that belongs to no save.

        Args:
            what: What has failed, for messages: a path, or "a logger".
            first: Report the error before all others, otherwise after them.
        """
        index = 0 if first else len(self.saves)
        self.saves.insert(index, FailedHandle(what, error))

    def newest_call_succeeded(self) -> bool:
        """Return whether the call that made the newest save did not raise."""
        return not isinstance(self.newest, FailedHandle)

    def wait_and_drop_newest_error(self) -> None:
        """Wait for the last save and drop its error, because all ranks raise another error."""
        handle = self.newest
        if handle is not None and self._discard(handle):
            _error_of(handle)  # waits; the error counts as reported now

    def pop_next_error(self) -> BaseException | None:
        """Return the error to report next, and remove it. Return None if there is none."""
        for handle in list(self.saves):
            # Leave this save for a later call even if it has failed already. Otherwise it would
            # depend on the disk's speed which call raises the error.
            if handle is self.newest and self.newest_returns_early:
                continue
            if handle.done() and self._discard(handle):
                error = _error_of(handle)
                if error is not None:
                    return error
        return None

    def pop_errors_as_one(self) -> BaseException | None:
        """Return the next error, and remove all errors. Log the other errors, and add them to the
        returned error as notes."""
        first = self.pop_next_error()
        if first is not None:
            while (error := self.pop_next_error()) is not None:
                first.add_note(f"Another checkpoint failed as well: {error}")
                log_error(error)
        return first

    def drain(self, *, close: bool) -> None:
        """Wait for all saves, links and removes, and notify loggers. Keep the errors. With `close`,
        close the plugin's own engine too."""
        with WaitProgressDisplay(self.saves):
            while (handle := self._find_unfinished_save()) is not None:
                wait_for_end(handle)
            for handle in list(self.saves):
                if report_of(handle) is not None:  # the save has succeeded
                    self._discard(handle)
            self.newest_returns_early = False  # `pop_next_error` need not leave its error for later
            self.rotation.finish()
            if close:
                engine, self.engine = self.engine, None
                if engine is not None:
                    engine.close()

    def wait_to_deadline_or_give_up(self, ending: object, deadline_s: float) -> None:
        """Wait for the saves under way, and give up those that are not durable by the deadline.

        `ending` is the exception or frame that ends the training. The deadline is `deadline_s`
        after the first call with this `ending`.
        """
        now = time.monotonic()
        known_id, deadline = self.ending
        is_stale = now > deadline + deadline_s  # by now another object may have the same id
        if known_id != id(ending) or is_stale:
            deadline = now + deadline_s
            self.ending = id(ending), deadline
        in_time.finish(deadline)

    def _find_unfinished_save(self) -> SaveHandle | None:
        return next((handle for handle in list(self.saves) if not handle.done()), None)

    def _discard(self, handle: SaveHandle) -> bool:
        """Remove `handle` from `saves`. Return False if a signal handler has removed it."""
        try:
            self.saves.remove(handle)
        except ValueError:
            return False
        return True


def _error_of(handle: SaveHandle) -> BaseException | None:
    """Wait for a save and return its error, or None. The error counts as reported from now on, and
    is not returned again."""
    if is_error_collected(handle):
        return None
    try:
        if handle.done() and in_time.is_given_up(handle):  # the log has reported it
            return None
        return handle.exception()
    except CancelledError as cancelled:
        return cancelled


def log_error(error: BaseException) -> None:
    log.error("a checkpoint was not saved: %s", error, exc_info=error)


def warn(error: BaseException) -> None:
    log.warning("a checkpoint was not saved: %s", error, exc_info=error)
    warnings.warn(f"a checkpoint was not saved: {error}", UserWarning, stacklevel=2)


def is_save_failure(error: BaseException) -> bool:
    """Return whether a save failed. Any other error is a mistake in the call."""
    return isinstance(error, (StillframeError, OSError, CancelledError))


class WaitProgressDisplay:
    """A context manager that tells the user what a long wait is for.

    After a second, a thread shows a progress bar on stderr, or one line if stderr is no terminal.
    """

    def __init__(self, handles: Sequence[SaveHandle]) -> None:
        self._handles = [handle for handle in handles if not handle.done()]
        self._over = threading.Event()
        self._thread = RunOnceThread(self._run, "sf-waiting")

    def __enter__(self) -> WaitProgressDisplay:
        # No line is shown if no thread can be started.
        with contextlib.suppress(OSError):
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        has_begun = not self._thread.prevent()
        if has_begun:
            self._thread.join()

    def _run(self) -> None:
        if self._over.wait(DELAY_S) or sys.stderr is None:
            return
        stream = sys.stderr
        if stream.isatty():
            self._draw_progress_bar(stream)
        else:
            done, total = self._count_written_and_all_bytes()
            stream.write(f"{self._text()} ({done / 1e6:.0f} of {total / 1e6:.0f} MB written)\n")
            stream.flush()

    def _draw_progress_bar(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TransferSpeedColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
        )
        with Progress(*columns, console=Console(file=stream)) as progress:
            done, total = self._count_written_and_all_bytes()
            task = progress.add_task(self._text(), completed=done, total=total)
            while not self._over.wait(_REDRAW_S):
                done, total = self._count_written_and_all_bytes()
                progress.update(task, completed=done, total=total, description=self._text())
            done, total = self._count_written_and_all_bytes()
            progress.update(task, completed=done, total=total, description=self._text())

    def _text(self) -> str:
        waiting = sum(not handle.done() for handle in self._handles)
        if waiting == 0:
            return "stillframe: waiting for checkpoints to be removed"
        noun = "checkpoint" if waiting == 1 else "checkpoints"
        return f"stillframe: waiting for {waiting} {noun} to reach the disk"

    def _count_written_and_all_bytes(self) -> tuple[int, int]:
        """Return how many bytes are written, and how many there are."""
        pairs = [handle.progress() for handle in self._handles]
        return sum(done for done, _ in pairs), sum(total for _, total in pairs)
