"""Implements `RemoteSave`: a save whose file is an object in a store.

A save of the core stages the bytes. It has no entry in the log and no file, but hands out its
blocks in the order of the file (csrc/core/save/stream.c). A thread passes the blocks to the store's
client, which sends them as the parts of a multipart upload. The client releases a block when the
store has acknowledged the part. The object becomes visible when the thread tells the client that
the upload is complete. This is the commit:

    the thread sends ──▶ all bytes sent ──staged, not torn──▶ waits for its entry to be at the head
    of the log ──▶ completes the upload ──acknowledged──▶ durable

If anything fails before the commit, the client aborts the upload and the old object stays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from typing import Any, NamedTuple

from stillframe import _core
from stillframe._base import file_kinds, threads, urls
from stillframe._base.calls import inside_call
from stillframe._base.event import Event
from stillframe._remote.store import Buffer, Store, part_bytes
from stillframe._remote.stores import open_store
from stillframe._save import completion, ordered
from stillframe._save.core_save import CoreSave
from stillframe._save.directory import will_exist_in_saved_directory
from stillframe._save.engine import Engine, limits_of, submit, take_slot
from stillframe._save.external import ExternalSave
from stillframe._save.handle import Deadline, SaveHandle, SkippedSave, State, wait_for_end
from stillframe._save.options import OnDurable, SaveOptions
from stillframe._save.report import SaveReport
from stillframe.errors import BusyError, SaveError, StillframeError

StorageOptions = Mapping[str, Any] | None

# The longest waits for the next block: while earlier blocks of its part are collected but not sent
# (then their bytes are copied), and otherwise (then `give_up` is checked).
_PAUSE_S = 0.02
_SLICE_S = 1.0
_POLL_S = 0.005  # between two checks whether all bytes are acknowledged


class Upload:
    """One object of a save, which sends the bytes of a `CoreSave` to a store.

    Args:
        key: The object's name in the store.
        shown: The object's URL, for messages.

    Attributes:
        file: The save that stages the bytes. The user of this object sets it before `run`.
    """

    def __init__(self, store: Store, key: str, shown: str) -> None:
        self.file: CoreSave | None = None
        self.key = key
        self._store = store
        self._shown = shown
        self._given_up = False

    @property
    def nbytes(self) -> int:
        assert self.file is not None
        return self.file.progress()[1]

    def give_up(self) -> None:
        """Make `run` fail, unless the object is complete already."""
        self._given_up = True
        if self.file is not None:
            self.file.cancel()

    def abandon(self) -> None:
        """Give up, because the call raises before the launch of `file`."""
        self.give_up()
        if self.file is not None:
            self.file.abandon()

    def run(self, wait_to_appear: Callable[[], object]) -> None:
        """Send the object, and return when it is visible in the store.

        Args:
            wait_to_appear: Called when all bytes are sent. It returns when the object may become
                visible, and raises if it must not.

        Raises:
            BaseException: What `wait_to_appear` or the client raises. The old object is untouched.
        """
        nbytes = self.nbytes
        self._store.put(self.key, self._file_bytes(part_bytes(nbytes), wait_to_appear), nbytes)

    def fail(self, error: BaseException) -> BaseException:
        """Give up, and return the error to report: the error of `file`, if `file` failed, or else
        `error`. An error of the store becomes a SaveError.

        Args:
            error: What `run` has raised.
        """
        self.give_up()
        file_error: BaseException | None = None
        if self.file is not None:
            with contextlib.suppress(CancelledError):  # `give_up` has cancelled `file`
                file_error = self.file.exception()
        if file_error is not None:
            return file_error
        if isinstance(error, OSError) and not isinstance(error, SaveError):
            code = error.errno or errno.EIO
            return SaveError(code, error.strerror or str(error), self._shown, "upload")
        return error

    def _file_bytes(self, part: int, wait_to_appear: Callable[[], object]) -> Iterator[Buffer]:
        """Yield the bytes of the file.

        A client would hold blocks until it has a whole part, so this method collects a part first.
        If the next block is late, the save may be waiting for memory. Then the collected bytes are
        copied, which releases their blocks.

        Args:
            part: The length of a part in bytes.
            wait_to_appear: See `run`; called before the generator ends.
        """
        collected: list[_ByteRange] = []
        nbytes = 0  # the number of bytes in `collected`
        try:
            while True:
                block = self._next_block(_PAUSE_S if collected else _SLICE_S)
                if block is None:  # it is late
                    collected = [each.copied() for each in collected]
                    continue
                if not len(block):  # the end of the file
                    break
                collected.append(_ByteRange(block, 0, len(block)))
                nbytes += len(block)
                del block  # `collected` has the only reference now
                while nbytes >= part:
                    yield from _take_first(collected, part)
                    nbytes -= part
            # The client sends the last part when this generator ends. `wait_to_appear` may wait for
            # other saves that need blocks. So copy the last bytes, which releases their blocks.
            collected = [each.copied() for each in collected]
            yield from _take_first(collected, nbytes)
            self._wait_until_sent_and_staged()
            wait_to_appear()
        finally:
            # Release the blocks: the save ends only then, and the traceback of an exception would
            # keep these variables alive.
            collected.clear()
            block = None

    def _wait_until_sent_and_staged(self) -> None:
        """Wait until every block is released and the save is staged, so that it is not torn. Raise
        the errors of `_next_block`."""
        assert self.file is not None
        while True:
            self._next_block(0.0)  # only for its exceptions
            sent, nbytes = self.file.progress()
            if sent >= nbytes and self.file._is_staged():
                return
            time.sleep(_POLL_S)

    def _next_block(self, timeout: float) -> _core.Piece | None:
        """Return the next block of the save: an empty block after the last one, and None after
        `timeout` seconds.

        Raises:
            StillframeError: The save of the bytes failed.
            CancelledError: `give_up` was called.
        """
        assert self.file is not None
        if self._given_up:
            raise CancelledError
        return self.file._ticket.next_piece(timeout)


class _ByteRange(NamedTuple):
    """The bytes from `start` to `end` of a block (a `Piece`) or of a copy (`bytes`)."""

    owner: _core.Piece | bytes
    start: int
    end: int

    def copied(self) -> _ByteRange:
        """Return a copy of the bytes, or self if they are a copy already."""
        if isinstance(self.owner, bytes):
            return self
        return _ByteRange(self.owner.copy(self.start, self.end), 0, self.end - self.start)


def _take_first(collected: list[_ByteRange], nbytes: int) -> Iterator[Buffer]:
    """Remove the first `nbytes` bytes from `collected` and yield them.

    Local variables are deleted, so that a block is released as soon as the client drops it.
    """
    while nbytes:
        owner, start, end = collected.pop(0)
        until = min(end, start + nbytes)
        if until < end:
            collected.insert(0, _ByteRange(owner, until, end))  # the rest stays collected
        view = memoryview(owner)[start:until]
        del owner  # now only `view` and the client keep the block
        nbytes -= until - start
        yield view
        del view


class RemoteSave(ExternalSave):
    """The handle of a save to a store; `ExternalSave` explains the other arguments.

    Args:
        object_key: The object's name in the store.
        key: The object's name in the log.
    """

    def __init__(
        self,
        url: str,
        given: Any,
        on_durable: OnDurable | None,
        *,
        entered: float,
        slot: _core.Slot,
        store: Store,
        object_key: str,
        key: bytes,
    ) -> None:
        super().__init__(url, given, on_durable, entered=entered, slot=slot, known_as=url)
        self._outcome.cancellable = True
        self._store = store
        self._key = key
        self._upload = Upload(store, object_key, url)
        self._entry: ordered.LogEntry | None = None  # set by `launch`
        self._launched = Event()  # the save has its entry in the log, or was given up
        self._thread: threading.Thread | None = None

    # ---- for users ----

    def _state_under_way(self) -> State:
        file = self._upload.file
        if file is None or not self._launched.is_set():
            return "staging"
        state = file.state
        # When `file` has ended, its bytes are sent, but the object is not visible yet.
        return state if state in ("staging", "staged") else "writing"

    def progress(self) -> tuple[int, int]:
        self._birth.refuse_forked_child()
        report = self._outcome.report
        if report is not None:
            return report.nbytes, report.nbytes
        return (0, 0) if self._upload.file is None else self._upload.file.progress()

    def cancel(self) -> bool:
        self._birth.refuse_forked_child()
        if self._outcome.settled or not self._decide_to_cancel():
            return False
        self._upload.give_up()
        return True

    def _is_staged(self) -> bool:
        file = self._upload.file
        return file is not None and self._launched.is_set() and file._is_staged()

    def _wait_until_staged(self, deadline: Deadline) -> bool:
        self._birth.refuse_forked_child()
        assert self._upload.file is not None
        return self._upload.file._wait_until_staged(deadline)

    # ---- for `save_to_store` ----

    def start(self, file: CoreSave) -> None:
        """Start the thread that sends the bytes that `file` stages.

        Call it before `file` is launched: the launch may wait until blocks are sent and released.

        Raises:
            StillframeError: The interpreter is exiting.
            OSError: The system refused to start another thread.
        """
        self._upload.file = file
        thread = threading.Thread(target=self._run, name="sf-upload", daemon=True)
        self.begin()  # keeps this save alive while the thread runs
        self._thread = thread
        try:
            threads.start(thread)
        except RuntimeError as error:  # Python 3.12 and later start no thread at exit
            raise StillframeError(
                f"{self._path} was not saved: the interpreter is exiting, and starts no thread that"
                " could send it"
            ) from error

    def launch(self) -> None:
        """Put the save into the log."""
        self._entry = ordered.LogEntry(self._key)
        self._entry.submit()
        self.record_launch()
        self._launched.set()
        file = self._upload.file
        assert file is not None
        # Future's own method runs `_forward_staging` on the thread that resolves the future. The
        # override in `CallbackThreadFuture` would wait for the callbacks of users.
        Future.add_done_callback(file.staging_completion, self._forward_staging)

    def give_up(self) -> None:
        """End the save, because its call raises."""
        self._decide_to_cancel()
        self._upload.abandon()
        self._launched.set()
        was_started = self._thread is not None and self._thread.ident is not None
        if not was_started:  # no thread will end the save
            self.undo_begin()

    def _forward_staging(self, future: Future[None]) -> None:
        """Resolve this handle's staging future like `future`, the staging future of `file`."""
        if not self._outcome.settled:
            # Future's own method, because `future.exception()` would collect the error.
            error = CancelledError() if future.cancelled() else Future.exception(future)
            self._outcome.notify_staged(error)

    # ---- on the thread that sends ----

    def _run(self) -> None:
        report: SaveReport | None = None
        failure: BaseException | None = None
        try:
            self._upload.run(self._wait_for_turn_to_commit)
            report = self._report()
        except BaseException as error:  # the save must end in any case
            failure = self._error_to_report(error.with_traceback(None))
        self._launched.wait()  # for `launch` or `give_up`
        self.error_is_known = self._entry is None  # not in the log: the user's call has raised it
        self.end(report, failure, entry=self._entry)

    def _wait_for_turn_to_commit(self) -> None:
        """Wait until the object may become visible. Raise CancelledError if the save was cancelled
        or its call raised."""
        self._launched.wait()
        if self._entry is None:
            raise CancelledError
        self._entry.wait_to_commit()
        self._decide_to_commit()  # from here on it is too late for `cancel`

    def _report(self) -> SaveReport:
        file = self._upload.file
        assert file is not None
        report = file.result()
        return dataclasses.replace(
            report,
            path=self._path,
            blocked_s=self._call_time.seconds,
            backpressure_s=self._slot_wait_s + report.backpressure_s,
            # The times of `report` count from the call of `submit`.
            staged_after_s=file.entered - self._entered + report.staged_after_s,
            durable_after_s=time.perf_counter() - self._entered,
            io_mode=self._store.client,
        )

    def _error_to_report(self, error: BaseException) -> BaseException:
        failure = self._upload.fail(error)
        if self._is_cancelled():
            return CancelledError(f"the save of {self._path} was cancelled")
        return failure

    def _drop_references(self) -> None:
        self._thread = None


