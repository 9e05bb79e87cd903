"""Uploads to a mirror (`_remote/mirror.py`), as saves, removes, waits and the exit see them.

A remove of a file that is still to be uploaded is *postponed*. It is kept here and not in the log,
where later saves would wait for it.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from stillframe._base import paths, urls
from stillframe._remote import mirror as mirrors
from stillframe._remote.backlog import Backlog
from stillframe._remote.mirror import MirrorUpload

log = logging.getLogger("stillframe")

_URL = "'s3://bucket/run/'"  # an example for messages

# Functions that submit postponed removes, by the name in the log.
_postponed: dict[bytes, Callable[[], object]] = {}


def new_mirror_upload(
    path: object,
    mirror: object,
    storage_options: Mapping[str, Any] | None,
    *,
    durable: bool = True,
    follow_link: bool = True,
    create_parents: bool = False,
) -> MirrorUpload | None:
    """Return the upload that is to follow a save; None if `mirror` is None.

    Args:
        durable, follow_link, create_parents: As for the save, see `SaveOptions`.

    Raises:
        TypeError, ValueError: An argument makes no sense.
        StillframeError: No client for the store is installed.
    """
    if mirror is None:
        return None
    if not isinstance(mirror, str):
        raise TypeError(f"mirror has to be a URL such as {_URL}, not {type(mirror).__name__}")
    if "://" not in mirror:
        raise ValueError(f"mirror has to be a URL such as {_URL}, not {mirror!r}")
    if urls.is_remote(path):
        raise ValueError(f"{urls.shown(path)}: mirror= is for local paths")
    if storage_options is not None and not isinstance(storage_options, Mapping):
        raise TypeError(f"storage_options has to be a dict, not {type(storage_options).__name__}")
    local = os.fsdecode(paths.key(path, follow_link=follow_link))
    return MirrorUpload(
        local, mirror, storage_options, durable=durable, create_parents=create_parents
    )


def resume(mirror: object, storage_options: Mapping[str, Any] | None, *paths: object) -> None:
    """Upload the files that earlier processes have left in the directories of these checkpoints.

    Args:
        mirror: See `new_mirror_upload`; None does nothing.
        paths: The checkpoints; URLs are skipped.
    """
    for path in paths:
        if not urls.is_remote(path):
            upload = new_mirror_upload(path, mirror, storage_options)
            if upload is not None:
                upload.resume()


# ---- removes ----


def postpone_remove(key: bytes, submit: Callable[[], object], *, wait: bool = True) -> bool:
    """Have `submit()` called when nothing of this name is left to be uploaded.

    Return False if nothing is left now or `wait` is False: the caller submits the remove.

    Args:
        key: The path's name in the log.
        submit: Submits the remove of the path.
    """
    _postponed.pop(key, None)
    path = os.fsdecode(key)
    must_wait = wait and mirrors.uploader.is_used() and mirrors.uploader.has_uploads_at(path)
    if not must_wait:
        return False
    log.info("stillframe: %s is removed when it is uploaded", path)
    _postponed[key] = submit
    mirrors.uploader.call_when_uploaded(path, functools.partial(_submit_postponed_remove, key))
    return True


def _submit_postponed_remove(key: bytes) -> None:
    """Submit the postponed remove of a name, unless a save has dropped it."""
    submit = _postponed.pop(key, None)
    if submit is not None:
        try:
            submit()
        except Exception as error:
            log.warning("stillframe: %s could not be removed: %s", os.fsdecode(key), error)


def is_postponed(key: bytes) -> bool:
    """Return whether a remove of this name, or of a directory above it, is postponed."""
    return any(key == each or key.startswith(each + b"/") for each in list(_postponed))


def drop_postponed_removes(path: str) -> None:
    """Drop postponed removes of a path that is saved now, and of the directories above it."""
    if not _postponed:
        return
    parent, name = os.path.split(path)
    target = os.path.realpath(path)
    link = os.path.join(os.path.realpath(parent or "."), name)  # the same path if it is no link
    for text in (target, link):
        while len(text) > 1:  # up to the root
            _postponed.pop(os.fsencode(text), None)
            text = os.path.dirname(text)


# ---- waits and the exit ----


def wait(timeout: float | None) -> Backlog | None:
    """Wait until nothing is left to be uploaded. Return None, or after the timeout what is left."""
    return mirrors.uploader.wait(timeout)


def left() -> Backlog | None:
    """Return what is left to be uploaded, or None."""
    return mirrors.uploader.left()


def finish(quiet_s: float, say: Callable[[str], object]) -> None:
    """Upload what is due, as long as the stores answer. Drop and report the postponed removes.

    Args:
        quiet_s: Nothing is printed about a shorter wait, in seconds.
        say: Prints a line.
    """
    mirrors.uploader.finish(quiet_s, say)
    for key in list(_postponed):
        _postponed.pop(key, None)
        say(f"stillframe: {os.fsdecode(key)} was not removed: it is not uploaded yet")


def set_exit_deadline(until: float) -> None:
    """Have the exit wait for uploads at most until `until`, a value of time.monotonic()."""
    mirrors.uploader.exit_deadline_s = until


def give_up() -> None:
    """Break off the upload under way."""
    mirrors.uploader.give_up()


def _reset_in_forked_child() -> None:
    _postponed.clear()


os.register_at_fork(after_in_child=_reset_in_forked_child)
