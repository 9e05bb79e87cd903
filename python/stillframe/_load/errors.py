"""The arguments of a load, and the errors that end one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, cast

import torch

from stillframe import _core
from stillframe._base import file_kinds, records, safetensors, urls
from stillframe._base.disk import Disk, OpenFile
from stillframe._base.records import Failure, RestoreFailed
from stillframe._load import restore
from stillframe._load.into import WAS_FREED
from stillframe._save import ordered
from stillframe._tree import keypaths
from stillframe.errors import CorruptCheckpointError, StillframeError

# Parts of messages.
PACKED = "another program packed it"
HALF_WRITTEN = "what into= names is half written"

Path: TypeAlias = str | os.PathLike[str]
MapLocation: TypeAlias = (
    Callable[[Any, str], Any] | torch.device | str | dict[str, str] | None  # as torch.load
)


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of one load; `load` explains them."""

    path: str  # the name of the file on `disk`, also used in messages
    disk: Disk  # the local file system, or the store of a URL
    map_location: MapLocation
    weights_only: bool | None
    verify: bool
    shared: bool

    @property
    def runs_code(self) -> bool:
        """Whether the pickle may call any function. It may not if `weights_only` is None."""
        return self.weights_only is not None and not self.weights_only

    def open_file(self, path: str, *, peek: bool = False) -> AbstractContextManager[OpenFile]:
        """Wait for the saves of a path that were submitted before, and open the file. With `peek`,
        only a small part of the file is read at first."""
        if not self.disk.is_remote:
            return closing(ordered.open_after_earlier_saves(path))
        ordered.wait_for_saves_of_key(urls.key(path))
        if path.endswith(safetensors.INDEX_SUFFIX):
            # Wait for all saves to the directory ("/"), because the index names files in it.
            ordered.wait_for_saves_of_key(urls.key(os.path.dirname(path)) + b"/")
        return self.disk.open(path, peek=peek)

    def open(self, fd: int) -> tuple[dict[str, Any], _core.Restore | None]:
        """Check the archive's directory.

        Returns:
            - What the check found.
            - A restore of the records that has not begun. None if the core cannot find the records.
        """
        with add_path_to_os_errors(self.path):
            return _core.restore(fd, self.verify, self.shared)

    def open_second_restore(self, fd: int) -> _core.Restore:
        """Return a second restore of a file for which `open` has returned one."""
        return cast("_core.Restore", self.open(fd)[1])


class TorchMustReadError(Exception):
    """The error for an archive that only torch.load can read; the message says why."""


@contextmanager
def note_half_written_on_error() -> Iterator[None]:
    """Add a note to an exception of the block that the targets are half written. Add no note if the
    message says this already."""
    try:
        yield
    except BaseException as error:
        notes: list[str] = getattr(error, "__notes__", [])  # made by the first `add_note`
        if HALF_WRITTEN not in " ".join([str(error), *notes]):
            error.add_note(f"The load was under way: {HALF_WRITTEN}.")
        raise


@contextmanager
def translate_restore_errors(fd: int, request: Request, suffix: str = "") -> Iterator[None]:
    """Turn an exception of a restore in the block into an error for users, whose message ends with
    `suffix`. Raise TorchMustReadError if torch has to read the archive."""
    try:
        yield
    except RestoreFailed as failed:
        if failed.failure.code == -errno.EOPNOTSUPP:  # the records are not where torch puts them
            raise TorchMustReadError(PACKED) from None
        _raise_restore_failure(failed.failure, fd, request, suffix)
    except restore.Missing as missing:
        tensors = _describe_record_tensors(fd, request, str(missing))
        raise CorruptCheckpointError(
            f"{request.path} cannot be loaded: record {missing} is missing{tensors}{suffix}"
        ) from None
    except restore.RecordTooShortError as short:
        tensors = _describe_record_tensors(fd, request, str(short))
        raise RuntimeError(
            f"{request.path} cannot be loaded: record {short} is too short for what is in"
            f" it{tensors}; {WAS_FREED}"
        ) from None


def _raise_restore_failure(failure: Failure, fd: int, request: Request, suffix: str) -> NoReturn:
    """Raise the error for users about a record's failure. Its message ends with `suffix`."""
    if failure.code == _core.ECORRUPT:
        tensors = _describe_record_tensors(fd, request, failure.record)
        suffix = f" (at byte {failure.offset}{tensors}){suffix}"
        try:
            # Read the whole file again. A damaged file raises here.
            check_fd(fd, request.path, verify=request.verify)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{error}{suffix}") from None
        medium = "the connection" if request.disk.is_remote else "the disk"
        raise CorruptCheckpointError(
            f"{request.path} cannot be loaded: record {failure.record}: {failure.reason}{suffix};"
            f" read again, it is right: {medium} or the memory is not to be trusted"
        )
    if request.disk.is_remote:
        suffix = ""  # a note on the store's error, which replaces this error, says the same
    if failure.reason is not None:
        raise StillframeError(f"{request.path} cannot be loaded: {failure.reason}{suffix}")
    where = f"record {failure.record}, at byte {failure.offset}"
    raise OSError(-failure.code, f"{os.strerror(-failure.code)} ({where}){suffix}", request.path)


def _describe_record_tensors(fd: int, request: Request, record: str) -> str:
    """Return a part of a message that names the tensors in a record: ": a, b", or ""."""
    folder, _, key = record.partition("/")
    if folder != "data":
        return ""
    try:
        core = request.open_second_restore(fd)
        try:
            (pickled,) = records.read(core, ("data.pkl",))
        finally:
            core.close()
        names = keypaths.tensor_paths_over_storage(pickled, key)
    except Exception:  # a foreign pickle may raise anything; the message lacks the names then
        return ""
    if not names:
        return ""
    others = " and others" if len(names) > 3 else ""
    return f": {', '.join(names[:3])}{others}"


@contextmanager
def add_path_to_os_errors(path: str) -> Iterator[None]:
    """Replace an OSError of the block by an OSError that has the file's name."""
    try:
        yield
    except OSError as error:
        number = error.errno or errno.EIO
        reason = os.strerror(number)
        if number == errno.EISDIR:
            reason = f"{reason}: it is {file_kinds.describe_directory(path)}"
        raise OSError(number, reason, path) from None


def refuse_damaged(found: dict[str, Any], path: str) -> None:
    """Raise CorruptCheckpointError if `found`, the result of `_core.check`, is not ok."""
    if found["ok"]:
        return
    others = found["num_bad"] - 1  # the error names one record
    noun = "record" if others == 1 else "records"
    rest = f" (and {others} more {noun})" if others > 0 else ""
    raise CorruptCheckpointError(f"{path} cannot be loaded: {found['error']}{rest}")


def check_fd(fd: int, path: str, *, verify: bool, later: bool = False) -> dict[str, Any]:
    """Check that the open file is a whole checkpoint; return what `_core.check` found.

    Args:
        later: Do not read the headers of long records. If `headers` in the result is False, the
            caller has to check the headers later.

    Raises:
        CorruptCheckpointError: The file is damaged.
        OSError: The file cannot be read; for a directory, IsADirectoryError. The error's `filename`
            is `path`.
    """
    with add_path_to_os_errors(path):
        found = _core.check(fd, verify, later=later)
    refuse_damaged(found, path)
    return found
