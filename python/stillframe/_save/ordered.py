"""External work: Python code that runs in the order of the log.

Links, wrapped CheckpointIOs and saves of many ranks need such work. It has an entry in the log
among the saves and removes (csrc/core/commit/work.c). The work runs when the entry is at the head
of the log: everything submitted before has ended, and everything submitted later waits.

One thread does all external work of the process. The core decides which entry is next, so a signal
handler may submit work in the middle of another submission.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable

from stillframe import _core
from stillframe._base import paths
from stillframe._base.calls import inside_call
from stillframe._base.event import Event
from stillframe._base.threads import RunOnceThread
from stillframe._save import completion
from stillframe.errors import StillframeError

log = logging.getLogger("stillframe")

# A function that does external work. Its argument: whether the last save before it in the log
# succeeded. Its result: whether the work succeeded.
Work = Callable[[bool], bool]


class _Worker:
    """Runs external work on a thread when its entry is at the head of the log."""

    def __init__(self) -> None:
        # {"running": the thread}. Not a lock, but a dict, because `dict.setdefault` is atomic: a
        # signal handler may interrupt the owner of a lock, and wait for a thread that wants it.
        self._thread: dict[str, RunOnceThread] = {}
        self._working_thread: int | None = None  # the id of the thread that does external work now
        # Work that has not begun, by the number of its entry.
        self._waiting: dict[int, tuple[_core.LogWork, Work]] = {}

    def submit(self, key: bytes, kind: int, function: Work) -> _core.LogWork:
        """See the function `submit`."""
        completion.thread.start()
        entry = _core.LogWork(key, kind)
        try:
            # Before the append, because the entry may be at the head at once.
            self._waiting[entry.number] = entry, function
            entry.append()
            if completion.thread.drain_is_over or not self._start():
                while entry.number in self._waiting:  # no thread is left to do the work
                    self._run_next_external_work()
        except BaseException:
            # Ctrl-C may come at any line. If a thread has begun the work, it ends the entry.
            was_still_waiting = self._waiting.pop(entry.number, None) is not None
            if was_still_waiting:
                entry.end(False)  # as failed
            raise
        return entry

    def end(self, entry: _core.LogWork, succeeded: bool) -> None:
        self._waiting.pop(entry.number, None)
        entry.end(succeeded)

    def is_current(self) -> bool:
        """Return whether the calling thread is doing external work."""
        return threading.get_ident() == self._working_thread

    def _start(self) -> bool:
        """Start the thread; return False if the interpreter is exiting and starts no thread."""
        thread = self._thread.setdefault("running", RunOnceThread(self._run, "sf-ordered"))
        return thread.start()

    def _run(self) -> None:
        """Do external work until the log is being stopped."""
        while self._run_next_external_work():
            pass
        # Work that was submitted while the log was being stopped needs another thread. If it is
        # submitted after the check, its submission finds no thread, and starts one.
        self._thread.clear()
        if self._waiting:
            self._start()

    def _run_next_external_work(self) -> bool:
        """Wait until external work is at the head of the log, and do it. Return False if the log is
        being stopped."""
        next_work = _core.log_work_next()
        if next_work is None:
            return False
        number, previous_succeeded = next_work
        waiting = self._waiting.pop(number, None)
        if waiting is None:
            return True  # `end`, or an interrupted `submit`, has ended the entry
        entry, function = waiting
        succeeded = False
        self._working_thread = threading.get_ident()
        try:
            succeeded = function(previous_succeeded)
        except Exception:
            log.exception("stillframe: work in the order of saves failed")
        finally:
            self._working_thread = None
            entry.end(succeeded)
        return True


_worker = _Worker()


def submit(key: bytes, kind: int, function: Work) -> _core.LogWork:
    """Append external work to the log. `function` runs on the worker's thread when the entry is at
    the head of the log.

    Args:
        key: The name in the log, see `paths.key`.
        kind: What the work does to the name: `_core.WORK_SAVE`, `WORK_DIRECTORY` (a save that makes
            the name and everything below it), `WORK_REMOVE` or `WORK_LINK`.
        function: The work. An error that it raises is logged and counts as a failure. If a signal
            handler raises in this call, the function may run nevertheless.

    Returns:
        The entry, for `end`.
    """
    return _worker.submit(key, kind, function)


def end(entry: _core.LogWork, succeeded: bool) -> None:
    """End an entry, even before its function has returned. A function that has not begun never
    runs."""
    _worker.end(entry, succeeded)


class LogEntry:
    """The log entry of a save whose bytes are written before the entry is at the head of the log.

    Call `wait_to_write` before the bytes are written, because an earlier remove of the name would
    delete them. Call `wait_to_commit` before the save becomes visible, so that saves appear in
    order. Call `end` if `submit` was called, even if Ctrl-C interrupted `submit`: later entries
    wait for it.

    Args:
        key: The name in the log, see `paths.key`.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._at_head, self._end_called = Event(), Event()
        # `LogLoad.open` waits for the entries of its name that exist now. Nothing is read.
        self._earlier_entries = _core.LogLoad(key)
        self._entry: _core.LogWork | None = None

    def submit(self) -> None:
        """Append the entry. Raise StillframeError if the interpreter is exiting."""
        self._entry = submit(self._key, _core.WORK_SAVE, self._hold_the_log)

    def _hold_the_log(self, _previous_succeeded: bool) -> bool:
        """Keep the entry at the head of the log until `end` is called."""
        self._at_head.set()
        self._end_called.wait()
        return False  # ignored: `end` has already recorded the result

    def wait_to_write(self) -> None:
        """Wait until everything of this name that was submitted before has ended."""
        with contextlib.suppress(OSError):  # the file need not exist
            self._earlier_entries.open()
            self._earlier_entries.close()

    def wait_to_commit(self) -> None:
        """Wait until everything that was submitted before has ended."""
        self._at_head.wait()

    def end(self, succeeded: bool) -> None:
        """End the entry, so that later entries go on."""
        if self._entry is not None:
            end(self._entry, succeeded)
        self._at_head.set()  # an entry that ends before it is at the head never sets this itself
        self._end_called.set()


