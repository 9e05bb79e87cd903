"""The journal of a mirror: which files of one directory still have to be uploaded.

It is a hidden directory beside the checkpoints with a small file for each upload, its *entry*. The
ending tells its state:

    a save begins ──▶ NAME.save ──durable──▶ NAME.due ──uploaded──▶ removed
                          ╰───── failed or cancelled ─────────────────╯

NAME begins with the time, so names sort in the order of the saves. An entry is written under a
third ending (.new) and renamed, and does not change afterwards. So a process may be killed at any
moment; a power failure may leave an entry without content, which is removed.

Locks are flocks and end with the process; csrc/core/file/tmp.c has the rules. A save holds the lock
of its entry. A .save that nobody holds was left by a process that was killed, maybe after the
rename, and counts as due. A process that uploads holds the file `lock`, so a directory has one
upload at a time. On a file system without locks, another process may take a .save for one that was
left, and remove it when it has uploaded the old file. So a save writes its entry again if that is
missing at its end: something may go up twice there, but nothing is lost.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import time
from typing import NamedTuple

from stillframe._base import paths

NAME = ".stillframe-mirror"

_ENTRY = re.compile(r"\d{20}-\d+\.(new|save|due)")
_LOCK = "lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
_TRIES = 100  # another process may remove the empty journal, or have the same name
_LARGEST = 1 << 16

# The paths of the files that this process has locked, by descriptor. A forked child closes them.
_locked: dict[int, str] = {}
_last_ns = 0
# The entries of each directory by name, as they were read last: they do not change.
_known: dict[str, dict[str, Entry]] = {}


class Lock:
    """A file that this process has locked."""

    def __init__(self, path: str, fd: int) -> None:
        self._fds = [fd]
        _locked[fd] = path

    def release(self) -> None:
        """Give the lock back. May be called again."""
        fd = self._take()
        if fd is not None:
            _unlock(fd)

    def _take(self) -> int | None:
        """Take the descriptor in one step, so that one of several threads gets it."""
        try:
            return self._fds.pop()
        except IndexError:
            return None


def _lock(path: str, flags: int = 0) -> Lock | None:
    """Lock a file; return None if that is not possible now."""
    if path in _locked.values():
        return None
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o666)
    except OSError:
        return None  # it is gone, or another user's
    lock = Lock(path, fd)
    try:
        if _flock(fd) and os.path.samestat(os.fstat(fd), os.lstat(path)):
            return lock
    except OSError:
        pass  # it was removed or renamed before it was locked
    lock.release()
    return None


def _unlock(fd: int) -> None:
    if _locked.pop(fd, None) is not None:  # otherwise it is the parent's
        with contextlib.suppress(OSError):  # a child may share the lock: end it for both
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _flock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


class Entry(NamedTuple):
    """One upload.

    Attributes:
        directory: The directory of the local file.
        path: The name of the file or directory there.
        prefix: The URL of the mirror, with a slash at its end and without credentials.
        name: The object's name below the prefix.
        file: The name of the entry in the journal.
    """

    directory: str
    path: str
    prefix: str
    name: str
    file: str = ""

    @property
    def local(self) -> str:
        return os.path.join(self.directory, self.path)

    @property
    def url(self) -> str:
        return self.prefix + self.name

    @property
    def made_s(self) -> float:
        """The time of the save's call, in seconds since 1970."""
        return int(self.file[:20]) / 1e9

    @property
    def there(self) -> str:
        return os.path.join(self.directory, NAME, self.file)

    def is_due(self) -> bool:
        """Return whether the save is durable, or its process was killed."""
        if self.file.endswith(".due"):
            return True
        lock = _lock(self.there)
        if lock is not None:
            lock.release()
        return lock is not None

    def is_of_killed_save(self) -> bool:
        """Return whether a due entry is due because its process was killed. Then the local file may
        not exist."""
        return self.file.endswith(".save")

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.there)


class Pending(Lock):
    """The entry of a save under way."""

    def __init__(self, entry: Entry, fd: int) -> None:
        super().__init__(entry.there, fd)
        self.entry = entry

    def make_due(self, *, durable: bool) -> None:
        """Record that the local file is there. Any thread may call this, and call it again.

        Args:
            durable: The entry is on the disk when this returns.

        Raises:
            OSError: It is not known to be there.
        """
        if durable:
            with contextlib.suppress(FileNotFoundError):
                self.sync()
        fd = self._take()
        if fd is None:
            return  # another thread has it, or had it
        try:
            os.rename(self.entry.there, self.entry.there.removesuffix(".save") + ".due")
        except FileNotFoundError:
            _unlock(fd)
            add_due(self.entry, durable=durable)
        except BaseException:
            self._fds.append(fd)
            raise
        else:
            _unlock(fd)

    def remove(self) -> None:
        self.entry.remove()
        self.release()

    def sync(self) -> None:
        paths.sync_file(self.entry.there)
        paths.sync_directory(os.path.dirname(self.entry.there))


