"""`SaveHandle`, which `async_save` returns: the base class of all saves, and the skipped save.

There are two main subclasses. `CoreSave` (`core_save.py`) is a save of one file by the core.
`ExternalSave` (`external.py`) is a save that the core does not write as one file. Every handle has
an `Outcome`, which records how the save ended and whether somebody has seen (*collected*) its
error.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError, Future
from typing import Any, Literal, TypeAlias

from stillframe._base.arguments import seconds
from stillframe._base.birth import ForkGuard
from stillframe._base.calls import inside_call
from stillframe._remote.mirror import MirrorUpload
from stillframe._save import uploads
from stillframe._save.options import OnDurable
from stillframe._save.outcome import Outcome
from stillframe._save.report import SaveReport

log = logging.getLogger("stillframe")

State = Literal["staging", "staged", "writing", "durable", "failed", "cancelled", "skipped"]
# The type of a result that is None only with `when_busy="skip"`. Any spares users a check for None,
# as in typeshed's `re.Match.group`.
MaybeNone: TypeAlias = Any


class SaveHandle:
    """One save, made by `async_save`. Any thread may call any method any number of times. `await
    handle` in a coroutine returns the same as `handle.result()`."""

    def __init__(
        self,
        path: str,
        given: Any = None,  # the path as the user gave it, for `on_durable`
        on_durable: OnDurable | None = None,
        *,
        known_as: str = "a save",  # in the log message about an error that nobody collected
    ) -> None:
        # a postponed remove of the path would delete the new file
        uploads.drop_postponed_removes(path)
        self._path = path
        self._mirror: MirrorUpload | None = None  # the upload that follows the save
        self._birth = ForkGuard(f"the save of {path}")
        self._outcome = Outcome(given, on_durable, known_as)

    def __repr__(self) -> str:
        state = "of the parent process" if self._birth.in_forked_child() else self.state
        return f"<SaveHandle {self._path!r} {state}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a SaveHandle belongs to the process that made it: hand over its path, or the report"
            " that result() returns"
        )

    def __await__(self) -> Generator[Any, None, SaveReport | MaybeNone]:
        return self._await_result().__await__()

    @property
    def path(self) -> str:
        """The path as it was given."""
        return self._path

    @property
    def state(self) -> State:
        """One of "staging", "staged", "writing", "durable", "failed", "cancelled", "skipped"."""
        raise NotImplementedError

    def done(self) -> bool:
        """Return whether the save has ended: durable, failed, cancelled or skipped."""
        self._birth.refuse_forked_child()
        if not self._has_ended():
            return False
        self._settle()
        return True

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until every byte is copied, so that the saved tensors may change in any way.

        Raises:
            TornSnapshotError, SaveError: The save failed.
            concurrent.futures.CancelledError: The save was cancelled.
            TimeoutError: `timeout` seconds passed.
        """
        with inside_call():
            deadline = Deadline(timeout)
            if not self._wait_until_staged(deadline):  # the save has failed or will fail
                self._wait_until_ended(deadline)
                self._raise_save_error_if_any()

    def result(self, timeout: float | None = None) -> SaveReport | MaybeNone:
        """Wait until the save is durable and return its report.

        Returns:
            The report. None if the save was skipped, which needs `Engine(when_busy="skip")`.

        Raises:
            TornSnapshotError, SaveError: The save failed; the old file is untouched.
            concurrent.futures.CancelledError: The save was cancelled.
            TimeoutError: `timeout` seconds passed; the save goes on.
        """
        with inside_call():
            self._wait_until_ended(Deadline(timeout))
            self._raise_save_error_if_any()
            return self._outcome.report

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the save's end and return its error, or None.

        Raises:
            concurrent.futures.CancelledError: The save was cancelled.
            TimeoutError: `timeout` seconds passed; the save goes on.
        """
        with inside_call():
            self._wait_until_ended(Deadline(timeout))
            self._outcome.collect()
            if isinstance(self._outcome.error, CancelledError):
                raise self._outcome.error
            return self._outcome.error

    def cancel(self) -> bool:
        """Cancel the save, so that the old file stays.

        Return False if the save is already being committed, or has ended.
        """
        return False

    def add_done_callback(self, function: Callable[[SaveHandle], object]) -> None:
        """Call `function(handle)` on the callback thread when the save has ended. If the save has
        ended already, call it at once, on this thread.

        Raises:
            TypeError: `function` is not callable.
        """
        if not callable(function):
            raise TypeError(
                f"a done callback has to be callable, not {type(function).__name__}: it is called"
                " as callback(handle)"
            )
        will_be_called = self._outcome.call_at_end(functools.partial(function, self))
        if will_be_called:
            return
        try:  # the save has ended already
            function(self)
        except Exception:
            log.exception("stillframe: a callback failed")

    def progress(self) -> tuple[int, int]:
        """Return (bytes written so far, bytes of the file)."""
        return 0, 0

    @property
    def staging_completion(self) -> Future[None]:
        """A future that is done when the save is staged.

        `torch.distributed.checkpoint.async_save` uses the same name.
        """
        return self._outcome.staging_future(self, self._is_staged)

    @property
    def upload_completion(self) -> Future[SaveReport | MaybeNone]:
        """A future that is done with the report when the save is durable.

        `torch.distributed.checkpoint.async_save` uses the same name.
        """
        return self._outcome.upload_future(self)

    # ---- for subclasses to override; these fit a save that was over at once, as `SkippedSave` ----

    def _has_ended(self) -> bool:
        return self._outcome.settled

    def _is_staged(self) -> bool:
        return False

    def _settle(self) -> None:
        """Notify everyone who waits for a save that has ended. An override records the outcome
        first. May be called again."""
        self._outcome.notify()

    def _wait_until_staged(self, deadline: Deadline) -> bool:
        """Wait until the save is staged. Return False if the save has failed or will fail."""
        return self._outcome.error is None

    def _wait_until_ended(self, deadline: Deadline) -> None:
        """Wait for the save's end and settle it (an override does). Raise no error of the save."""
        self._birth.refuse_forked_child()

    # ---- private ----

    def _tell_mirror_outcome(self, *, succeeded: bool) -> None:
        """Tell the upload to the mirror whether the save succeeded. Call this before users can
        learn that the save has ended."""
        if self._mirror is not None:
            self._mirror.end(succeeded)

    def _raise_save_error_if_any(self) -> None:
        """Raise the error of a save that has ended, if there is one, and collect it."""
        self._outcome.collect()
        if self._outcome.error is not None:
            raise self._outcome.error

    def _timeout_error(self, deadline: Deadline, awaited_state: str) -> TimeoutError:
        return TimeoutError(
            f"the save of {self._path} after {deadline.timeout:g} s: {self.state}, not"
            f" {awaited_state} yet"
        )

    async def _await_result(self) -> SaveReport | MaybeNone:
        """Return what `result` returns, without blocking the event loop during the wait."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError(
                "await handle needs a running asyncio loop; elsewhere call handle.result() on a"
                " thread, as in trio.to_thread.run_sync(handle.result)"
            ) from None
        if not self.done():
            ended = asyncio.Event()

            def wake() -> None:
                with contextlib.suppress(RuntimeError):  # the loop was closed
                    loop.call_soon_threadsafe(ended.set)

            if self._outcome.call_directly_at_end(wake):  # False: the save has ended meanwhile
                try:
                    await ended.wait()
                finally:
                    self._outcome.cancel_direct_call(wake)
        return self.result()


class Deadline:
    """A timeout that starts when this object is made.

    Attributes:
        timeout: Seconds, as given; None waits forever.
    """

    def __init__(self, timeout: float | None) -> None:
        self.timeout = seconds(timeout)
        self._end = None if self.timeout is None else time.monotonic() + self.timeout

    def left(self) -> float | None:
        """Return the seconds left, at least 0. Return None if the wait has no limit."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())


class SkippedSave(SaveHandle):
    """A save that was not made because the engine was busy."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._outcome.settle(None, None)

    @property
    def state(self) -> State:
        return "skipped"


# ---- for the rest of the package ----


def set_mirror(handle: SaveHandle, mirror: MirrorUpload | None) -> None:
    """Set the upload to a mirror that follows a save. Call this before the save begins."""
    handle._mirror = mirror


def report_of(handle: SaveHandle) -> SaveReport | None:
    """Return the report of a save that ended without an error."""
    return handle._outcome.report


def error_of(handle: SaveHandle) -> BaseException | None:
    """Return the error of a save that has ended, without collecting it."""
    return handle._outcome.error


def is_error_collected(handle: SaveHandle) -> bool:
    return handle._outcome.is_error_collected()


def take_uncollected_error(handle: SaveHandle) -> BaseException | None:
    """Return the error of a save that has ended, if nobody has collected it, and collect it."""
    return handle._outcome.take_uncollected()


def wait_for_end(handle: SaveHandle) -> None:
    """Wait for the save's end. Neither raise nor collect its error."""
    with inside_call():
        handle._wait_until_ended(Deadline(None))
