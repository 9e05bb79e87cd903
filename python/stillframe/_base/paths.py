"""The target of a save: from a user's path to a directory, a name in it, and the key in the log."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass, field
from typing import Any

from stillframe import _core
from stillframe._base import urls
from stillframe.errors import SaveError


@dataclass(frozen=True, slots=True)
class SaveTarget:
    """A resolved path at which a save makes its file."""

    shown: str  # the path as the user gave it
    directory: bytes  # the real path of the file's directory
    name: bytes  # the file's name in that directory
    file_system: int  # `st_dev` of the directory


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """The path or URL of a checkpoint, as a user gave it and in absolute form."""

    given: Any = field(compare=False)  # as the user gave it
    name: str  # a URL as it was given, or the absolute local path
    remote: bool = field(compare=False)  # `name` is a URL

    @classmethod
    def of(cls, path: Any) -> CheckpointPath:
        """Return the `CheckpointPath` for a path that a user gave.

        Raises:
            TypeError: `path` is not a path.
            ValueError: `path` is a `file://` URL of another host.
        """
        if not isinstance(path, (str, bytes, os.PathLike)):
            raise no_path_error(path)
        text = os.fsdecode(path)
        remote = urls.is_remote(text)
        name = text if remote else os.path.abspath(urls.local_path_of_file_url(text))
        return cls(path, name, remote)

    def __fspath__(self) -> str:
        return self.name

    @property
    def text(self) -> str:
        """The path as a string, as it was given. A URL may hold credentials."""
        return os.fsdecode(self.given)

    @property
    def shown(self) -> str:
        """The path as a string for messages and reports."""
        return urls.shown(self.text)

    def key(self, *, follow_link: bool = False) -> bytes:
        """Return the path's name in the log. Without `follow_link`, a link counts as itself. Raise
        the errors of `parse_local_path`."""
        if self.remote:
            return urls.key(self.name)
        parse_local_path(self.given)  # only for its exceptions
        return key(self.name, follow_link=follow_link)


def no_path_error(path: object) -> TypeError:
    """Return the error for an object that is no path."""
    message = f"a path has to be a str or os.PathLike, not {type(path).__name__}"
    if hasattr(path, "write") or hasattr(path, "read"):
        message += ": stillframe saves to files by name. torch.save and torch.load take open files"
    return TypeError(message)


def parse_local_path(path: object) -> str:
    """Return the path as a string.

    Raises:
        TypeError: `path` is neither a string nor an `os.PathLike` of a string.
        ValueError: `path` is empty, contains a null byte, or is remote.
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(text, str):
        raise no_path_error(path)
    if urls.is_remote(text):
        shown = urls.shown(text)
        raise ValueError(f"{shown}: remote paths are not supported here; give a local path")
    text = urls.local_path_of_file_url(text)
    if not text:
        raise ValueError("the path is empty")
    if "\0" in text:
        raise ValueError("the path holds a null byte")
    return text


def _resolve_parent_and_name(text: str, follow_link: bool) -> tuple[str, str]:
    """Return the real path of the parent, and the last component. With `follow_link`, resolve a
    link in the last component first."""
    if follow_link and os.path.islink(text):
        text = os.path.realpath(text)
    parent, name = os.path.split(text)
    if not name or name in (".", ".."):
        parent, name = os.path.split(os.path.realpath(text))
    return os.path.realpath(parent or "."), name


def key(path: object, *, follow_link: bool) -> bytes:
    """Return a local path's name in the log: the parent's real path, and the last component."""
    text = parse_local_path(path)
    resolved = _core.resolve(os.fsencode(text), follow_link)
    if resolved is None:  # a component of the path is missing
        return os.fsencode(os.path.join(*_resolve_parent_and_name(text, follow_link)))
    real_parent, name = resolved[:2]
    return os.path.join(real_parent, name)


