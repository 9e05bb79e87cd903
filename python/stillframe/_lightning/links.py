"""Makes `last.ckpt` a symbolic link (`ModelCheckpoint(save_last="link")`), in the log's order.

A link is made when its target is on the disk, and replaces an older link with one rename. At no
moment is the name missing, or names a file that does not exist.

A remove of a link's target is delayed until the link is made again. If Ctrl-C came in between, the
entry finds that the link still names the file, and drops the remove. (`save_last=True` writes a
second file, because it contains its own `last_model_path` and so differs from the first.)
"""

from __future__ import annotations

import errno
import logging
import os
import shutil

from stillframe._base import paths
from stillframe.errors import SaveError

log = logging.getLogger("stillframe")

# File systems without symbolic links, and systems that reserve them.
_NO_LINKS = (errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.ENOSYS)


def make_link(target: str, path: str, *, durable: bool) -> bool:
    """Make `path` a relative link to `target`.

    Args:
        durable: Sync the directory of the link, and before that a copy made instead of a link.

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
    # One name for each link, so that the next process reuses what a killed one left.
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


def names(link: str, target: str) -> bool:
    """Return whether `link` is a link to `target`."""
    try:
        there = os.readlink(link)
    except OSError:
        return False
    return os.path.normpath(os.path.join(os.path.dirname(link), there)) == target


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
            raise
        log.warning("stillframe: %s is copied, as %s has no symbolic links", target, directory)
        shutil.copy(target, path)
        return True
    return False


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
