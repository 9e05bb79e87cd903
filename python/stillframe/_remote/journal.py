"""The journal of a mirror: which files of one directory still have to be uploaded.

The journal is a hidden directory next to the checkpoints. It has a small file for each upload, the
*entry*. The ending of its name tells the state of the upload:

    a save begins ──▶ NAME.save ──durable──▶ NAME.due ──uploaded──▶ removed
                          ╰───── failed or cancelled ─────────────────╯

NAME begins with the time, so names sort in the order of the saves. An entry is written as NAME.new
and renamed, so a killed process leaves no incomplete .save or .due. A power failure may leave an
entry without content. Such an entry is removed.

Locks are flocks, which end with the process. A save locks its entry. A .save without a lock belongs
to a killed process, and counts as due. A process that uploads locks the file `lock`.

On a file system without locks, another process may take a .save for that of a killed process,
upload the old file and remove the entry. So a save that misses its entry at the end writes a new
entry. A file may be uploaded twice, but none is lost.
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
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # of a file system without locks
_TRIES = 100  # a try fails if another process removes the journal or takes the same name
_MOST_BYTES = 1 << 16  # the most bytes to read of an entry: another program may have made the file

# The paths of the files that this process has locked, by descriptor.
_locked: dict[int, str] = {}
_last_ns = 0  # the last result of `_now_ns`
# The entries of each directory, by file name. The content of an entry never changes.
_known: dict[str, dict[str, Entry]] = {}


class Lock:
    """A file that this process has locked, or is about to lock."""

    def __init__(self, path: str, fd: int) -> None:
        self._fds = [fd]  # empty after `_take`
        _locked[fd] = path

    def release(self) -> None:
        fd = self._take()
        if fd is not None:
            _unlock(fd)

    def _take(self) -> int | None:
        """Return the descriptor to the first caller and None to others; atomic."""
        try:
            return self._fds.pop()
        except IndexError:
            return None


def _lock(path: str, flags: int = 0) -> Lock | None:
    """Lock a file. Return None if that is not possible now."""
    if path in _locked.values():
        return None
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o666)
    except OSError:
        return None  # the file is gone, or belongs to another user
    lock = Lock(path, fd)
    try:
        if _flock(fd) and os.path.samestat(os.fstat(fd), os.lstat(path)):
            return lock
    except OSError:
        pass  # the file was removed or renamed before it was locked
    lock.release()
    return None


def _unlock(fd: int) -> None:
    """Unlock and close a descriptor, except one that `_forked` has closed."""
    if _locked.pop(fd, None) is None:  # in one atomic operation
        return
    with contextlib.suppress(OSError):  # unlock, because a child may share the descriptor
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _flock(fd: int) -> bool:
    """Lock a file without waiting. Return False if it is locked already. On a file system without
    locks return True."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


class Entry(NamedTuple):
    """One upload."""

    directory: str  # the directory of the local file
    path: str  # the name of the local file, or directory, in `directory`
    prefix: str  # the URL of the mirror, with a slash at the end and without credentials
    name: str  # the object's name below the prefix
    file: str = ""  # the name of the entry; "" before the entry is in the journal

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
    def own_path(self) -> str:
        return os.path.join(self.directory, NAME, self.file)

    def is_due(self) -> bool:
        """Return whether the file's save is over: durable, or its process was killed."""
        if self.file.endswith(".due"):
            return True
        lock = _lock(self.own_path)
        if lock is not None:
            lock.release()
        return lock is not None

    def is_of_killed_save(self) -> bool:
        """Return whether a due entry belongs to a killed process. Its file may not exist."""
        return self.file.endswith(".save")

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.own_path)


class Pending(Lock):
    """The entry of a save under way."""

    def __init__(self, entry: Entry, fd: int) -> None:
        super().__init__(entry.own_path, fd)
        self.entry = entry

    def make_due(self, *, durable: bool) -> None:
        """Have the local file uploaded. Any thread may call this, and again. Raise OSError if the
        entry cannot be synced or renamed."""
        if durable:
            with contextlib.suppress(FileNotFoundError):
                self.sync()
        fd = self._take()
        if fd is None:
            return  # another call has taken over
        path = self.entry.own_path
        try:
            os.rename(path, path.removesuffix(".save") + ".due")
        except FileNotFoundError:  # without locks, another process may have removed the entry
            _unlock(fd)
            add_due(self.entry, durable=durable)
        except BaseException:
            self._fds.append(fd)  # so that a later call tries again
            raise
        else:
            _unlock(fd)

    def remove(self) -> None:
        self.entry.remove()
        self.release()

    def sync(self) -> None:
        paths.sync_file(self.entry.own_path)
        paths.sync_directory(os.path.dirname(self.entry.own_path))


