"""`latest`: finds the newest whole checkpoint in a directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, overload

from stillframe._base import urls
from stillframe._check import newest
from stillframe._remote import disk as disks
from stillframe._save import ordered


@overload
def latest(
    directory: os.PathLike[str],
    *,
    check: Literal["files", "bytes"] = "files",
    storage_options: Mapping[str, Any] | None = None,
) -> Path | None: ...


@overload
def latest(
    directory: str,
    *,
    check: Literal["files", "bytes"] = "files",
    storage_options: Mapping[str, Any] | None = None,
) -> Path | str | None: ...


def latest(
    directory: str | os.PathLike[str],
    *,
    check: Literal["files", "bytes"] = "files",
    storage_options: Mapping[str, Any] | None = None,
) -> Path | str | None:
    """Return the newest whole checkpoint in a directory, or None if there is none.

    These are checkpoints:

    - files of `torch.save`, `save`, `async_save` and Lightning, and `.safetensors` files;
    - directories of `torch.distributed.checkpoint`, and Lightning's sharded directories;
    - directories of the Hugging Face Trainer (`checkpoint-500`) and of Accelerate;
    - directories of other files, such as `step-500`, with a number in their names. In a store they
      must also have the marker that `checkpoint` writes last.

    A checkpoint that is truncated, unfinished or damaged is passed over, and a warning with the
    reason is logged. Subdirectories that are no checkpoints are not searched. The call waits for
    the saves and removes in the directory that were submitted before.

    Names that differ only in a step, in an epoch, or in their only number are a series. In a series
    the highest number is the newest. Between series, such as `last.ckpt` and
    `epoch=1-step=200.ckpt`, the modification times of their newest members decide.

    Args:
        directory: A directory or its URL (`s3://bucket/run`). If it is a checkpoint itself, it is
            the only candidate.
        check: "files" compares the lengths of the newest candidates' files with those that the
            files' headers give. A directory must have all files of its kind, of the same step.
            "bytes" also compares every CRC, as `stillframe verify` does. The safetensors format has
            no checksums.
        storage_options: As for `load`.

    Returns:
        The checkpoint's path, as a string if `directory` is a URL. None also for a URL under which
        there is nothing.

    Raises:
        FileNotFoundError, NotADirectoryError, PermissionError, OSError: The directory cannot be
            listed, or a store does not answer.
        TypeError, ValueError: `directory` is not a path; `check` is neither "files" nor "bytes";
            `storage_options` are wrong, or given with a local path.
        StillframeError: This was called inside a CheckpointIO that stillframe wraps.
    """
    if check not in ("files", "bytes"):
        raise ValueError(f"check has to be 'files' or 'bytes', not {check!r}")
    disk, text = disks.resolve_disk_and_path(directory, storage_options)
    with disk:
        if disk.is_remote:
            # The slash stands for everything below the URL.
            ordered.wait_for_saves_of_key(urls.key(text).rstrip(b"/") + b"/")
        else:
            ordered.wait_for_saves_in_directory(text)
        newest_path = newest.find(text, thorough=check == "bytes", disk=disk)
    return newest_path if newest_path is None or disk.is_remote else Path(newest_path)
