"""Implements `RemoteSave`: a save whose file is an object in a store.

The bytes come from a save of the core that has no entry in the log and no file: it hands out its
blocks in the order of the file (csrc/core/save/stream.c). A thread passes them to the store's
client, which sends several parts at a time and releases each block when the store has acknowledged
it. The object becomes visible when the thread tells the client that it is complete. This is the
commit:

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
from stillframe._base.calls import inside
from stillframe._base.event import Event
from stillframe._remote.store import Buffer, Store, part_bytes
from stillframe._remote.stores import open_store
from stillframe._save import completion, ordered
from stillframe._save.core_save import CoreSave
from stillframe._save.directory import will_hold
from stillframe._save.engine import Engine, limits_of, submit, take_slot
from stillframe._save.external import ExternalSave
from stillframe._save.handle import Deadline, SaveHandle, SkippedSave, State, wait_for_end
from stillframe._save.options import OnDurable, SaveOptions
from stillframe._save.report import SaveReport
from stillframe.errors import BusyError, SaveError, StillframeError

StorageOptions = Mapping[str, Any] | None

_PAUSE_S = 0.02  # the longest wait for a block while earlier blocks of its part are kept
_SLICE_S = 1.0  # the longest wait for a block otherwise, before `give_up` is noticed
_POLL_S = 0.005


class Upload:
    """One object of a save: the bytes of a `CoreSave` on their way to a store.

    Args:
        key: The object's name in the store.
        shown: The object's URL, for messages.

    Attributes:
        file: The save that the bytes come from; None before it is made.
    """

    def __init__(self, store: Store, key: str, shown: str) -> None:
        self.file: CoreSave | None = None
        self.key = key
        self._store = store
        self._shown = shown
        self._given_up = False

    @property
    def nbytes(self) -> int:
        """The size of the object."""
        assert self.file is not None
        return self.file.progress()[1]

    def give_up(self) -> None:
        """Make `run` fail, unless the object is complete already."""
        self._given_up = True
        if self.file is not None:
            self.file.cancel()

    def abandon(self) -> None:
        """Give up, because the call raises that makes the save of the bytes."""
        self.give_up()
        if self.file is not None:
            self.file.abandon()

    def run(self, before_end: Callable[[], object]) -> None:
        """Send the object.

        Args:
            before_end: Called when all bytes are sent; the object becomes visible when it returns.

        Raises:
            BaseException: As `before_end` or the client. The old object is untouched.
        """
        nbytes = self.nbytes
        self._store.put(self.key, self._pieces(part_bytes(nbytes), before_end), nbytes)

    def failure(self, error: BaseException) -> BaseException:
        """Return the error of the object: that of the save of its bytes, or that of the store.

        Args:
            error: What `run` has raised.
        """
        self.give_up()
        own: BaseException | None = None
        if self.file is not None:
            with contextlib.suppress(CancelledError):  # by `give_up`
                own = self.file.exception()
        if own is not None:
            return own
        if isinstance(error, OSError) and not isinstance(error, SaveError):
            code = error.errno or errno.EIO
            return SaveError(code, error.strerror or str(error), self._shown, "upload")
        return error

    def _pieces(self, part: int, before_end: Callable[[], object]) -> Iterator[Buffer]:
        """Yield the bytes of the file. The last part begins only when the parts before it are full.

        A client keeps the bytes that it gets until their part is full, and so the blocks that they
        are in. Therefore the blocks of a part are kept here until it is full. If the next block is
        late, the save may be waiting for memory, so the kept blocks are copied and released. `part`
        is the length of a part.
        """
        kept: list[_Bytes] = []
        nbytes = 0
        try:
            while (piece := self._next(_PAUSE_S if kept else _SLICE_S)) is None or len(piece):
                if piece is None:
                    kept = [each.copied() for each in kept]
                    continue
                kept.append(_Bytes(piece, 0, len(piece)))
                nbytes += len(piece)
                del piece
                while nbytes >= part:
                    yield from _take(kept, part)
                    nbytes -= part
            # The client sends the last part only when this generator ends. Before that,
            # `before_end` may wait for other saves, which may need the memory of these blocks. So
            # they are copied.
            kept = [each.copied() for each in kept]
            yield from _take(kept, nbytes)
            self._wait_until_good()
            before_end()
        finally:
            # The save ends only when all blocks are released. After an exception the traceback
            # would keep them alive with this frame.
            kept.clear()
            piece = None

    def _wait_until_good(self) -> None:
        """Wait until the store has acknowledged all parts but the last one, and the save is staged.
        Until then the save can be cancelled or prove torn.

        The client releases the blocks of a part even if the part fails, so this wait ends.

        Raises:
            StillframeError: The save of the bytes failed.
        """
        assert self.file is not None
        while True:
            self._next(0.0)
            sent, nbytes = self.file.progress()
            if sent >= nbytes and self.file._is_staged():
                return
            time.sleep(_POLL_S)

    def _next(self, timeout: float) -> _core.Piece | None:
        """Return the next block of the save, an empty one after the last, or None after `timeout`
        seconds. Raise CancelledError if `give_up` was called."""
        assert self.file is not None
        if self._given_up:
            raise CancelledError
        return self.file._ticket.next_piece(timeout)


class _Bytes(NamedTuple):
    """Some bytes of a block of the save, or a copy of them: those from `start` to `end`."""

    owner: _core.Piece | bytes
    start: int
    end: int

    def copied(self) -> _Bytes:
        """Return a copy of the bytes, which does not keep the block; self if it is one."""
        if isinstance(self.owner, bytes):
            return self
        return _Bytes(self.owner.copy(self.start, self.end), 0, self.end - self.start)


def _take(kept: list[_Bytes], nbytes: int) -> Iterator[Buffer]:
    """Yield the first `nbytes` bytes of `kept`, and remove them from it. No local variable keeps a
    block while the caller has its bytes."""
    while nbytes:
        owner, start, end = kept.pop(0)
        until = min(end, start + nbytes)
        if until < end:
            kept.insert(0, _Bytes(owner, until, end))
        view = memoryview(owner)[start:until]
        del owner
        nbytes -= until - start
        yield view
        del view


class RemoteSave(ExternalSave):
    """The handle of a save to a store; for the arguments not listed see `ExternalSave`.

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
        self._entry: ordered.LogEntry | None = None
        self._launched = Event()  # the save has its entry in the log, or was given up
        self._thread: threading.Thread | None = None

    # ---- for users ----

    def _state_under_way(self) -> State:
        file = self._upload.file
        if file is None or not self._launched.is_set():
            return "staging"
        state = file.state
        return state if state in ("staging", "staged") else "writing"

    def progress(self) -> tuple[int, int]:
        self._birth.refuse_child()
        report = self._outcome.report
        if report is not None:
            return report.nbytes, report.nbytes
        return (0, 0) if self._upload.file is None else self._upload.file.progress()

    def cancel(self) -> bool:
        self._birth.refuse_child()
        if self._outcome.settled or not self._decide_to_cancel():
            return False
        self._upload.give_up()
        return True

    def _is_staged(self) -> bool:
        file = self._upload.file
        return file is not None and self._launched.is_set() and file._is_staged()

    def _wait_until_staged(self, deadline: Deadline) -> bool:
        self._birth.refuse_child()
        assert self._upload.file is not None
        return self._upload.file._wait_until_staged(deadline)

    # ---- for `save_to_store` ----

    def start(self, file: CoreSave) -> None:
        """Start the thread that sends, before the save of the bytes is launched: its capture may
        wait for memory that is released only when bytes are sent."""
        self._upload.file = file
        thread = threading.Thread(target=self._run, name="sf-upload", daemon=True)
        self.begin()
        self._thread = thread
        try:
            threads.start(thread)
        except RuntimeError as error:  # Python 3.12 and later start no thread at exit
            raise StillframeError(
                f"{self._path} was not saved: the interpreter is exiting, and starts no thread that"
                " could send it"
            ) from error

    def launch(self) -> None:
        """Append the save to the log, after everything that was submitted before."""
        self._entry = ordered.LogEntry(self._key)
        self._entry.submit()
        self.launched()
        self._launched.set()
        file = self._upload.file
        assert file is not None
        # Future's own method calls this on the thread that resolves the future, and not on the
        # callback thread, which users' callbacks may delay.
        Future.add_done_callback(file.staging_completion, self._tell_copied)

    def give_up(self) -> None:
        """End the save, because its call raises. The store keeps the old object."""
        self._decide_to_cancel()
        self._upload.abandon()
        self._launched.set()
        if self._thread is None or self._thread.ident is None:  # it was not started
            self.was_not_launched()

    def _tell_copied(self, copy: Future[None]) -> None:
        if not self._outcome.settled:
            error = CancelledError() if copy.cancelled() else Future.exception(copy)
            self._outcome.notify_staged(error)

    # ---- on the thread that sends ----

    def _run(self) -> None:
        report: SaveReport | None = None
        failure: BaseException | None = None
        try:
            self._upload.run(self._wait_to_become_visible)
            report = self._report()
        except BaseException as error:  # whatever it is, the save must end
            failure = self._failure(error.with_traceback(None))
        self._launched.wait()
        self.error_is_known = self._entry is None  # without an entry, the call itself has raised
        self.end(report, failure, entry=self._entry)

    def _wait_to_become_visible(self) -> None:
        """Wait until the object may become visible.

        Raises:
            CancelledError: The save was cancelled, or its call raised.
        """
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
            blocked_s=self._call.seconds,
            backpressure_s=self._waited_s + report.backpressure_s,
            staged_after_s=file.entered - self._entered + report.staged_after_s,
            durable_after_s=time.perf_counter() - self._entered,
            io_mode=self._store.client,
        )

    def _failure(self, error: BaseException) -> BaseException:
        failure = self._upload.failure(error)
        if self._is_cancelled():
            return CancelledError(f"the save of {self._path} was cancelled")
        return failure

    def _release(self) -> None:
        self._thread = None


