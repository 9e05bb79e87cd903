"""Reading a checkpoint back: is it whole, and then torch.load on the same open file."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from stillframe import _core
from stillframe._base import paths
from stillframe._base.calls import no_collection
from stillframe._save import ordered
from stillframe.errors import CorruptCheckpointError

Path: TypeAlias = str | os.PathLike[str]
MapLocation: TypeAlias = (
    Callable[[Any, str], Any] | torch.device | str | dict[str, str] | None  # as torch.load
)


def load(
    path: Path,
    map_location: MapLocation = None,
    *,
    weights_only: bool = True,
    verify: bool = False,
) -> Any:
    """Loads what `async_save`, `save` or `torch.save` wrote to `path`.

    Waits for the saves and removes of the path that were submitted before. The structure of the
    file is always checked: its directory first, so one that is truncated or no checkpoint at all is
    refused before anything of it is unpickled; the headers of its records, which torch reads one by
    one, then too, or afterwards where they lie far apart. Files of torch.save's legacy format have
    nothing to check and go straight to `torch.load`.

    Args:
        path: A local file. A symbolic link is followed.
        map_location: As for `torch.load`.
        weights_only: As for `torch.load`; `False` runs whatever code the file's pickle names.
        verify: Reads the file once more and compares the CRC of every record first.

    Returns:
        The saved object. Its tensors own their memory: the file may be replaced or removed.

    Raises:
        CorruptCheckpointError: The file is empty, truncated, damaged or no checkpoint.
        FileNotFoundError, IsADirectoryError, PermissionError, OSError: It cannot be read.
        TypeError, ValueError: `path` is no path, or names a remote place (`scheme://`).
        Everything else that `torch.load` raises comes through unchanged.
    """
    text = paths.as_text(path)
    fd = _open(text)
    try:
        return _load_fd(fd, text, map_location, weights_only=weights_only, verify=verify)
    finally:
        os.close(fd)


def _open(path: str) -> int:
    """A descriptor of what `path` is once earlier saves and removes of it have ended."""
    return ordered.open_in_order(path)


def _load_fd(
    fd: int, path: str, map_location: MapLocation, *, weights_only: bool, verify: bool
) -> Any:
    """Checks and loads an open file, which stays the caller's; `path` is for messages.

    One open file for the checks and the load: a save that replaces the path in between changes
    nothing here. A look at headers that lie apart would take a cold file's readahead away.
    """
    found = check_fd(fd, path, verify=verify, later=not verify)
    if found["format"] != "archive":
        with os.fdopen(os.dup(fd), "rb") as file:
            file.seek(0)
            return _torch_load(file, map_location, weights_only)
    try:
        # torch.load reads through a Python object whether it is given a path or not.
        loaded = _torch_load(_core.File(fd, found["nbytes"]), map_location, weights_only)
    except Exception as error:
        try:
            check_fd(fd, path, verify=False)
        except CorruptCheckpointError as corrupt:
            raise corrupt from error
        raise
    if not found["headers"]:
        check_fd(fd, path, verify=False)
    return loaded


def _torch_load(file: Any, map_location: MapLocation, weights_only: bool) -> Any:
    # torch's configuration may make mmap the default: such tensors would die with the file.
    # Collecting garbage is an eighth of a load of many thousand tensors.
    with no_collection():
        return torch.load(file, map_location=map_location, weights_only=weights_only, mmap=False)


def check_fd(fd: int, path: str, *, verify: bool, later: bool = False) -> dict[str, Any]:
    """Raises CorruptCheckpointError unless the open file is a whole checkpoint; returns what
    `_core.check` found. With `later`, the headers of records that are long may be left for later.

    Raises:
        OSError: It cannot be read; a directory is an IsADirectoryError. `path` is its filename.
    """
    try:
        found = _core.check(fd, verify, later=later)
    except OSError as error:
        number = error.errno or errno.EIO
        raise OSError(number, os.strerror(number), path) from None
    if not found["ok"]:
        more = found["num_bad"] - 1
        rest = f" (and {more} more {'record' if more == 1 else 'records'})" if more > 0 else ""
        raise CorruptCheckpointError(f"{path} cannot be loaded: {found['error']}{rest}")
    return found
