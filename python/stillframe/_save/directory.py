"""Implements `DirectorySave`: the save of several files that become visible as one directory.

Each file is a save without an entry in the log. It gets its name within the temporary directory as
soon as it is synced. The directory has one entry, with external work that does the following:
- It waits for the saves of the files.
- It syncs the files that other code wrote.
- It puts the directory in place and removes the old one (csrc/core/file/folder.c).

    open ──the block ends──▶ in the log ──at its head──▶ committing ──▶ durable, failed
      │                          ╲─ cancel ─▶ cancelled
      ╰── the block raises ──▶ cancelled

`checkpoint.py` has the `with` block that users write.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import Any, TypeVar

from stillframe import _core
from stillframe._base.event import Event
from stillframe._save import completion
from stillframe._save.core_save import CoreSave, error_of_step
from stillframe._save.engine import Engine, submit, take_slot
from stillframe._save.external import ExternalSave
from stillframe._save.handle import Deadline, State, take_uncollected_error
from stillframe._save.options import OnDurable, SaveOptions
from stillframe._save.report import Interval, SaveReport
from stillframe.errors import SaveError, StillframeError

log = logging.getLogger("stillframe")

T = TypeVar("T")


class DirectorySave(ExternalSave):
    """The handle of the save of a directory; `ExternalSave` explains the other arguments.

    Args:
        folder: The temporary directory, not yet made; None if a subclass makes its own.
        key: The directory's name in the log, see `paths.key`.

    Attributes:
        directory: The path of the temporary directory; "" before `open`.
        names: The files that the user has saved, relative to the directory.
    """

    def __init__(
        self,
        path: str,
        given: Any,
        on_durable: OnDurable | None,
        *,
        entered: float,
        folder: _core.Folder | None,
        key: bytes,
    ) -> None:
        super().__init__(path, given, on_durable, entered=entered, known_as=path)
        self._outcome.cancellable = True
        self.directory = ""
        self.names: set[str] = set()
        self._folder = folder
        self._key = key
        self._files: list[CoreSave] = []
        self._staging_futures: list[Future[None]] = []  # of the files; set by `launch`
        self._block_thread: int | None = threading.get_ident()  # the block's thread, until its end
        self._closed = Event()  # the block has ended
        self._closed_s = 0.0  # seconds from the block's entry to its end
        self._launch_time: Interval | None = None  # how long `launch` takes

    # ---- for users ----

    def _state_under_way(self) -> State:
        if not self._is_staged():
            return "staging"
        # With all files written, the directory is the next to be synced and renamed.
        return "writing" if all(file.done() for file in list(self._files)) else "staged"

    def progress(self) -> tuple[int, int]:
        """Return (bytes written so far, bytes in all) of the files that stillframe saves."""
        self._birth.refuse_forked_child()
        report = self._outcome.report
        if report is not None:
            return report.nbytes, report.nbytes
        amounts = [file.progress() for file in list(self._files)]
        return sum(done for done, _ in amounts), sum(nbytes for _, nbytes in amounts)

    def cancel(self) -> bool:
        self._birth.refuse_forked_child()
        if self._outcome.settled or not self._decide_to_cancel():
            return False
        self._cancel_files()
        return True

    def _is_staged(self) -> bool:
        return self._closed.is_set() and all(file._is_staged() for file in list(self._files))

    def _wait_until_staged(self, deadline: Deadline) -> bool:
        self._wait_until_closed(deadline, "staged")
        staged = [file._wait_until_staged(deadline) for file in list(self._files)]
        return all(staged) and self._outcome.error is None

    def _wait_until_ended(self, deadline: Deadline) -> None:
        self._wait_until_closed(deadline, "durable")
        super()._wait_until_ended(deadline)

    def _wait_until_closed(self, deadline: Deadline, awaited_state: str) -> None:
        """Wait until the block has ended. `awaited_state` is for the message.

        Raises:
            StillframeError: The block's own thread would wait for itself.
            TimeoutError: The deadline passed.
        """
        self._birth.refuse_forked_child()
        if self._closed.is_set():
            return
        if self._block_thread == threading.get_ident():
            raise StillframeError(
                f"the checkpoint {self._path} begins when its `with` block ends: wait for its"
                " handle after the block"
            )
        if not self._closed.wait(deadline.left()):
            raise self._timeout_error(deadline, awaited_state)

    # ---- for the block ----

    def take_slot(self, engine: Engine, *, nested: bool) -> None:
        """Take a slot of the engine for the whole checkpoint."""
        self._slot = take_slot(engine, nested=nested)
        self.record_slot_wait()

    def open(self) -> None:
        """Make the temporary directory, or raise SaveError."""
        assert self._folder is not None
        self.directory = self._unwrap_folder_answer(self._folder.open())
        register_open_directory(self)
        self._call_time.end()  # the block that follows is the user's time

    def is_open(self) -> bool:
        """Return whether the block has not ended. Return False in a forked child."""
        return not self._closed.is_set() and not self._birth.in_forked_child()

    def refuse_closed(self) -> None:
        """Raise ForkError in a forked child, and StillframeError if the block has ended."""
        self._birth.refuse_forked_child()
        if self._closed.is_set():
            raise StillframeError(f"the block of the checkpoint {self._path} has ended")

    def submit_file(
        self,
        engine: Engine,
        obj: object,
        name: str,
        options: SaveOptions,
        on_created: Callable[[CoreSave], object],
    ) -> None:
        """Start the save of a file of the checkpoint.

        Args:
            name: The file's path relative to the directory.
            on_created: Called with the file's save before it is launched.
        """

        def before_launch(file: CoreSave) -> None:
            on_created(file)
            self.add(file)

        path = os.path.join(self.directory, name)
        submit(engine, obj, path, replace(options, before_launch=before_launch))

    def add(self, file: CoreSave) -> None:
        """Add the save of a file, which is not launched yet. The commit waits for it."""
        self._files.append(file)

    def launch(self) -> None:
        """Put the save into the log at the end of the block. Raise StillframeError if the exit of
        the interpreter has given the save up."""
        self._birth.refuse_forked_child()
        if not self._unclaimed_end:  # at exit, `give_up` has ended the save
            raise StillframeError(f"{self._path} was not saved: the interpreter is exiting")
        self._launch_time = Interval(time.perf_counter())
        self._closed_s = time.perf_counter() - self._entered
        self._staging_futures = [file.staging_completion for file in self._files]
        self.submit(self._key, _core.WORK_DIRECTORY, self._work)
        self.close()
        for future in self._staging_futures:
            # Future's own method runs `_forward_staging` on the thread that resolves the future.
            # The override in `CallbackThreadFuture` would wait for the callbacks of users.
            Future.add_done_callback(future, self._forward_staging)
        self._forward_staging()
        self._launch_time.end()

    def give_up(self, why: str) -> None:
        """Cancel the save and remove its files, unless its work has begun or it has ended. `why` is
        for the error message."""
        if not self._birth.in_forked_child() and self.claim_end():
            self._give_up(why)

    def undo_begin(self) -> None:
        """Undo `begin`, because `submit` was interrupted, and give up the files."""
        super().undo_begin()
        self._give_up("the end of its block was interrupted")

    def _give_up(self, why: str) -> None:
        """End the save as cancelled, and remove its files."""
        try:
            self._cancel_files()
            for file in list(self._files):
                file.add_done_callback(take_uncollected_error)  # so that no error is logged
            self._remove_temporary_files()
        finally:
            self.close()
            self.end(None, CancelledError(f"{self._path} was not saved: {why}"))

    def drop(self, file: CoreSave) -> None:
        """Forget the save of a file whose call raised before the launch."""
        if not file.done() and file not in completion.in_flight.values():
            with contextlib.suppress(ValueError):  # Ctrl-C came before `add`
                self._files.remove(file)

    def close(self) -> None:
        """Record that the block has ended. From now on its thread may wait for the save."""
        _open_saves.discard(self)
        self._closed.set()
        self._block_thread = None

    def _cancel_files(self) -> None:
        for file in list(self._files):
            file.cancel()

    def _forward_staging(self, _done_future: object = None) -> None:
        """Resolve the staging future if all files are copied. The future of each file calls this
        with itself when it is done."""
        futures = self._staging_futures
        if self._outcome.settled or not all(future.done() for future in futures):
            return
        failure: BaseException | None = None  # the first one
        for future in futures:
            if failure is None:
                # Future's own method, because `future.exception()` would collect the error.
                failure = CancelledError() if future.cancelled() else Future.exception(future)
        self._outcome.notify_staged(failure)

    # ---- at the head of the log ----

    def _work(self) -> bool:
        """Commit the directory and end the save; return whether the save succeeded."""
        report: SaveReport | None = None
        failure: BaseException | None = None
        try:
            report = self._report(self._commit())
        except BaseException as error:  # the save must end in any case
            failure = error.with_traceback(None)
            # before `end`: callers who wait for it find no temporary directory
            self._remove_temporary_files()
        self.end(report, failure)
        if failure is None:
            # after `end`: callers need not wait until the old directory is removed
            self._remove_temporary_files()
        return failure is None

    def _commit(self) -> int:
        """Wait for the files and put the directory in place; return the bytes of its files.

        Raises:
            SaveError, StillframeError: A file or a step of the commit failed.
            CancelledError: The save was cancelled.
        """
        failure: BaseException | None = None  # the error of the first file that failed
        for file in self._files:
            error = _error_of(file)
            if error is not None and failure is None:
                failure = error
                self._cancel_files()
        self._refuse_cancelled()
        if failure is not None:
            raise failure
        assert self._folder is not None
        nbytes = self._unwrap_folder_answer(self._folder.sync())
        self._decide_to_commit()
        self._unwrap_folder_answer(self._folder.commit())
        return nbytes

    def _report(self, nbytes: int) -> SaveReport:
        reports = [file.result() for file in self._files]
        # A file's times count from its own call, the directory's times from the block's entry.
        staged_s = [
            file.entered - self._entered + report.staged_after_s
            for file, report in zip(self._files, reports, strict=True)
        ]
        calls_s = sum(report.blocked_s for report in reports)
        launch_s = 0.0 if self._launch_time is None else self._launch_time.seconds
        is_direct = bool(reports) and all(report.io_mode == "direct" for report in reports)
        fallbacks = [line for report in reports for line in report.fallbacks]
        return SaveReport(
            path=self._path,
            nbytes=nbytes,
            num_tensors=sum(report.num_tensors for report in reports),
            captured_nbytes=sum(report.captured_nbytes for report in reports),
            deferred_nbytes=sum(report.deferred_nbytes for report in reports),
            blocked_s=self._call_time.seconds + calls_s + launch_s,
            gate_wait_s=sum(report.gate_wait_s for report in reports),
            backpressure_s=self._slot_wait_s + sum(report.backpressure_s for report in reports),
            staged_after_s=max([self._closed_s, *staged_s]),
            durable_after_s=time.perf_counter() - self._entered,
            peak_pool_bytes=sum(report.peak_pool_bytes for report in reports),
            io_mode="direct" if is_direct else "buffered",
            fallbacks=tuple(dict.fromkeys(fallbacks)),  # without duplicates
        )

    def _will_contain_file(self, name: str) -> bool:
        """Return whether the directory will have this file."""
        # Files that other code wrote are in the temporary directory until the commit.
        directory = os.fsdecode(self._key) if self._is_committing() else self.directory
        return name in self.names or os.path.lexists(os.path.join(directory, name))

    def _drop_references(self) -> None:
        self._files, self._staging_futures = [], []

    def _unwrap_folder_answer(self, answer: tuple[T, int, str, str]) -> T:
        """Return the result of a method of `_core.Folder`, or raise its error. `answer` is all that
        the method returned."""
        result, code, phase, note = answer
        if code:
            raise error_of_step(self._path, code, phase, note)
        return result

    def _remove_temporary_files(self) -> None:
        """Remove the directory that has the temporary name. After the commit this is the old
        directory, because the commit exchanges the two names."""
        assert self._folder is not None
        _, code, _, _ = self._folder.clear()
        if code:
            log.warning(
                "stillframe: %s: something hidden is left next to it, which the next save there"
                " removes: %s",
                self._path,
                os.strerror(-code),
            )


def _error_of(file: CoreSave) -> BaseException | None:
    """Wait for the end of a file's save, and collect its error."""
    try:
        error = file.exception()
    except CancelledError as cancelled:
        return cancelled
    if isinstance(error, SaveError) and error.phase == "sync directory":
        # For the whole checkpoint, "sync directory" would mean that the new directory is in place.
        return SaveError(error.errno or 0, error.strerror or "", error.filename, "sync")
    return error


_open_saves: weakref.WeakSet[DirectorySave] = weakref.WeakSet()  # their block has not ended


def register_open_directory(save: DirectorySave) -> None:
    _open_saves.add(save)


def give_up_open_directories() -> None:
    """Give up the saves of directories whose block has not ended when the interpreter exits."""
    for save in list(_open_saves):
        save.give_up("the interpreter exited inside its block")


def will_exist_in_saved_directory(key: bytes) -> bool:
    """Return whether a path will exist when the save of the directory around it has ended. `key` is
    the path's name in the log."""
    for save in reversed(list(completion.in_flight.values())):  # the newest first
        if isinstance(save, DirectorySave) and key.startswith(save._key + b"/"):
            name = key.removeprefix(save._key + b"/")
            return save._will_contain_file(os.fsdecode(name))
    return os.path.lexists(key)  # the save has ended meanwhile


def _reset_in_forked_child() -> None:
    _open_saves.clear()


os.register_at_fork(after_in_child=_reset_in_forked_child)
