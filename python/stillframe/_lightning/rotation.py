"""Removes, links and announces files once saves have ended.

    remove   removes a file in the order of the log, when no link and no logger needs the file
    link     makes `last.ckpt` a symbolic link to a file, in the order of the log
             (`ModelCheckpoint(save_last="link")`)
    notify   tells loggers of a checkpoint once it is durable, on the training thread

A link replaces an older link with one rename, and so always names a file that exists. If Ctrl-C
comes before a link is made again, the remove of the old target finds the old link and is dropped.

A signal handler may save, remove and notify in the middle of any method here. So every method takes
an item from a collection by one atomic operation, and only the caller that got the item handles it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import shutil
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stillframe import _core
from stillframe._base import paths
from stillframe._base.paths import CheckpointPath
from stillframe._save import ordered, uploads
from stillframe._save.api import exists, remove
from stillframe.errors import SaveError

if TYPE_CHECKING:
    from stillframe._lightning.publish import DurableSaveCallback
    from stillframe._lightning.wrapped import WrappedIO

log = logging.getLogger("stillframe")

# The errors of `os.symlink` where links are not supported or not permitted.
_NO_LINKS = (errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.ENOSYS)


class Rotation:
    """The files of one plugin in one process.

    Args:
        remover_of: Returns the CheckpointIO that removes a file; None for stillframe itself.
        durable: Sync the directories of links.
        failed: Called with each error of a link or a logger; see `Work.add_error_without_save`.

    Attributes:
        to_remove: An ordered set of the files to remove once nothing needs them.
        links: The target that each link will have when all entries of the log are done.
        publications: Calls that wait for a save to be durable, in the order of the saves.
    """

    def __init__(
        self,
        remover_of: Callable[[CheckpointPath], WrappedIO | None],
        *,
        durable: bool,
        failed: Callable[..., object],
    ) -> None:
        self._remover_of = remover_of
        self._durable = durable
        self._failed = failed
        self.to_remove: dict[CheckpointPath, None] = {}
        self.links: dict[CheckpointPath, CheckpointPath] = {}
        self.publications: deque[DurableSaveCallback] = deque()
        # Former target -> link. The link on the disk may still point to the former target.
        self._linked_by: dict[CheckpointPath, CheckpointPath] = {}
        # The name in the log of the newest link or remove, which ends last.
        self._newest_key: bytes | None = None

    def under_way(self) -> bool:
        """Return whether `finish` has anything to do or to wait for."""
        return bool(self.publications or self.to_remove or self._newest_key)

    def make_room(self, file: CheckpointPath) -> None:
        """Before a save to `file`, submit the waiting remove of that file, if there is one."""
        self.links.pop(file, None)
        self._submit_remove(file)

    def remove(self, file: CheckpointPath) -> None:
        """Remove the file, now or when nothing needs it any more."""
        self.links.pop(file, None)
        self.to_remove[file] = None
        self.release()

    def release(self, *, all_of_them: bool = False) -> None:
        """Submit the waiting removes of files that nothing needs any more. With `all_of_them`,
        submit every waiting remove."""
        for file in list(self.to_remove):
            if all_of_them or not self._is_needed(file):
                self._submit_remove(file)

    def _submit_last_removes(self) -> None:
        """Submit the removes that still wait when a run ends. A remove keeps a file to which a link
        still points, as it may after Ctrl-C."""
        for link, target in list(self.links.items()):
            if target in self.to_remove:
                self._linked_by[target] = link
        self.release(all_of_them=True)

    def link(self, target: CheckpointPath, link: CheckpointPath) -> None:
        """Make `link` a link to `target` when all saves submitted before have ended."""
        # Only `release` may remove the former target. It comes last: Ctrl-C may come at any line.
        former = self.links.get(link)
        if former is not None:
            self._linked_by[former] = link
        self._submit_remove(link)
        key = link.key()
        ordered.submit(key, _core.WORK_LINK, lambda _after_good: self._make_link(target, link))
        self._newest_key = key
        self.links[link] = target
        self.release()

    def will_exist(self, file: CheckpointPath, otherwise: Callable[[Any], bool]) -> bool:
        """Return whether the file will exist once all entries of the log are done.

        `otherwise(path)` answers for remote paths that are not in the log.
        """
        if file in self.to_remove:
            return False
        if not file.remote:
            return exists(file.given)
        known = _core.log_exists(file.key())
        if known < 0:  # the file is not in the log
            return otherwise(file.given)
        return bool(known)

    def notify(self) -> None:
        """Notify loggers of checkpoints, up to the first save that has not ended. Then submit the
        removes that waited for that."""
        for publication in list(self.publications):
            if not publication.due():
                break
            self._call_and_dequeue(publication)
        if self.to_remove:
            self.release()

    def finish(self) -> None:
        """Notify loggers of every checkpoint, and wait for links and removes. All saves have ended
        before."""
        raised: list[Exception] = []
        for publication in list(self.publications):
            try:
                self._call_and_dequeue(publication)
            except Exception as error:
                raised.append(error)
        for each in reversed(raised):
            self._failed("a logger", each, first=True)
        self._submit_last_removes()
        self.wait()
        self._linked_by.clear()

    def wait(self) -> None:
        """Wait for all links and removes, also for those that a signal handler adds meanwhile."""
        while (newest := self._newest_key) is not None:
            ordered.wait_for_saves_of_key(newest)
            if self._newest_key is newest:
                self._newest_key = None

    def _make_link(self, target: CheckpointPath, link: CheckpointPath) -> bool:
        try:
            return make_link(target.name, link.name, durable=self._durable)
        except Exception as error:  # raised later, on the training thread
            self._failed(link.name, error.with_traceback(None))
            return False

    def _is_needed(self, file: CheckpointPath) -> bool:
        """Return whether a link or a logger still needs the file."""
        return file in self.links.values() or any(
            each.target == file for each in list(self.publications)
        )

    def _submit_remove(self, file: CheckpointPath) -> None:
        """Submit the remove of a file if it is in `to_remove`."""
        try:
            del self.to_remove[file]  # atomic, so only one caller goes on
        except KeyError:
            return
        key = file.key()
        link = self._linked_by.pop(file, None)
        # Called when the remove is at the head of the log. If it returns True, the file is kept.
        is_needed = None if link is None else functools.partial(points_to, link.name, file.name)
        wrapped_io = self._remover_of(file)
        if wrapped_io is None and is_needed is None:
            remove(file.name)
        else:
            if wrapped_io is not None:
                submit = functools.partial(wrapped_io.remove, file.name, key, is_needed)
            else:
                submit = functools.partial(
                    ordered.submit_remove, file.name, key, remove_tree, is_needed
                )
            # True: the file is still to be uploaded, and the upload will call `submit`.
            is_postponed = uploads.postpone_remove(key, submit)
            if not is_postponed:
                submit()
        self._newest_key = key

    def _call_and_dequeue(self, publication: DurableSaveCallback) -> None:
        """Make the call of a publication, then take the publication off the list. Until then, its
        file is not removed."""
        try:
            publication.call_once_if_saved()
        finally:
            with contextlib.suppress(ValueError):  # a signal handler has taken it off already
                self.publications.remove(publication)


def append_failed_save_entry(path: Any) -> None:
    """Add an entry for a failed save to the log. The log then drops removes until a save
    succeeds."""
    try:
        name = CheckpointPath.of(path).key()
    except (TypeError, ValueError):  # not a path
        name = repr(path).encode(errors="replace")
    ordered.submit(name, _core.WORK_SAVE, lambda _after_good: False)  # False: it has failed


def make_link(target: str, path: str, *, durable: bool) -> bool:
    """Make `path` a relative link to `target`.

    Args:
        durable: Sync the directory of the link. A copy instead of a link is synced too.

    Returns:
        False, after a warning, if the target does not exist.

    Raises:
        SaveError: The link could not be made (phase "link"). An older link is still there.
    """
    if not os.path.exists(target):
        log.warning(
            "stillframe: %s was not linked to %s: that checkpoint did not become durable",
            path,
            target,
        )
        return False
    directory, name = os.path.split(path)
    # The same name each time, so that a file left by a killed process is replaced.
    temporary = os.path.join(directory, f".{name}.stillframe-link")
    try:
        _remove(temporary)
        copied = _link_or_copy(target, temporary, directory)
        if copied and durable:
            paths.sync_file(temporary)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)  # a name that is a directory cannot be replaced
        os.replace(temporary, path)
        if durable:
            paths.sync_directory(directory or ".")
    except OSError as error:
        raise SaveError(error.errno or errno.EIO, str(error), path, "link") from error
    return True


def points_to(link: str, target: str) -> bool:
    """Return whether `link` is a symbolic link to the normal absolute path `target`."""
    try:
        destination = os.readlink(link)
    except OSError:
        return False
    return os.path.normpath(os.path.join(os.path.dirname(link), destination)) == target


def remove_tree(path: str) -> None:
    """Remove a file, a link or a directory tree; a missing name is not an error."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        _remove(path)


def _link_or_copy(target: str, path: str, directory: str) -> bool:
    """Make a link, or a copy if links are not supported; return whether it is a copy."""
    try:
        os.symlink(os.path.relpath(target, directory or "."), path)
    except OSError as error:
        if error.errno not in _NO_LINKS or os.path.isdir(target):
            raise  # a copy would not help, or would be a copy of a directory
        log.warning("stillframe: %s is copied, as %s has no symbolic links", target, directory)
        shutil.copy(target, path)
        return True
    return False


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