def save_to_store(
    engine: Engine,
    obj: object,
    url: Any,
    options: SaveOptions,
    storage_options: StorageOptions = None,
) -> SaveHandle:
    """Start a save to `url`: see `stillframe.async_save`.

    Raises:
        ValueError: See `open_store`.
        Exception: See `engine.submit`.
    """
    entered = time.perf_counter()
    ordered.refuse_inside()
    store, object_key = open_store(url, storage_options)
    shown = urls.shown(url)
    if not object_key or shown.endswith("/"):
        raise ValueError(f"{shown}: the URL names no object")
    with inside() as nested:
        completion.completion.start()
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
        save.waited()
        try:
            if options.before_launch is not None:
                options.before_launch(save)
            submit(engine, obj, url, options.for_stream(shown, save.start))
            save.launch()
        except BaseException:
            save.give_up()
            raise
        save.call_is_over()
        if completion.completion.over:
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
    urls.refuse_options(path, storage_options)
    return submit(engine, obj, path, options)


# The objects that mark a checkpoint of several objects as complete. They are written last and
# removed first.
MARKERS = (file_kinds.MARKER, ".metadata")


def remove_object(url: Any, storage_options: StorageOptions) -> None:
    """Remove an object, or all objects below it, in the order of submission: see `remove`."""
    store, object_key = open_store(url, storage_options)

    def delete(_: str) -> None:
        below = object_key.rstrip("/") + "/"
        found = [each.key for each in store.list(object_key)]
        markers = [below + marker for marker in MARKERS if below + marker in found]
        store.delete(markers)
        store.delete([object_key, *(each for each in found if each not in markers)])

    ordered.submit_remove(urls.shown(url), urls.key(url), delete)


def will_be_there(url: Any, storage_options: StorageOptions) -> bool:
    """Return whether an object, or a checkpoint of several objects, will exist: see `exists`."""
    store, object_key = open_store(url, storage_options)
    key = urls.key(url)
    known = _core.log_exists(key)
    if known == 2:
        return will_hold(key)
    if known >= 0:
        return bool(known)
    names = [each.key.removeprefix(object_key.rstrip("/") + "/") for each in store.list(object_key)]
    if any(marker in names for marker in MARKERS):
        return True
    return store.exists(object_key)
