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
_TRIES = 100  # of an operation that changes made by other processes can disturb
_MOST_BYTES = 1 << 16  # the most bytes to read of an entry: another program may have made the file

# The paths of the files that this process has locked, by descriptor.
_locked: dict[int, str] = {}
_last_ns = 0  # the last result of `_strictly_increasing_time_ns`
# The entries that were read, by directory and entry name. The content of an entry never changes.
_known: dict[str, dict[str, Entry]] = {}


class Lock:
    """A file that this process has locked, or is about to lock."""

    def __init__(self, path: str, fd: int) -> None:
        self._fds = [fd]  # empty after `_pop_fd_once`
        _locked[fd] = path

    def release(self) -> None:
        fd = self._pop_fd_once()
        if fd is not None:
            _unlock(fd)

    def _pop_fd_once(self) -> int | None:
        """Return the descriptor to the first caller, and None to all others; atomic."""
        try:
            return self._fds.pop()
        except IndexError:
            return None


def _lock(path: str, flags: int = 0) -> Lock | None:
    """Lock a file without waiting. Return None if it cannot be locked. `flags` go to `os.open`."""
    if path in _locked.values():  # by this process
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
    """Unlock and close a descriptor, except one that `_reset_in_forked_child` has closed."""
    if _locked.pop(fd, None) is None:  # the pop is atomic: only one caller closes
        return
    with contextlib.suppress(OSError):  # closing does not unlock what a child process shares
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
    local_name: str  # the name of the local file, or directory, in `directory`
    prefix: str  # the URL of the mirror, with a slash at the end and without credentials
    object_name: str  # the object's name below the prefix
    entry_name: str = ""  # the name of the entry's file; "" before it is in the journal

    @property
    def local(self) -> str:
        return os.path.join(self.directory, self.local_name)

    @property
    def url(self) -> str:
        return self.prefix + self.object_name

    @property
    def save_time_s(self) -> float:
        """The time of the save's call, in seconds since 1970."""
        return int(self.entry_name[:20]) / 1e9  # the name begins with nanoseconds

    @property
    def entry_path(self) -> str:
        return os.path.join(self.directory, NAME, self.entry_name)

    def is_due(self) -> bool:
        """Return whether the file can be uploaded: its save succeeded, or the process of its save
        was killed."""
        if self.entry_name.endswith(".due"):
            return True
        lock = _lock(self.entry_path)
        if lock is None:
            return False  # a save under way holds the lock
        lock.release()
        return True

    def is_of_killed_save(self) -> bool:
        """Return whether a due entry belongs to a killed process. Its file may not exist."""
        return self.entry_name.endswith(".save")

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.entry_path)


class Pending(Lock):
    """The entry of a save under way."""

    def __init__(self, entry: Entry, fd: int) -> None:
        super().__init__(entry.entry_path, fd)
        self.entry = entry

    def make_due(self, *, durable: bool) -> None:
        """Rename the entry to .due, so that the local file is uploaded. Any thread may call this,
        several times too. Raise OSError if the entry cannot be synced or renamed."""
        if durable:
            with contextlib.suppress(FileNotFoundError):  # then the rename below fails too
                self.sync()
        fd = self._pop_fd_once()
        if fd is None:
            return  # another call renames the entry, or has renamed it
        path = self.entry.entry_path
        try:
            os.rename(path, path.removesuffix(".save") + ".due")
        except FileNotFoundError:  # without locks, another process may have removed the entry
            _unlock(fd)  # and write a new entry
            add_due(self.entry, durable=durable)
        except BaseException:
            self._fds.append(fd)  # undoes `_pop_fd_once`, so that a later call tries again
            raise
        else:
            _unlock(fd)

    def remove(self) -> None:
        self.entry.remove()
        self.release()

    def sync(self) -> None:
        paths.sync_file(self.entry.entry_path)
        paths.sync_directory(os.path.dirname(self.entry.entry_path))


