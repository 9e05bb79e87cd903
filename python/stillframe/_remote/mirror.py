"""The mirror: a thread uploads local files once their saves are durable.

    the call                 writes an entry into the journal of the file's directory (journal.py)
    the save's end           syncs the entry and makes it due
    the thread `sf-mirror`   uploads the files of due entries (sending.py), one at a time

The oldest entry goes first. An entry's *prefix* is the URL of its mirror. After a failure, the
thread uploads nothing to the prefix for a while, and then tries again. While another process
uploads from a directory, all entries there wait.

Other processes may have left entries in a directory. They are uploaded too, once this process has
saved there with a mirror or has called `MirrorUpload.resume`. An entry is removed without an upload
if a later entry of the same file is due.

The journal holds no credentials. The thread uses the options that this process has given for the
prefix, or else those for its bucket, or else the credentials of the environment.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import random
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from stillframe._base import paths, threads, urls
from stillframe._base.event import Event
from stillframe._base.sizes import decimal
from stillframe._remote import journal, sending
from stillframe._remote.backlog import Backlog
from stillframe._remote.journal import Entry
from stillframe._remote.stores import check_store_arguments, open_store

log = logging.getLogger("stillframe")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # between two tries of an upload that fails
_POLL_S = 1.0  # how often a journal is read again, for changes by other processes
_GIVEN_UP_S = 5.0  # the longest wait of `give_up` for the thread

Options = Mapping[str, Any]


class MirrorUpload:
    """The upload that follows one save.

    Args:
        local: The path of the file or directory. Its parent is a real path.
        mirror: The URL of a directory in a store.
        storage_options: See `open_store`.
        durable: If true, `end` syncs the entry.
        create_parents: If true, `begin` makes missing directories.

    Raises:
        ValueError: The URL or an option makes no sense, or the file's name is not UTF-8.
        StillframeError: No client for the store is installed.
    """

    def __init__(
        self,
        local: str,
        mirror: str,
        storage_options: Options | None,
        *,
        durable: bool,
        create_parents: bool = False,
    ) -> None:
        path, question_mark, query = mirror.partition("?")
        if not path.endswith("/"):
            path += "/"
        url = path + question_mark + query
        check_store_arguments(url, storage_options)
        directory, name = os.path.split(local)
        name.encode()  # raises UnicodeEncodeError, a ValueError
        self.entry = Entry(directory, name, urls.shown(url), name)
        self._durable = durable
        self._create_parents = create_parents
        # Empty until `begin`. It has an entry for each try to add one; the last is in the journal.
        self._pending: list[journal.Pending] = []
        uploader.set_target(url, dict(storage_options or {}))

    def begin(self) -> None:
        """Write the entry without a sync, before the save begins. Log an OSError."""
        try:
            if self._create_parents:
                paths.make_directories(self.entry.directory, self._durable)
            journal.add(self.entry, self._pending)
        except OSError as error:
            self._log_not_uploaded(error)
        uploader.request_journal_check(self.entry.directory)

    def resume(self) -> None:
        """Upload what earlier saves have left in the directory. There is no save now."""
        if os.path.isdir(os.path.join(self.entry.directory, journal.NAME)):
            uploader.request_journal_check(self.entry.directory)

    def end(self, succeeded: bool) -> None:
        """Make the entry due if the save succeeded, else remove it. Log an OSError instead of
        raising it. May be called several times."""
        for pending in self._pending:  # only one of them is in the journal: see `__init__`
            try:
                if succeeded:
                    pending.make_due(durable=self._durable)
                else:
                    pending.remove()
            except OSError as error:
                self._log_not_uploaded(error)
            uploader.request_journal_check(self.entry.directory)

    def _log_not_uploaded(self, error: OSError) -> None:
        log.error("stillframe: %s will not be uploaded: %s", self.entry.local, error)


# ---- the thread ----


class _GivenUpError(Exception):
    """Raised inside an upload to stop it, because the process exits."""


class _Failures(NamedTuple):
    """The uploads to one prefix that have failed since the last success."""

    nr_failed: int
    next_try_s: float  # by time.monotonic()


class _Uploader:
    """Uploads what is in the journals that this process has used.

    It has no lock. A signal handler may save, and would wait forever for a lock that is held by the
    code it has interrupted.
    """

    exit_deadline_s: float | None = None  # the time.monotonic() at which the exit stops waiting

    def __init__(self) -> None:
        # The directories whose journals are read. The dict is an ordered set.
        self._directories: dict[str, None] = {}
        # The URL and options of each mirror, as this process gave them, by the URL's `urls.key`.
        self._targets: dict[bytes, tuple[str, Options]] = {}
        self._failures: dict[str, _Failures] = {}  # by prefix
        self._unreadable: set[Entry] = set()  # entries whose local files cannot be read
        # Paths, each with a function to call when nothing at or below the path is to be uploaded.
        self._callbacks: list[tuple[str, Callable[[], object]]] = []
        self._ending = False  # `finish` was called
        self._given_up = False  # `give_up` was called
        self._reported = False  # `finish` has said what is left
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()  # an element wakes the thread
        self._thread = threads.RunOnceThread(self._run, "sf-mirror")

    def is_used(self) -> bool:
        return bool(self._targets)

    def set_target(self, url: str, options: Options) -> None:
        """Set the options with which to upload to the mirror of a URL."""
        key = urls.key(url.partition("?")[0])
        self._targets.pop(key, None)  # so that the latest target is the last of the dict
        self._targets[key] = url, options

    def request_journal_check(self, directory: str) -> None:
        """Have the thread read the journal of a directory."""
        self._directories[directory] = None
        self._wake()

    def _wake(self) -> None:
        self._wakes.put(None)
        try:
            self._thread.start()  # if it does not run yet
        except OSError as error:
            log.warning("stillframe: uploads wait for a thread: %s", error)

    # ---- for removes, waits and the exit ----

    def has_uploads_at(self, path: str) -> bool:
        """Return whether `path`, or anything below it, is still to be uploaded."""
        parent, name = os.path.split(path)
        if any(each.local_name == name for each in _entries_of([parent])):
            return True
        below = [each for each in list(self._directories) if each.startswith(f"{path}/")]
        return bool(_entries_of([path, *below]))

    def call_when_uploaded(self, path: str, function: Callable[[], object]) -> None:
        """Have the thread call `function` when nothing at or below `path` is to be uploaded."""
        self._callbacks.append((path, function))
        for directory in (os.path.dirname(path), path):
            self.request_journal_check(directory)

    def wait(self, timeout: float | None) -> Backlog | None:
        """Wait until nothing is to be uploaded, and return None. After `timeout` seconds, or if the
        thread does not run, return what is left."""
        if not self._directories:
            return None
        all_uploaded = Event()
        self._callbacks.append(("", all_uploaded.set))  # every path is below ""
        self._wake()
        end_s = float("inf") if timeout is None else time.monotonic() + timeout
        while not all_uploaded.wait(min(_POLL_S, end_s - time.monotonic())):
            if time.monotonic() >= end_s or not self._thread.is_alive():
                break
        return None if all_uploaded.is_set() else self.left()

    def left(self) -> Backlog | None:
        """Return what is to be uploaded; None if that is nothing."""
        return Backlog.of(_entries_of(list(self._directories)))

    def finish(self, quiet_s: float, say: Callable[[str], object]) -> None:
        """Wait until the thread has uploaded what is due and has ended. Say what is left. Uploads
        that fail stay in the journal. May be called again.

        Args:
            quiet_s: A wait of up to so many seconds is not announced.
            say: Prints a line.
        """
        if not self._thread.is_started:
            return
        self._ending = True
        self._wakes.put(None)
        if not self._given_up:
            self._join(quiet_s)
            goes_on_waiting = self._thread.is_alive() and not self._is_past_exit_deadline()
            left = self.left() if goes_on_waiting else None
            if left is not None:
                say(f"stillframe: waiting for {left}; Ctrl-C twice leaves it to the next process")
            self._join(None)
        left = None if self._reported else self.left()
        if left is not None:
            self._reported = True
            say(f"stillframe: left to the next process that saves there with a mirror: {left}")

    def _is_past_exit_deadline(self) -> bool:
        return self.exit_deadline_s is not None and time.monotonic() >= self.exit_deadline_s

    def _join(self, timeout_s: float | None) -> None:
        """Wait until the thread has ended, at most `timeout_s` and until `exit_deadline_s`."""
        limits_s = [] if timeout_s is None else [timeout_s]
        if self.exit_deadline_s is not None:
            limits_s.append(max(0.0, self.exit_deadline_s - time.monotonic()))
        self._thread.join(min(limits_s, default=None))

    def give_up(self) -> None:
        """Stop the upload under way. Its entry stays."""
        self._given_up = True
        self._wakes.put(None)
        if self._thread.is_started:
            self._thread.join(_GIVEN_UP_S)

    # ---- on the thread ----

    def _run(self) -> None:
        """Upload what is due after each wake and each pause, until the process exits."""
        pause_s: float | None = 0.0  # None: until the next wake
        while not self._given_up:
            with contextlib.suppress(queue.Empty):
                self._wakes.get(timeout=pause_s)
                while True:  # until `queue.Empty`: one pass serves all wakes so far
                    self._wakes.get_nowait()
            try:
                pause_s = self._next()
            except Exception:
                log.exception("stillframe: the mirror failed")
                pause_s = _LONGEST_PAUSE_S
            more_may_be_due = pause_s == 0.0
            if self._ending and not more_may_be_due:
                return

    def _next(self) -> float | None:
        """Upload one entry if one is due. Return the seconds to wait before the next call; None if
        nothing is left to upload."""
        entries = _entries_of(list(self._directories))
        now_s = time.monotonic()
        paused = set()  # the prefixes that wait after a failure
        for prefix, failures in self._failures.items():
            if self._ending or now_s < failures.next_try_s:  # at exit nothing is tried again
                paused.add(prefix)
        directories = dict.fromkeys(each.directory for each in entries)  # an ordered set
        for directory in directories:
            if self._upload_oldest_due_from(directory, entries, paused):
                return 0.0  # the next entry may be due already
        for directory in self._directories.keys() - directories.keys():
            self._drop_empty_journal(directory)
        left = [each for each in entries if each not in self._unreadable]
        self._run_callbacks(left)
        pauses_s = []
        for entry in left:
            if entry.prefix in paused:
                pauses_s.append(self._failures[entry.prefix].next_try_s - now_s)
            else:  # another process uploads from the directory, or the entry's save goes on
                pauses_s.append(_POLL_S)
        return min(pauses_s, default=None)

    def _run_callbacks(self, left: list[Entry]) -> None:
        """Call the functions that wait for no entry in `left`."""
        for callback in list(self._callbacks):
            path, function = callback
            if not any(_is_at_or_below(each, path) for each in left):
                self._callbacks.remove(callback)
                function()

    def _drop_empty_journal(self, directory: str) -> None:
        """Remove the empty journal of a directory, and read it no longer."""
        upload_lock = journal.lock(directory)
        if upload_lock is not None:
            journal.unlock(directory, upload_lock)  # removes the journal if it is empty
        del self._directories[directory]
        if os.path.exists(os.path.join(directory, journal.NAME)):
            self._directories[directory] = None  # read it again: it may have a new entry

    def _upload_oldest_due_from(
        self, directory: str, entries: list[Entry], paused: set[str]
    ) -> bool:
        """Upload the oldest due entry of a directory, except those of prefixes in `paused`. Return
        False if there is none, or if another process uploads from the directory. `entries` may be
        out of date, because they were read without the lock."""

        def may_upload(entry: Entry) -> bool:
            return entry.prefix not in paused and entry not in self._unreadable

        here = [each for each in entries if each.directory == directory]
        if not any(may_upload(each) and each.is_due() for each in here):
            return False
        upload_lock = journal.lock(directory)
        if upload_lock is None:
            return False
        try:
            # The journal is read again, because another process may have changed it. An entry may
            # become due at any moment, so each is asked once.
            due = [each for each in _entries_of([directory]) if each.is_due()]
            # The latest entry of each file and mirror; `due` is sorted by time.
            latest = {(each.local, each.url): each for each in due}
            for entry in filter(may_upload, due):
                if latest[entry.local, entry.url] == entry:
                    self._upload(entry)
                    return True
                entry.remove()  # a later entry uploads the same file
            return False
        finally:
            journal.unlock(directory, upload_lock)

    def _upload(self, entry: Entry) -> None:
        """Upload the file of an entry and remove the entry. Log an error instead of raising it."""
        began_s = time.monotonic()
        try:
            store, base = open_store(*self._target(entry.prefix))
            key = f"{base}/{entry.object_name}" if base else entry.object_name
            nbytes = sending.send(store, key, entry.local, self._check)
        except _GivenUpError:
            pass  # the entry stays for the next process
        except sending.LocalReadError as error:
            self._handle_unreadable_file(entry, error.__cause__)
        except Exception as error:
            self._failed(entry, error)
        else:
            entry.remove()
            if self._failures.pop(entry.prefix, None) is not None:
                log.info("stillframe: uploads to %s go on", entry.prefix)
            took = f"{decimal(nbytes)} in {time.monotonic() - began_s:.1f} s"
            log.info("stillframe: %s was uploaded to %s: %s", entry.local, entry.url, took)

    def _check(self) -> None:
        if self._given_up:
            raise _GivenUpError

    def _target(self, prefix: str) -> tuple[str, Options]:
        """Return the URL and the options with which to open the store of a prefix. If this process
        has no mirror with the prefix, the options are the last ones for its bucket, or else {}."""
        target = self._targets.get(urls.key(prefix))
        if target is not None:
            return target
        root = urls.Url.parse(prefix).root
        options_of_bucket: Options = {}
        for url, options in list(self._targets.values()):
            if urls.Url.parse(url).root == root:
                options_of_bucket = options
        return prefix, options_of_bucket

    def _handle_unreadable_file(self, entry: Entry, cause: BaseException | None) -> None:
        """Handle a local file that cannot be read, because of the error `cause`."""
        if not isinstance(cause, FileNotFoundError):
            self._unreadable.add(entry)  # this process does not try again
            log.error("stillframe: %s cannot be read to upload it: %s", entry.local, cause)
            return
        if not os.path.lexists(entry.local):
            entry.remove()
            if not entry.is_of_killed_save():
                log.warning("stillframe: %s is gone, and was not uploaded", entry.local)
            return
        # The path exists, so it is a directory that has changed during the upload. If a later save
        # has replaced it, the entry of that save uploads it.
        has_later_entry = any(
            each.local == entry.local and each.entry_name > entry.entry_name  # by time
            for each in _entries_of([entry.directory])
        )
        if not has_later_entry:
            self._failed(entry, cause)

    def _failed(self, entry: Entry, error: BaseException) -> None:
        """Log the failure of an upload, and pause the entry's prefix."""
        failures = self._failures.get(entry.prefix)
        nr_before = 0 if failures is None else failures.nr_failed
        # Each pause is twice the last. min(nr_before, 16) keeps the power small.
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(nr_before, 16))
        pause_s *= random.uniform(0.5, 1.0)  # so that not all ranks try again at the same time
        self._failures[entry.prefix] = _Failures(nr_before + 1, time.monotonic() + pause_s)
        if nr_before:
            log.info(
                "stillframe: try %d to upload %s to %s failed; the next follows in %.1f s: %s",
                nr_before + 1,
                entry.local,
                entry.url,
                pause_s,
                error,
            )
            return
        log.warning(
            "stillframe: %s waits to be uploaded: %s. It is tried again until it succeeds;"
            " `stillframe info %s` shows what waits",
            entry.local,
            error,
            entry.directory,
        )


def _entries_of(directories: Iterable[str]) -> list[Entry]:
    """Return the entries in the journals of the directories, the oldest first."""
    found: list[Entry] = []
    for directory in set(directories):
        with contextlib.suppress(OSError):  # the next call reads the journal again
            found += journal.entries(directory)
    return sorted(found, key=lambda each: each.entry_name)


def _is_at_or_below(entry: Entry, path: str) -> bool:
    return entry.local == path or entry.local.startswith(f"{path}/")


uploader = _Uploader()


def _reset_in_forked_child() -> None:
    """Leave the parent's uploads to the parent in a forked child."""
    global uploader
    uploader = _Uploader()


os.register_at_fork(after_in_child=_reset_in_forked_child)
