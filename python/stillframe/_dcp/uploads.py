"""The data files of a rank on their way to a store.

A few threads send them. A thread that waits for a file sends the file itself, if no other thread
has begun to: at the interpreter's exit, for instance, no thread can be started.

    waiting ──a thread takes it──▶ being sent ──acknowledged──▶ over
       └────────another file has failed────────────────────────▶ over, with that file's error
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Sequence

from stillframe._base import threads
from stillframe._base.calls import do_nothing
from stillframe._base.event import Event
from stillframe._remote.stores import Store
from stillframe._save.engine import Engine
from stillframe._save.parts import Parts, submit_parts
from stillframe._save.remote import Upload
from stillframe._save.report import SaveReport

_MAX_THREADS = 4  # the most threads; the client sends several parts of each file at a time


class Uploads:
    """The files that a rank sends in one save. The first error ends all uploads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The lock protects these attributes:
        self.error: BaseException | None = None  # the first error
        self._waiting: list[FileUpload] = []  # files that no thread has begun to send
        self._in_progress: list[Upload] = []  # uploads that have begun
        self._nr_threads = 0  # threads that run `_send_all`

    def add(self, file: FileUpload) -> FileUpload:
        """Send a file as soon as a thread is free."""
        with self._lock:
            self._waiting.append(file)
            needs_thread = self._nr_threads < _MAX_THREADS
            if needs_thread:
                self._nr_threads += 1
        if needs_thread:
            thread = threading.Thread(target=self._send_all, name="sf-upload", daemon=True)
            # If the thread does not start, the caller of `FileUpload.exception` sends the file.
            with contextlib.suppress(OSError, RuntimeError):
                threads.start(thread)
        return file

    def _send_all(self) -> None:
        """Send files until none is waiting. Runs on a thread."""
        file = self._next()
        while file is not None:
            file.send()
            file = self._next()

    def _next(self) -> FileUpload | None:
        """Take the next file from the list. After None, the calling thread must end."""
        with self._lock:
            if self._waiting:
                return self._waiting.pop(0)
            self._nr_threads -= 1
            return None

    def take(self, file: FileUpload) -> bool:
        """Take a file from the list, so that the caller sends the file. Return False if a thread
        has begun to send it."""
        with self._lock:
            is_waiting = file in self._waiting
            if is_waiting:
                self._waiting.remove(file)
            return is_waiting

    def begin(self, upload: Upload) -> None:
        """Register an upload, so that `fail` gives it up. Raise the first error, if an upload has
        failed already."""
        with self._lock:
            if self.error is not None:
                raise self.error
            self._in_progress.append(upload)

    def fail(self, error: BaseException) -> BaseException:
        """Record an error and give up all uploads. Return the first error."""
        with self._lock:
            self.error = first = self.error or error
            to_give_up, self._in_progress = self._in_progress, []
        for upload in to_give_up:
            upload.give_up()
        return first


class FileUpload:
    """One file on its way to a store, with the methods `exception` and `result` of a `SaveHandle`.
    The owners keep the memory of the parts alive."""

    def __init__(
        self,
        uploads: Uploads,
        engine: Engine,
        parts: Parts,
        store: Store,
        key: str,
        owners: Sequence[object],
    ) -> None:
        self._uploads = uploads
        self._engine = engine
        self._parts = parts
        self._store = store
        self._key = key
        self._owners = owners
        self._ended = Event()
        self._report: SaveReport | None = None
        self._error: BaseException | None = None

    def exception(self) -> BaseException | None:
        """Wait until the file is sent; return the error, if any."""
        no_thread_sends_it = self._uploads.take(self)
        if no_thread_sends_it:
            self.send()
        self._ended.wait()
        return self._error

    def result(self) -> SaveReport | None:
        """Return the report, or None after an error. Call `exception` first: this method waits, but
        does not send the file itself."""
        self._ended.wait()
        return self._report

    def send(self) -> None:
        """Send the file. Called once."""
        try:
            self._report = self._send()
        except BaseException as error:
            self._error = self._uploads.fail(error.with_traceback(None))
        finally:
            self._owners = ()
            self._ended.set()

    def _send(self) -> SaveReport:
        shown = self._store.shown(self._key)
        upload = Upload(self._store, self._key, shown)
        self._uploads.begin(upload)
        save = submit_parts(self._engine, self._parts, shown, owners=self._owners, upload=upload)
        try:
            # No wait before the end: the object may appear, because no metadata names it yet.
            upload.run(wait_to_appear=do_nothing)
        except BaseException as error:
            # Without the traceback, whose frames may keep the file's memory.
            raise upload.fail(error.with_traceback(None)) from None
        report: SaveReport = save.result()
        return dataclasses.replace(report, io_mode=self._store.client)
