"""A second file in a checkpoint's directory, committed together with it: Lightning's `meta.pt`.

Lightning recognises a checkpoint by its `meta.pt` and finds the tensors through `.metadata`. Two
names cannot change in one step. So `meta.pt` is only a link to a file with the save's id:

    .metadata           contains the id of the save
    meta.ID.pt          the file of that save; written and synced before .metadata is renamed
    meta.pt             a hard link to this file (a copy if the file system has no links)

In a directory without a checkpoint, the link is made before the commit. Otherwise the old link is
removed before the commit, and the new one is made after it. A reader of `meta.pt` then finds the
old checkpoint, the new one, or for a moment none, but no mixture. If the process dies in between,
`mend` makes the link.
"""

from __future__ import annotations

import contextlib
import filecmp
import logging
import os
import pickle
import re
import shutil
from collections.abc import Callable
from typing import Any

import torch

from stillframe._base.paths import sync_directory
from stillframe._dcp.checkpoint import metadata_path

log = logging.getLogger("stillframe")

_SAVE_ID = (
    r"None|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"  # a uuid; "None" if the metadata has no id
)


class SideFile:
    """One save's second file.

    Args:
        name: The link's name, such as "meta.pt".
        content: The object that `torch.save` writes: first the caller's object, later its copy.
    """

    def __init__(self, name: str, content: Any) -> None:
        self.name = name
        self.content = content

    def commit(
        self, directory: str, save_id: str, commit_metadata: Callable[[], None], *, durable: bool
    ) -> None:
        """Write this file, call `commit_metadata()`, and make the link.

        Raises:
            OSError, Exception: `commit_metadata` or writing failed. The directory holds the old
                checkpoint, or the new one, which then may not be durable.
        """
        saved_file = _build_side_file_path(directory, self.name, save_id)
        link = os.path.join(directory, self.name)
        try:
            _write(self.content, saved_file, durable=durable)
            if os.path.exists(metadata_path(directory, None)):
                # A link to the new file must not be there with the old checkpoint.
                _remove_link(directory, self.name)
            else:
                _make_link(saved_file, link)
            commit_metadata()
            # This does nothing if the link was made above.
            _make_link(saved_file, link)
            if durable:
                sync_directory(directory)
        except BaseException:
            try:
                self._undo_failed_commit(directory, saved_file, link, save_id)
            except Exception as error:  # the first error is the one to raise
                log.warning("stillframe: %s is left as it is: %s", link, error)
            raise
        for other in _list_side_file_paths(directory, self.name):  # of earlier saves
            if other != saved_file:
                with contextlib.suppress(OSError):
                    os.unlink(other)

    def _undo_failed_commit(self, directory: str, saved_file: str, link: str, save_id: str) -> None:
        """Remove this save's file and link, unless this save was committed. Then make the link for
        the checkpoint that is in the directory."""
        if _read_save_id(directory) != save_id:
            to_remove = (
                [link, saved_file] if _has_same_file_content(saved_file, link) else [saved_file]
            )
            for path in to_remove:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
        mend(directory, self.name)


def mend(directory: str, name: str) -> None:
    """Make the link again if a process died between the commit and the making of the link."""
    link = os.path.join(directory, name)
    saved_files = _list_side_file_paths(directory, name)
    is_intact = len(saved_files) == 1 and _has_same_file_content(saved_files[0], link)
    if not saved_files or is_intact:
        return
    saved_file = _build_side_file_path(directory, name, _read_save_id(directory))
    if saved_file in saved_files and not _has_same_file_content(saved_file, link):
        log.warning("stillframe: %s is made anew: a save into its directory was interrupted", link)
        _make_link(saved_file, link)


def _build_side_file_path(directory: str, name: str, save_id: str | None) -> str:
    """Return the path of a save's file, such as `meta.ID.pt`."""
    stem, suffix = os.path.splitext(name)
    return os.path.join(directory, f"{stem}.{save_id}{suffix}")


def _list_side_file_paths(directory: str, name: str) -> list[str]:
    """Return the paths of the files of all saves. Only names of exactly this form count, because a
    caller removes the files."""
    stem, suffix = map(re.escape, os.path.splitext(name))
    of_save = re.compile(rf"{stem}\.({_SAVE_ID}){suffix}")
    return [
        os.path.join(directory, each) for each in os.listdir(directory) if of_save.fullmatch(each)
    ]


def _read_save_id(directory: str) -> str | None:
    """Return the id of the save whose checkpoint is in the directory; None if it is unknown."""
    try:
        with open(metadata_path(directory, None), "rb") as file:
            save_id = pickle.load(file).storage_meta.save_id
    except Exception:  # there is no checkpoint, or a damaged one
        return None
    return None if save_id is None else str(save_id)


def _remove_link(directory: str, name: str) -> None:
    """Remove the link, and keep its file under the name with the save's id."""
    link = os.path.join(directory, name)
    if not os.path.exists(link):
        return
    if any(os.path.samefile(each, link) for each in _list_side_file_paths(directory, name)):
        os.unlink(link)
    else:  # the link is a file: Lightning wrote it, or `_make_link` had to copy
        os.replace(link, _build_side_file_path(directory, name, _read_save_id(directory)))


def _write(content: Any, path: str, *, durable: bool) -> None:
    with open(path, "xb") as file:
        torch.save(content, file)
        file.flush()
        if durable:
            os.fsync(file.fileno())


def _make_link(saved_file: str, link: str) -> None:
    """Replace `link` by a hard link to `saved_file`, or by a copy of it."""
    if _has_same_file_content(saved_file, link):
        return
    temporary = os.path.join(os.path.dirname(link), f".{os.path.basename(link)}.stillframe")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    try:
        os.link(saved_file, temporary)
    except OSError:  # a file system without links
        shutil.copyfile(saved_file, temporary)
    os.replace(temporary, link)


def _has_same_file_content(one: str, other: str) -> bool:
    """Return whether two paths name one file, or files with the same bytes."""
    try:
        return os.path.samefile(one, other) or filecmp.cmp(one, other, shallow=False)
    except FileNotFoundError:
        return False
