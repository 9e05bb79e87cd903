"""A checkpoint's directory: what its files are called, and the one rename that makes a checkpoint.

    __0_0.3fa9c2d1.distcp   data of rank 0, of the save 3fa9c2d1
    __1_0.77b0e41a.distcp   each rank names its own
    .metadata               names the data files of the checkpoint that the directory holds

No data file ever takes the place of another, so none is missing while the old .metadata stands, and
all are there, and synced, before the new one takes its place. Its rename is the only commit. What
it does not name goes afterwards: the old checkpoint's files, and those of saves that died.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pickle
import re
import uuid
from collections.abc import Iterable

from torch.distributed.checkpoint.metadata import Metadata

from stillframe._base import steps

log = logging.getLogger("stillframe")

SUFFIX = ".distcp"

_DATA = re.compile(r"__(\d+)_\d+(\.[0-9a-f]+)?\.distcp")
_TEMPORARY = re.compile(r"(__\d+)?\.metadata\.[0-9a-f]+\.tmp")


@dataclasses.dataclass
class New:
    """A checkpoint that is to be committed; its metadata stands beside the name it is to have."""

    metadata: Metadata
    path: str
    temporary: str


def new_id() -> int:
    """Of the files of one rank's part of a save."""
    return uuid.uuid4().int >> 96


def id_text(files_id: int) -> str:
    return f"{files_id:08x}"


def data_name(prefix: str, number: int, files_id: int) -> str:
    return f"{prefix}{number}.{id_text(files_id)}{SUFFIX}"


def renamed(name: str, ids: dict[str, str]) -> str:
    """A data file's name, in a save that has other ids."""
    prefix, old, suffix = name.split(".")
    return f"{prefix}.{ids[old]}.{suffix}"


def metadata_path(directory: str, rank: int | None) -> str:
    """Of the checkpoint, or of what one rank has saved for itself."""
    return os.path.join(directory, ".metadata" if rank is None else f"__{rank}.metadata")


def write(
    metadata: Metadata, directory: str, rank: int | None, files_id: int, *, durable: bool
) -> New:
    """All of a commit that the data files need not be there for.

    Args:
        files_id: Of the data files of who commits.

    Raises:
        OSError: Nothing of it stays.
    """
    path = metadata_path(directory, rank)
    new = New(metadata, path, f"{path}.{id_text(files_id)}.tmp")
    wanted = [steps.write(new.temporary, pickle.dumps(metadata), durable=durable)]
    if durable:
        wanted.append(steps.sync(os.path.dirname(os.path.abspath(directory))))  # its entry there
    try:
        steps.take(wanted)
    except BaseException:
        discard(new)
        raise
    return new


def discard(new: New) -> None:
    """It will not be committed."""
    _remove([new.temporary])


def put_in_place(new: New, *, durable: bool) -> None:
    """The commit.

    Raises:
        OSError: The directory holds what it held before; or, where only syncing it failed, the new
            checkpoint, not known to be durable.
    """
    named = steps.rename(new.temporary, new.path)
    synced = steps.sync(os.path.dirname(new.path))
    # First the entries of the data files of all ranks.
    steps.take([synced, named, synced] if durable else [named])


def named_files(metadata: Metadata) -> set[str]:
    """The data files of a checkpoint, relative to its directory."""
    return {info.relative_path for info in (metadata.storage_data or {}).values()}


def remove_unnamed(metadata: Metadata, directory: str, rank: int | None) -> None:
    """Removes data files that the checkpoint does not name; of one rank only where it has saved for
    itself. An extra file does no harm: what cannot be removed is logged."""
    wanted = named_files(metadata)
    try:
        names = steps.names(directory)
    except OSError as error:
        log.warning("stillframe: what %s does not need was not removed: %s", directory, error)
        return
    _remove(
        os.path.join(directory, name) for name in names if name not in wanted and _is_of(name, rank)
    )


def _is_of(name: str, rank: int | None) -> bool:
    """Whether a file is one of a checkpoint's, or of one rank's that has saved for itself."""
    data = _DATA.fullmatch(name)
    if rank is not None:
        return data is not None and int(data[1]) == rank
    return data is not None or _TEMPORARY.fullmatch(name) is not None


def remove_files(paths: Iterable[str], directory: str) -> None:
    """Removes data files of a save that failed, but for those that the directory's checkpoint
    names: the last step of a commit may have been what failed."""
    try:
        with open(metadata_path(directory, None), "rb") as file:
            wanted = named_files(pickle.load(file))
    except FileNotFoundError:
        wanted = set()
    except Exception as error:  # nothing may go while nobody knows what is needed
        log.warning("stillframe: files of a failed save stay in %s: %s", directory, error)
        return
    _remove(path for path in paths if os.path.basename(path) not in wanted)


def remove_if_empty(directory: str) -> None:
    """What a save that failed has made, or other ranks of it."""
    with contextlib.suppress(OSError):
        os.rmdir(directory)


def _remove(paths: Iterable[str]) -> None:
    for error in steps.take_each([steps.unlink(path) for path in paths]):
        log.warning(
            "stillframe: %s is not needed and could not be removed: %s", error.filename, error
        )
