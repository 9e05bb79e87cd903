"""Work that Python does in the order of the log: links, what a wrapped CheckpointIO does, and saves
of many ranks (`Turn`).

Such work has an entry among the saves and removes (csrc/core/commit/work.c). When its turn comes,
everything submitted before has ended, and nothing submitted after takes effect until it has
ended itself. One thread does all of it, started with the first; the core says whose turn it is, so
a signal handler may submit work in the middle of another submission.
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
from stillframe._base.calls import inside
from stillframe._save import completion
from stillframe.errors import StillframeError

log = logging.getLogger("stillframe")

# Called with whether the last save before it did well; returns whether it did well itself.
Work = Callable[[bool], bool]


class _Worker:
    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._doing: int | None = None  # who does the work whose turn it is: one at a time
        self._waiting: dict[int, tuple[_core.LogWork, Work]] = {}

    def submit(self, key: bytes, kind: int, function: Work) -> _core.LogWork:
        completion.completion.start()
        entry = _core.LogWork(key, kind)
        try:
            # Known before the log can call for it.
            self._waiting[entry.number] = entry, function
            entry.append()
            if completion.completion.over or not self._start():
                while entry.number in self._waiting:  # nobody else is left to do it
                    self._turn()
        except BaseException:
            # Ctrl-C may come at any line, also when the entry is in the log or being worked on.
            if self._waiting.pop(entry.number, None) is not None:
                entry.end(False)
            raise
        return entry

    def end(self, entry: _core.LogWork, good: bool) -> None:
        self._waiting.pop(entry.number, None)
        entry.end(good)

    def is_current(self) -> bool:
        """Whether this thread is doing such work: its own, or at exit whoever submitted it."""
        return threading.get_ident() == self._doing

    def _start(self) -> bool:
        """False when it is too late for a thread."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sf-ordered", daemon=True)
            return completion.start_once(self._thread)

    def _run(self) -> None:
        while self._turn():
            pass
        with self._lock:
            self._thread = None
            again = bool(self._waiting)
        if again:
            self._start()

    def _turn(self) -> bool:
        """Does what is next; False when the log is being stopped."""
        turn = _core.log_work_next()
        if turn is None:
            return False
        number, after_good = turn
        waiting = self._waiting.pop(number, None)
        if waiting is None:
            return True  # given up
        entry, function = waiting
        good = False
        self._doing = threading.get_ident()
        try:
            good = function(after_good)
        except Exception:
            log.exception("stillframe: work in the order of saves failed")
        finally:
            self._doing = None
            entry.end(good)
        return True


_worker = _Worker()


def submit(key: bytes, kind: int, function: Work) -> _core.LogWork:
    """Appends an entry to the log; `function` runs on a thread of its own when its turn comes.

    Args:
        key: The name in the log, see `paths.key`.
        kind: `_core.WORK_SAVE`, `WORK_REMOVE` or `WORK_LINK`: what becomes of the name.
        function: The work. What it raises is logged, and counts as not having done well. Where a
            signal handler raises in this call, it may run all the same.

    Returns:
        The entry, for `end`.
    """
    return _worker.submit(key, kind, function)


def end(entry: _core.LogWork, good: bool) -> None:
    """Work is over before its turn has come, or before its function has returned."""
    _worker.end(entry, good)


class Turn:
    """The place of a save that others write, while what stands in front of it goes on.

    Two things wait for what was submitted before: writing, for removes and saves of the same name,
    or a remove would take the new files; and the commit, for everything, so that what was saved
    first is there first. What stands behind waits for `end`.

    Args:
        key: The name in the log, see `paths.key`.

    Raises:
        StillframeError: The interpreter is exiting.
    """

    def __init__(self, key: bytes) -> None:
        self._come, self._over = threading.Event(), threading.Event()
        self._before = _core.LogLoad(key)
        self._entry = submit(key, _core.WORK_SAVE, self._stand)

    def _stand(self, after_good: bool) -> bool:
        """In its turn; the log stands still until the save has ended."""
        self._come.set()
        self._over.wait()
        return False  # `end` has said how

    def wait_to_write(self) -> None:
        """Waits until what was submitted before has done with the name."""
        with contextlib.suppress(OSError):  # it need not be there
            self._before.open()
            self._before.close()

    def wait_to_commit(self) -> None:
        """Waits until all that was submitted before has ended."""
        self._come.wait()

    def end(self, well: bool) -> None:
        """The save has ended: what stands behind it goes on."""
        end(self._entry, well)
        self._come.set()
        self._over.set()


def submit_remove(
    path: str,
    key: bytes,
    remove: Callable[[str], object],
    needed: Callable[[], bool] | None = None,
) -> None:
    """Appends a remove: `remove(path)`, if the last save before it did well and, at that moment,
    `needed()` is false. What it raises is logged, as for every remove."""

    def work(after_good: bool) -> bool:
        if not after_good:
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


def is_inside() -> bool:
    """Whether this thread is doing work that has its turn in the log."""
    return _worker.is_current()


def refuse_inside() -> None:
    """For calls that wait for the log: work that has its turn would wait for itself.

    Raises:
        StillframeError: This thread is doing such work.
    """
    if is_inside():
        raise StillframeError(
            "a CheckpointIO that stillframe wraps must not save or load with stillframe itself, nor"
            " wait for its saves or close an engine: that would wait for its own end"
        )


def wait_for_key(key: bytes) -> None:
    """Waits until nothing of that name that was submitted before is pending."""
    refuse_inside()
    with contextlib.suppress(OSError):  # the name need not be there, nor be a local one
        _core.LogLoad(key).open()


Path = str | os.PathLike[str]


def wait_for_path(path: Path, *, follow_link: bool = True) -> None:
    """Waits until no save or remove of `path` that was submitted before is pending."""
    with contextlib.suppress(OSError):  # whoever reads it next says why it cannot
        open_in_order(path, follow_link=follow_link)


def open_in_order(path: Path, *, follow_link: bool = True) -> _core.LogLoad:
    """Waits as `wait_for_path` does and opens what the path is at that point of the log.

    The descriptor belongs to what is returned: a Ctrl-C at any moment loses none.

    Raises:
        OSError: As `os.open`.
    """
    refuse_inside()
    with inside():  # keeps this frame for a while where a Ctrl-C comes at its end: not with a file
        return _opened(path, follow_link)


def _opened(path: Path, follow_link: bool) -> _core.LogLoad:
    if follow_link and os.path.islink(path):
        # It may be about to become another link.
        with contextlib.suppress(OSError):
            _core.LogLoad(paths.key(path, follow_link=False)).open()
    load = _core.LogLoad(paths.key(path, follow_link=follow_link))
    try:
        load.open()
    except OSError as error:
        text, words = os.fspath(path), error.strerror
        if error.errno == errno.ENOENT:
            words = f"{words}{paths.hint(text)}"
        raise type(error)(error.errno, words, text) from None
    return load


def _forked() -> None:
    """In the child: thread, entries and work are the parent's."""
    global _worker
    _worker = _Worker()


os.register_at_fork(after_in_child=_forked)