def add(entry: Entry, made: list[Pending] | None = None) -> Pending:
    """Write an entry without a sync, and return it locked.

    Args:
        made: The entry is appended to this list before it is in the journal. So the caller has the
            entry even if Ctrl-C comes before the return.
    """
    content = json.dumps({"path": entry.path, "prefix": entry.prefix, "name": entry.name}).encode()
    for _ in range(_TRIES):
        stem = f"{_now_ns():020d}-{os.getpid()}"
        new = entry._replace(file=f"{stem}.new").own_path
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
                os.rename(new, pending.entry.own_path)
                return pending
        except FileNotFoundError:
            pass  # another process has removed the .new before it was locked
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(new)
            pending.release()
            raise
        pending.release()
    raise FileExistsError(errno.EEXIST, "no entry could be made", entry.directory)


def add_due(entry: Entry, *, durable: bool) -> None:
    """Write the entry of a local file that is already there, and make it due."""
    pending = add(entry)
    if durable:
        paths.sync_directory(entry.directory)  # the journal may be new
    pending.make_due(durable=durable)


def entries(directory: str) -> list[Entry]:
    """Return the entries of a directory's journal, the oldest first. Raise OSError if the journal
    cannot be listed."""
    # Each entry is read only once: each `stillframe.remove` asks for all of them.
    known = _known.get(directory, {})
    names = _names(directory)
    for _ in range(_TRIES):
        found = {file: known[file] for file in names if file in known}
        for file in [each for each in names if each not in known]:
            with contextlib.suppress(OSError):  # the entry is gone, or belongs to another user
                entry = _read(directory, file)
                if entry is not None:
                    found[file] = entry
        # A list that is made during a rename may have neither the old name nor the new name.
        before, names = names, _names(directory)
        if names == before:
            break
    if found:
        _known[directory] = found
    else:
        _known.pop(directory, None)
    return [found[file] for file in sorted(found)]


def _names(directory: str) -> list[str]:
    """Return the names of the entries in a directory's journal, sorted; [] without a journal."""
    known = _known.get(directory, {})
    try:
        names = os.listdir(os.path.join(directory, NAME))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(name for name in names if name in known or _ENTRY.fullmatch(name))


def _read(directory: str, file: str) -> Entry | None:
    """Return an entry; None if it is invalid or a .new. Raise OSError if it cannot be read."""
    with open(os.path.join(directory, NAME, file), "rb") as stream:
        text = stream.read(_MOST_BYTES)
    try:
        content = json.loads(text)
        entry = Entry(directory, content["path"], content["prefix"], content["name"], file)
    except (ValueError, KeyError, TypeError):
        return None
    if file.endswith(".new") or not all(isinstance(each, str) for each in entry):
        return None
    # A path with a slash, or "..", would lead out of the directory.
    is_name = os.path.basename(entry.path) == entry.path and entry.path not in ("", ".", "..")
    return entry if is_name else None


def lock(directory: str) -> Lock | None:
    """Take the right to upload from a directory. Return None if another process has it."""
    return _lock(os.path.join(directory, NAME, _LOCK), os.O_CREAT)


def unlock(directory: str, right: Lock) -> None:
    """Give the right back. Before that, remove invalid entries, and the journal if it is empty."""
    known = _known.get(directory, {})
    for file in [each for each in _names(directory) if each not in known]:
        entry = Entry(directory, "", "", "", file)
        with contextlib.suppress(OSError):
            if _read(directory, file) is None and entry.is_due():
                entry.remove()
    with contextlib.suppress(OSError):  # there are other files, or a new entry
        if not _names(directory):
            # A process that has opened the file `lock` meanwhile notices that the name is gone.
            os.unlink(os.path.join(directory, NAME, _LOCK))
            os.rmdir(os.path.join(directory, NAME))
    right.release()


def _now_ns() -> int:
    """Return the time since 1970, later than any time returned before in this process."""
    global _last_ns
    _last_ns = max(_last_ns + 1, time.time_ns())
    return _last_ns


def _forked() -> None:
    """Close the descriptors of the parent's locks in a forked child. The parent keeps the locks."""
    for fd in _locked:
        with contextlib.suppress(OSError):
            os.close(fd)
    _locked.clear()


os.register_at_fork(after_in_child=_forked)