def target(
    path: object,
    *,
    follow_link: bool,
    create_parents: bool,
    durable: bool,
    directory: bool = False,
) -> SaveTarget:
    """Return the target that `path` names, after a check that a save can make it.

    Args:
        follow_link: Write through a symbolic link rather than replace it.
        create_parents: Make missing parent directories.
        durable: The file's directory will be synced, and so will the parent of each new directory.
        directory: The save makes a directory instead of a regular file.

    Raises:
        TypeError, ValueError: See `parse_local_path`.
        SaveError: (phase "open") The parent is missing or cannot be synced, or something of
            another kind has the name.
    """
    text = parse_local_path(path)
    if directory:
        text = text.rstrip("/") or text
    base_name = os.path.basename(text)
    if base_name in (".", "..") and directory:
        raise SaveError(errno.EINVAL, "give the directory's own name", text, "open")
    # Such a path names a directory, so it is refused. Only with `create_parents` (for Lightning) it
    # is not: a slash at its end is dropped, as fsspec does.
    if base_name in ("", ".", "..") and not create_parents:
        raise SaveError(errno.EISDIR, os.strerror(errno.EISDIR), text, "open")
    # The fast path releases the interpreter lock only once. `mode` is that of the file to replace.
    resolved = _core.resolve(os.fsencode(text), follow_link)
    if resolved is not None:
        real_parent, real_name, mode, is_readable, file_system = resolved
        is_allowed = _may_replace(mode, follow_link, directory)
        can_be_synced = is_readable or not durable  # not durable: there is no sync
        if real_name and is_allowed and can_be_synced:
            return SaveTarget(text, real_parent, real_name, file_system)
    # The slow path makes directories, or finds the right error.
    parent = os.path.dirname(text) or "."
    try:
        parent, name = _resolve_parent_and_name(text, follow_link)
        if create_parents:
            make_directories(parent, durable)
        found = os.stat(parent)
        if durable and not os.access(parent, os.R_OK, effective_ids=True):
            raise PermissionError(
                errno.EACCES,
                f"the directory {parent} cannot be synced without permission to read it (a save"
                " with durable=False needs none)",
            )
        _check_name_is_savable(parent, name, follow_link, directory)
    except OSError as error:
        strerror = error.strerror or str(error)
        if error.errno == errno.ENOENT:
            strerror = f"{strerror}: the parent directory {parent} is missing{tilde_hint(text)}"
        raise SaveError(error.errno or errno.EIO, strerror, text, "open") from None
    return SaveTarget(text, os.fsencode(parent), os.fsencode(name), found.st_dev)


def make_remote_target(url: object) -> SaveTarget:
    """Return the target of an object in a store. It only has the URL for messages and timelines."""
    shown = urls.shown(url)
    parent, _, name = shown.rpartition("/")
    return SaveTarget(shown, os.fsencode(parent), os.fsencode(name), 0)


def tilde_hint(text: str) -> str:
    """Return a hint to add to a message about a missing path that begins with "~", or ""."""
    return " ('~' is not expanded: give os.path.expanduser(path))" if text.startswith("~") else ""


def _may_replace(mode: int, follow_link: bool, directory: bool) -> bool:
    """Return whether a save of a file (or `directory`) can replace a file with the given `st_mode`.
    A `mode` of 0 means that there is no file."""
    if directory:
        return not mode or stat.S_ISDIR(mode)
    return not mode or stat.S_ISREG(mode) or (stat.S_ISLNK(mode) and not follow_link)


def _check_name_is_savable(parent: str, name: str, follow_link: bool, directory: bool) -> None:
    """Raise OSError if a save cannot make a file (or `directory`) of this name."""
    full = os.path.join(parent, name)
    if not name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    try:
        mode = os.lstat(full).st_mode
    except FileNotFoundError:
        return
    if _may_replace(mode, follow_link, directory):
        return
    if _core.log_exists(os.fsencode(full)) == 0:
        return  # a remove in the log will remove the file before this save
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if directory and not stat.S_ISLNK(mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if stat.S_ISLNK(mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    raise OSError(errno.EINVAL, "not a regular file")


def make_directories(directory: str, durable: bool) -> None:
    """Make `directory` and its missing parents. With `durable`, sync the parent of each new
    directory, so that the new one survives a power failure."""
    missing = []
    while not os.path.isdir(directory):
        missing.append(directory)
        above = os.path.dirname(directory)
        if above == directory:  # the root
            break
        directory = above
    for path in reversed(missing):
        try:
            os.mkdir(path)
        except FileExistsError:  # another process has just made it, or it is a file
            if not os.path.isdir(path):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
            continue
        if durable:
            sync_directory(os.path.dirname(path))


def put_back(text: str) -> bool:
    """Put back a directory that a writer has moved aside, if the writer died before it replaced the
    directory. `text` is a missing path at or below it. Return whether the path may exist now."""
    missing = os.path.abspath(text)
    parent = os.path.dirname(missing)
    while not os.path.isdir(parent):
        missing, parent = parent, os.path.dirname(parent)
    # `missing` is now the first part of the path that may be missing; `parent` exists.
    if os.path.lexists(missing):
        return False
    _core.tidy(os.fsencode(parent))  # puts back what dead writers have moved aside there
    return os.path.lexists(missing)


def sync_directory(directory: str) -> None:
    """Make the entries of a directory durable, if its file system can do so."""
    try:
        _open_and_fsync(directory, os.O_DIRECTORY)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def sync_file(path: str) -> None:
    _open_and_fsync(path, 0)


def _open_and_fsync(path: str, flags: int) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