def submit_remove(
    path: str,
    key: bytes,
    remove: Callable[[str], object],
    needed: Callable[[], bool] | None = None,
) -> None:
    """Append a remove to the log. When the entry is at the head, `remove(path)` is called if the
    last save before it succeeded and `needed()` is false. An exception of `remove` is logged.

    Args:
        path: The path, for `remove` and messages.
        key: The path's name in the log, see `paths.key`.
        needed: Returns whether a link still points to the path.
    """

    def work(previous_succeeded: bool) -> bool:
        if not previous_succeeded:
            log.warning("stillframe: %s was not removed: the save before it failed", path)
            return False
        if needed is not None and needed():
            log.warning("stillframe: %s was not removed: a link still points to it", path)
            return False
        try:
            remove(path)
        except Exception as error:
            log.warning("stillframe: %s could not be removed: %s", path, error)
            return False
        return True

    submit(key, _core.WORK_REMOVE, work)


def is_in_external_work() -> bool:
    """Return whether this thread is doing external work."""
    return _worker.is_current()


def refuse_in_external_work() -> None:
    """Raise StillframeError if this thread is doing external work. It would wait for itself."""
    if is_in_external_work():
        raise StillframeError(
            "a CheckpointIO that stillframe wraps must not save or load with stillframe itself, nor"
            " wait for its saves or close an engine: that would wait for its own end"
        )


def wait_for_saves_of_key(key: bytes) -> None:
    """Wait until every save and remove of this name that was submitted before has ended. A name
    that ends in a slash stands for everything below it."""
    refuse_in_external_work()
    with contextlib.suppress(OSError):  # the name need not exist
        _core.LogLoad(key).open()  # waits for the entries


Path = str | os.PathLike[str]


def wait_for_saves_of_path(path: Path, *, follow_link: bool = True) -> None:
    """Wait until every save and remove of `path` that was submitted before has ended."""
    with contextlib.suppress(OSError):  # the next read reports the error
        open_after_earlier_saves(path, follow_link=follow_link)


def wait_for_saves_in_directory(path: Path) -> None:
    """Wait until every save and remove of `path`, or in it, that was submitted before has ended.

    Raises:
        OSError: There is no such directory at that point of the log.
    """
    refuse_in_external_work()
    with inside_call():
        key = os.path.join(os.path.realpath(path), "")  # with "/": also everything in the directory
        _open(os.fsencode(key), path).close()


def open_after_earlier_saves(path: Path, *, follow_link: bool = True) -> _core.LogLoad:
    """Wait as `wait_for_saves_of_path` does, and open the path before any later save or remove of
    it begins.

    The returned object owns the descriptor and closes it, so no Ctrl-C can leak the descriptor.

    Raises:
        OSError: As `os.open`.
    """
    refuse_in_external_work()
    # No variable of this frame holds the open file: a traceback of Ctrl-C would keep it alive.
    with inside_call():
        return _opened(path, follow_link)


def _opened(path: Path, follow_link: bool) -> _core.LogLoad:
    """Return the result of `open_after_earlier_saves`."""
    if follow_link and os.path.islink(path):
        # An entry of the log may replace the link. So wait for the entries of the link's own name
        # first, by a `LogLoad` that is not used.
        with contextlib.suppress(OSError):  # `_open` reports the error
            _core.LogLoad(paths.key(path, follow_link=False)).open()
    return _open(paths.key(path, follow_link=follow_link), path)


def _open(key: bytes, path: Path) -> _core.LogLoad:
    """Wait for the entries of `key`, and open the file. An error names `path`."""
    load = _core.LogLoad(key)
    try:
        try:
            load.open()
        except FileNotFoundError:  # a writer that died may have moved the path aside
            if not paths.put_back(os.fspath(path)):
                raise
            load = _core.LogLoad(key)
            load.open()
    except OSError as error:
        text, reason = os.fspath(path), error.strerror
        if error.errno == errno.ENOENT:
            reason = f"{reason}{paths.tilde_hint(text)}"
        raise type(error)(error.errno, reason, text) from None
    return load


def _reset_in_forked_child() -> None:
    global _worker
    _worker = _Worker()


os.register_at_fork(after_in_child=_reset_in_forked_child)