def add(entry: Entry, made: list[Pending] | None = None) -> Pending:
    """Write an entry, and return it locked. Nothing is synced.

    Args:
        made: Gets the entry before it is in the journal: Ctrl-C may come before this returns.

    Raises:
        OSError: It could not be written.
    """
    content = json.dumps({"path": entry.path, "prefix": entry.prefix, "name": entry.name}).encode()
    for _ in range(_TRIES):
        stem = f"{_now_ns():020d}-{os.getpid()}"
        new = entry._replace(file=f"{stem}.new").there
        try:
            fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.dirname(new))
            continue
        except FileExistsError:
            continue
        pending = Pending(entry._replace(file=f"{stem}.save"), fd)
        try:
            if made is not None:
                made.append(pending)
            if _flock(fd):
                os.write(fd, content)
                os.rename(new, pending.entry.there)
                return pending
        except FileNotFoundError:
            pass  # `tidy` was faster
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(new)
            pending.release()
            raise
        pending.release()
    raise FileExistsError(errno.EEXIST, "no entry could be made", entry.directory)


def add_due(entry: Entry, *, durable: bool) -> None:
    """Write the entry of a file that is there.

    Raises:
        OSError: It could not be written.
    """
    pending = add(entry)
    if durable:
        paths.sync_directory(entry.directory)  # the journal may be new
    pending.make_due(durable=durable)


def entries(directory: str) -> list[Entry]:
    """Return the entries of a directory's journal, the oldest first.

    Each is read once: a call of `remove` may ask while hundreds wait. A list that is made during a
    rename may have neither of the two names, so it counts only if the next one is the same.

    Raises:
        OSError: The journal cannot be listed.
    """
    known = _known.get(directory, {})
    names = _names(directory)
    for _ in range(_TRIES):
        found = {file: known[file] for file in names if file in known}
        for file in [each for each in names if each not in known]:
            with contextlib.suppress(OSError):  # it is gone, or another user's
                entry = _read(directory, file)
                if entry is not None:
                    found[file] = entry
        before, names = names, _names(directory)
        if names == before:
            break
    if found:
        _known[directory] = found
    else:
        _known.pop(directory, None)
    return [found[file] for file in sorted(found)]


def _names(directory: str) -> list[str]:
    known = _known.get(directory, {})
    try:
        names = os.listdir(os.path.join(directory, NAME))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(name for name in names if name in known or _ENTRY.fullmatch(name))


def _read(directory: str, file: str) -> Entry | None:
    """Return an entry; None if it is not whole.

    Raises:
        OSError: It is not there, or not readable.
    """
    with open(os.path.join(directory, NAME, file), "rb") as stream:
        text = stream.read(_LARGEST)
    try:
        content = json.loads(text)
        entry = Entry(directory, content["path"], content["prefix"], content["name"], file)
    except (ValueError, KeyError, TypeError):
        return None
    is_text = all(isinstance(each, str) for each in entry)
    is_inside = is_text and entry.path == os.path.basename(entry.path) not in ("", ".", "..")
    return entry if is_inside and not file.endswith(".new") else None


def lock(directory: str) -> Lock | None:
    """Take the right to upload from a directory; return None if another process has it."""
    return _lock(os.path.join(directory, NAME, _LOCK), os.O_CREAT)


def unlock(directory: str, right: Lock) -> None:
    """Give the right back; before, remove entries that are not whole, and the journal if it is
    empty. A process that has opened the lock meanwhile finds that its name is gone."""
    known = _known.get(directory, {})
    for file in [each for each in _names(directory) if each not in known]:
        entry = Entry(directory, "", "", "", file)
        with contextlib.suppress(OSError):
            if _read(directory, file) is None and entry.is_due():
                entry.remove()
    with contextlib.suppress(OSError):  # there is a file of somebody else, or a new entry
        if not _names(directory):
            os.unlink(os.path.join(directory, NAME, _LOCK))
            os.rmdir(os.path.join(directory, NAME))
    right.release()


def _now_ns() -> int:
    """Return the time, later than any before in this process."""
    global _last_ns
    _last_ns = max(_last_ns + 1, time.time_ns())
    return _last_ns


def _forked() -> None:
    """Close the parent's locks in a forked child, and leave them locked."""
    for fd in _locked:
        with contextlib.suppress(OSError):
            os.close(fd)
    _locked.clear()


os.register_at_fork(after_in_child=_forked)
