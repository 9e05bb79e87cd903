"""Implements `RemoteCheckpointSave`: the save of several objects that are one checkpoint in a
store.

A store cannot rename a directory, so a marker object tells that a checkpoint is complete. Objects
are sent in the block, as they are saved. If they replace an older checkpoint, these steps follow at
the head of the log:
1. The marker of the older checkpoint is removed.
2. The objects become visible.
3. Files that others wrote are sent.
4. Objects that only the older checkpoint had are removed.
5. The marker is written.
Without an older checkpoint, each object is visible as soon as it is sent. Only steps 3 to 5 follow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

from stillframe._base import threads, urls
from stillframe._base.event import Event
from stillframe._base.file_kinds import MARKER
from stillframe._remote.sending import LocalReadError, put_marker, send_file
from stillframe._remote.store import Store
from stillframe._remote.stores import open_store
from stillframe._save.core_save import CoreSave
from stillframe._save.directory import DirectorySave, register_open_directory
from stillframe._save.engine import Engine, submit
from stillframe._save.options import OnDurable, SaveOptions
from stillframe._save.remote import StorageOptions, Upload
from stillframe._save.report import SaveReport
from stillframe.errors import SaveError


class _UploadThread:
    """The upload of one object, and the thread that runs it.

    Args:
        wait_to_appear: See `Upload.run`.

    Attributes:
        ready: Set when all bytes are sent and the copy is not torn, or after a failure.
        finished: Set when the object is visible in the store, or after a failure.
        error: The failure, or None.
    """

    def __init__(self, upload: Upload, wait_to_appear: Callable[[], object]) -> None:
        self.upload = upload
        self.error: BaseException | None = None
        self.ready, self.finished = Event(), Event()
        self._wait_until_may_appear = wait_to_appear
        threads.start(threading.Thread(target=self._run, name="sf-upload", daemon=True))

    def _run(self) -> None:
        try:
            self.upload.run(self._mark_ready_and_wait)
        except BaseException as error:
            self.error = self.upload.fail(error.with_traceback(None))
        self.ready.set()
        self.finished.set()

    def _mark_ready_and_wait(self) -> None:
        self.ready.set()
        self._wait_until_may_appear()


class RemoteCheckpointSave(DirectorySave):
    """The handle of the save of a checkpoint at a URL; `ExternalSave` explains the other arguments.

    Args:
        prefix: The checkpoint's path in the store; the names of its objects begin with it.
        key: The checkpoint's name in the log.
    """

    def __init__(
        self,
        url: str,
        given: Any,
        on_durable: OnDurable | None,
        *,
        entered: float,
        store: Store,
        prefix: str,
        key: bytes,
    ) -> None:
        super().__init__(url, given, on_durable, entered=entered, folder=None, key=key)
        self._store = store
        self._prefix = prefix.rstrip("/")
        self._uploads: list[_UploadThread] = []
        self._sizes: dict[str, int] = {}  # the bytes of each object in the store, by its key
        self._replaces_old = False  # the store has a complete checkpoint of this name already
        self._may_appear = Event()  # the objects may become visible
        self._is_complete = False  # the marker is written

    # ---- for the block ----

    def open(self) -> None:
        """Make the local directory for the files that others write."""
        self._replaces_old = self._store.exists(self._key_of(MARKER))
        self.directory = tempfile.mkdtemp(prefix="stillframe-")
        register_open_directory(self)
        self._call_time.end()  # the block that follows is the user's time

    def submit_file(
        self,
        engine: Engine,
        obj: object,
        name: str,
        options: SaveOptions,
        on_created: Callable[[CoreSave], object],
    ) -> None:
        shown = f"{self._path}/{name}"
        upload = Upload(self._store, self._key_of(name), shown)

        def before_launch(file: CoreSave) -> None:
            on_created(file)
            self.add(file)
            upload.file = file
            # Start the thread before the launch, which may wait until sent bytes are released.
            self._uploads.append(_UploadThread(upload, self._wait_until_may_appear))

        try:
            submit(engine, obj, shown, options.for_stream(shown, before_launch))
        except BaseException:
            upload.abandon()
            # Forget it, so that the commit does not wait for it.
            self._uploads = [each for each in self._uploads if each.upload is not upload]
            raise

    def _wait_until_may_appear(self) -> None:
        """Wait until an object may become visible. Raise CancelledError after a cancel."""
        if self._replaces_old:
            self._may_appear.wait()
        self._refuse_cancelled()

    def _cancel_files(self) -> None:
        super()._cancel_files()
        for each in list(self._uploads):
            each.upload.give_up()
        self._may_appear.set()

    # ---- at the head of the log ----

    def _commit(self) -> int:
        """Make the objects visible and write the marker; return the objects' bytes. The head of the
        module explains the order."""
        for each in self._uploads:
            each.ready.wait()  # until all its bytes are sent
        try:
            self._raise_failure()
            with self._translate_to_save_errors():
                if not self._replaces_old:
                    self._send_files()  # before the decision, so `cancel` can still interrupt this
                self._decide_to_commit()
                if self._replaces_old:  # without its marker, the old one is no checkpoint any more
                    self._store.delete([self._key_of(MARKER)])
        except BaseException:
            self._cancel_files()
            for each in self._uploads:
                each.finished.wait()  # so that no object is sent after the save has ended
            raise
        self._may_appear.set()
        for each in self._uploads:
            each.finished.wait()
        self._raise_failure()
        self._sizes |= {each.upload.key: each.upload.nbytes for each in self._uploads}
        with self._translate_to_save_errors():
            if self._replaces_old:
                self._send_files()
            listed = [each.key for each in self._store.list(self._prefix)]
            only_in_old = [key for key in listed if key not in self._sizes]
            self._store.delete(only_in_old)
            # The marker has the names without the prefix.
            prefix = self._key_of("")
            files = {key.removeprefix(prefix): self._sizes[key] for key in sorted(self._sizes)}
            put_marker(self._store, self._key_of(MARKER), files)
        self._is_complete = True
        return sum(self._sizes.values())

    def _raise_failure(self) -> None:
        """Raise CancelledError if the save was cancelled, or the error of an object."""
        self._refuse_cancelled()
        for each in self._uploads:
            if each.error is not None:
                raise each.error

    def _send_files(self) -> None:
        """Send what others have written into the directory."""
        for directory, _, names in os.walk(self.directory):
            for name in names:
                path = os.path.join(directory, name)
                key = self._key_of(os.path.relpath(path, self.directory))
                target = os.path.realpath(path)  # send the target of a symbolic link
                self._sizes[key] = send_file(self._store, key, target, self._refuse_cancelled)

    @contextlib.contextmanager
    def _translate_to_save_errors(self) -> Iterator[None]:
        """Turn an error of the store, or of a local file, into a SaveError of phase "upload"."""
        try:
            yield
        except SaveError:
            raise
        except (OSError, LocalReadError) as error:
            cause = error.__cause__ if isinstance(error, LocalReadError) else error
            code = cause.errno if isinstance(cause, OSError) else None
            reason = cause.strerror if isinstance(cause, OSError) else None
            raise SaveError(code or errno.EIO, reason or str(cause), self._path, "upload") from None

    def _report(self, nbytes: int) -> SaveReport:
        return dataclasses.replace(super()._report(nbytes), io_mode=self._store.client)

    def _remove_temporary_files(self) -> None:
        """Remove the local directory, and after a failure the objects in the store."""
        shutil.rmtree(self.directory, ignore_errors=True)
        # Objects of an older checkpoint may have the same names, so they stay.
        if self._is_complete or self._replaces_old:
            return
        for each in self._uploads:
            if each.finished.is_set() and each.error is None:  # the object is in the store
                self._sizes[each.upload.key] = each.upload.nbytes
        with contextlib.suppress(OSError):  # objects without a marker count as no checkpoint
            self._store.delete(self._sizes)

    def _key_of(self, name: str) -> str:
        """Return the name in the store of a file of the checkpoint."""
        return f"{self._prefix}/{name}" if self._prefix else name


def new_remote_checkpoint_save(
    url: Any, storage_options: StorageOptions, on_durable: OnDurable | None, *, entered: float
) -> RemoteCheckpointSave:
    """Return the save of a checkpoint at a URL, without sending anything."""
    store, prefix = open_store(url, storage_options)
    return RemoteCheckpointSave(
        urls.shown(url),
        url,
        on_durable,
        entered=entered,
        store=store,
        prefix=prefix,
        key=urls.key(url).rstrip(b"/"),
    )