def add(entry: Entry, tried: list[Pending] | None = None) -> Pending:
    """Write an entry for a save that begins, and return it locked. Do not sync it.

    Args:
        tried: Each try appends its entry to this list before the entry is in the journal. So the
            caller has the entry even if Ctrl-C comes before the return.
    """
    fields = {"path": entry.local_name, "prefix": entry.prefix, "name": entry.object_name}
    content = json.dumps(fields).encode()
    for _ in range(_TRIES):
        stem = f"{_strictly_increasing_time_ns():020d}-{os.getpid()}"
        new_path = entry._replace(entry_name=f"{stem}.new").entry_path
        try:
            fd = os.open(new_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:  # there is no journal yet
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.dirname(new_path))
            continue
        except FileExistsError:  # a process on another machine has the same id
            continue
        pending = Pending(entry._replace(entry_name=f"{stem}.save"), fd)
        try:
            if tried is not None:
                tried.append(pending)
            if _flock(fd):  # else another process has locked the .new to remove it
                os.write(fd, content)
                os.rename(new_path, pending.entry.entry_path)
                return pending
        except FileNotFoundError:
            pass  # another process has removed the .new
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(new_path)
            pending.release()
            raise
        pending.release()  # and try again with a new name
    raise FileExistsError(errno.EEXIST, "no entry could be made", entry.directory)


def add_due(entry: Entry, *, durable: bool) -> None:
    """Write the entry of a local file that was saved before, and make it due."""
    pending = add(entry)
    if durable:
        paths.sync_directory(entry.directory)  # the journal may be new
    pending.make_due(durable=durable)


def entries(directory: str) -> list[Entry]:
    """Return the entries of a directory's journal, the oldest first. Raise OSError if the journal
    cannot be listed."""
    # Each entry is read only once, because each `stillframe.remove` asks for all of them.
    known = _known.get(directory, {})
    names = _names(directory)
    for _ in range(_TRIES):
        found: dict[str, Entry] = {}
        for name in names:
            if name in known:
                found[name] = known[name]
                continue
            with contextlib.suppress(OSError):  # the entry is gone, or belongs to another user
                entry = _read(directory, name)
                if entry is not None:
                    found[name] = entry
        # `_names` misses an entry that is renamed meanwhile, so it has to return the same twice.
        names_before = names
        names = _names(directory)
        if names == names_before:
            break
    if found:
        _known[directory] = found
    else:
        _known.pop(directory, None)
    return [found[name] for name in sorted(found)]


def _names(directory: str) -> list[str]:
    """Return the names of the entries in a directory's journal, sorted; [] without a journal."""
    known = _known.get(directory, {})
    try:
        names = os.listdir(os.path.join(directory, NAME))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(name for name in names if name in known or _ENTRY.fullmatch(name))


def _read(directory: str, entry_name: str) -> Entry | None:
    """Return an entry; None if it is invalid or a .new. Raise OSError if it cannot be read."""
    with open(os.path.join(directory, NAME, entry_name), "rb") as stream:
        text = stream.read(_MOST_BYTES)
    try:
        content = json.loads(text)
        entry = Entry(directory, content["path"], content["prefix"], content["name"], entry_name)
    except (ValueError, KeyError, TypeError):
        return None
    if entry_name.endswith(".new") or not all(isinstance(each, str) for each in entry):
        return None
    # A name with a slash, or "..", would lead out of the directory.
    name = entry.local_name
    if os.path.basename(name) != name or name in ("", ".", ".."):
        return None
    return entry


def lock(directory: str) -> Lock | None:
    """Take the lock for uploads from a directory. Return None if another process has it."""
    return _lock(os.path.join(directory, NAME, _LOCK), os.O_CREAT)


def unlock(directory: str, upload_lock: Lock) -> None:
    """Release the lock for uploads. Before that, remove invalid entries, and an empty journal."""
    known = _known.get(directory, {})
    for name in _names(directory):
        if name in known:
            continue  # only valid entries are known
        entry = Entry(directory, "", "", "", name)
        with contextlib.suppress(OSError):  # the entry is gone, or belongs to another user
            is_invalid = _read(directory, name) is None
            if is_invalid and entry.is_due():  # due: no running process is writing it
                entry.remove()
    with contextlib.suppress(OSError):  # there are other files, or a new entry
        if not _names(directory):
            # A process that has opened the file `lock` meanwhile notices that the name is gone.
            os.unlink(os.path.join(directory, NAME, _LOCK))
            os.rmdir(os.path.join(directory, NAME))
    upload_lock.release()


def _strictly_increasing_time_ns() -> int:
    """Return the nanoseconds since 1970. Each result is later than all before in this process."""
    global _last_ns
    _last_ns = max(_last_ns + 1, time.time_ns())
    return _last_ns


def _reset_in_forked_child() -> None:
    """Close the descriptors of the parent's locks in a forked child. The parent keeps the locks."""
    for fd in _locked:
        with contextlib.suppress(OSError):
            os.close(fd)
    _locked.clear()


os.register_at_fork(after_in_child=_reset_in_forked_child)