def save_to_store(
    engine: Engine,
    obj: object,
    url: Any,
    options: SaveOptions,
    storage_options: StorageOptions = None,
) -> SaveHandle:
    """Start a save to `url`, and return its handle: see `stillframe.async_save`.

    Raises:
        ValueError: The URL names no object; or see `open_store`.
        Exception: See `engine.submit`.
    """
    entered = time.perf_counter()
    ordered.refuse_in_external_work()
    store, object_key = open_store(url, storage_options)
    shown = urls.shown(url)
    if not object_key or shown.endswith("/"):
        raise ValueError(f"{shown}: the URL names no object")
    with inside_call() as nested:
        completion.thread.start()
        try:
            slot = take_slot(engine, nested=nested, wait=options.wait_for_slot)
        except BusyError:
            if limits_of(engine).when_busy == "skip":
                return SkippedSave(shown)
            raise
        save = RemoteSave(
            shown,
            url,
            options.on_durable,
            entered=entered,
            slot=slot,
            store=store,
            object_key=object_key,
            key=urls.key(url),
        )
        save.record_slot_wait()
        try:
            if options.before_launch is not None:
                options.before_launch(save)
            submit(engine, obj, url, options.for_stream(shown, before_launch=save.start))
            save.launch()
        except BaseException:
            save.give_up()
            raise
        save.record_call_end()
        if completion.thread.drain_is_over:  # at exit nobody settles the save after this call
            wait_for_end(save)
        return save


def start_save(
    engine: Engine,
    obj: object,
    path: Any,
    options: SaveOptions,
    storage_options: StorageOptions = None,
) -> SaveHandle:
    """Start a save to a local path or to a URL.

    Raises:
        ValueError: `storage_options` are given for a local path.
        Exception: See `engine.submit` and `save_to_store`.
    """
    if urls.is_remote(path):
        return save_to_store(engine, obj, path, options, storage_options)
    urls.refuse_storage_options(path, storage_options)
    return submit(engine, obj, path, options)


# Objects that mark a checkpoint as complete. They are written last and removed first.
MARKERS = (file_kinds.MARKER, ".metadata")


def remove_object(url: Any, storage_options: StorageOptions) -> None:
    """Submit the remove of an object, or of all objects below it: see `stillframe.remove`."""
    store, object_key = open_store(url, storage_options)

    def delete(_path: str) -> None:
        prefix = object_key.rstrip("/") + "/"
        keys = [each.key for each in store.list(object_key)]
        markers = [prefix + marker for marker in MARKERS if prefix + marker in keys]
        store.delete(markers)  # first: without a marker, the other objects are no checkpoint
        store.delete([object_key, *(key for key in keys if key not in markers)])

    ordered.submit_remove(urls.shown(url), urls.key(url), delete)


def will_exist(url: Any, storage_options: StorageOptions) -> bool:
    """Return whether an object or a checkpoint will exist: see `stillframe.exists`."""
    store, object_key = open_store(url, storage_options)
    key = urls.key(url)
    log_answer = _core.log_exists(key)  # 1 or 0; 2: see below; -1: ask the store
    if log_answer == 2:  # the object is below a checkpoint of several objects that is under way
        return will_exist_in_saved_directory(key)
    if log_answer >= 0:
        return bool(log_answer)
    prefix = object_key.rstrip("/") + "/"
    names = [each.key.removeprefix(prefix) for each in store.list(object_key)]
    is_checkpoint = any(marker in names for marker in MARKERS)
    return is_checkpoint or store.exists(object_key)
