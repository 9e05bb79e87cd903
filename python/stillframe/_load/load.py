"""`load`: reading a checkpoint back, after a check that it is whole."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeAlias, cast

import torch
from torch import Tensor

from stillframe import _core
from stillframe._base import bar, cpus, looks, paths, records
from stillframe._base.arguments import refuse_unclear
from stillframe._base.calls import no_collection
from stillframe._base.records import Failure, RestoreFailed
from stillframe._load import placement, restore
from stillframe._load.fill import Fill
from stillframe._load.into import WAS_FREED, Plan, copy, match
from stillframe._save import ordered
from stillframe._tree import keypaths
from stillframe._watch import gate
from stillframe.errors import CorruptCheckpointError, StillframeError

_PACKED = "another program packed it"
_LACKING = re.compile(r"failed locating file (\S+?)(?: in archive|: file not found)")
_logger = logging.getLogger("stillframe")

Path: TypeAlias = str | os.PathLike[str]
MapLocation: TypeAlias = (
    Callable[[Any, str], Any] | torch.device | str | dict[str, str] | None  # as torch.load
)


@dataclass(frozen=True, slots=True)
class _How:
    """The arguments of a load; as for `load`."""

    path: str  # for messages
    map_location: MapLocation
    weights_only: bool | None
    verify: bool
    shared: bool

    @property
    def runs_code(self) -> bool:
        """Whether code that the pickle names is run. None, torch.load's default, runs none."""
        return self.weights_only is not None and not self.weights_only

    def open(self, fd: int) -> tuple[dict[str, Any], _core.Restore | None]:
        """Call `_core.restore`; an OSError gets the file's name."""
        with _named(self.path):
            return _core.restore(fd, self.verify, self.shared)

    def open_again(self, fd: int) -> _core.Restore:
        """Open a file for which `open` has returned a restore before."""
        return cast("_core.Restore", self.open(fd)[1])


def load(
    path: Path,
    map_location: MapLocation = None,
    *,
    weights_only: bool | None = True,
    verify: bool = True,
    into: Any = None,
    mmap: bool = False,
    shared: bool = False,
) -> Any:
    """Load what `async_save`, `save` or `torch.save` wrote to `path`.

    This waits for the saves and removes of the path that were submitted before. The file's
    structure is always checked first, so a file that is truncated, or is not a checkpoint, is
    refused before anything in it is unpickled. Then threads read the records, in file order, and
    compare their CRCs, while torch's own unpickler reads the pickle. It gets no bytes that were not
    checked.

    Files in torch.save's legacy format have no checksums and go straight to `torch.load`.
    TorchScript files and archives packed by other programs are checked, and then go there too.

    Args:
        path: A local file. A symbolic link is followed.
        map_location: As for `torch.load`.
        weights_only: As for `torch.load`; `False` runs whatever code the file's pickle names.
        verify: Compare the CRC of every record. With False, damaged bytes are loaded as they are.
        into: What to fill in place of returning a new object: a tensor, an object with `state_dict`
            and `load_state_dict`, or dictionaries, lists and tuples of them at any depth. All of it
            must be in the file; the rest of the file is ignored. Nothing is written until all of it
            is known to fit. Saves under way copy what they need first.

            - Tensors get the file's bytes straight into their memory, on any device and with any
              strides. Shapes and types must be the file's.
            - Modules get their parameters and buffers filled, without a second copy. Keys must
              be the file's. Where `load_state_dict` would do more than copy (hooks, methods of
              a subclass, other types), it is called with the loaded dictionary.
            - Optimizers get the tensors of their state filled. An optimizer without state gets new
              memory for it. Its `load_state_dict` is called in both cases.
            - Other objects (schedulers, scalers, your own) have `load_state_dict` called with their
              part of the file, on the CPU and in new memory.
            - Other values in dictionaries and lists are replaced by the file's. Values in a tuple
              that also holds tensors stay.

            Where the file has tensors that wrap others (quantized ones, DTensors), or targets share
            memory that different bytes of it go to, all of it is loaded into memory first, and
            copied in the order of `into`.
        mmap: As for `torch.load`: storages on the CPU are the file's pages, read when used and
            copied when written to. The file may be replaced or removed (as saves do), but must not
            be modified. With `verify`, every byte is read and checked first, which leaves the file
            in the page cache; with `verify=False` bytes are read when used, unchecked. Such tensors
            cannot be resized.
        shared: Other processes on this machine load the file at about the same time, as the ranks
            of a training do. It is read through the page cache, so the disk reads it only once.

    A load that takes more than a second shows a progress bar if stderr is a terminal.

    Returns:
        The saved object, or `into`. Its tensors own their memory, except with `mmap`.

    Raises:
        CorruptCheckpointError: The file is empty, truncated, damaged or not a checkpoint.
        FileNotFoundError, IsADirectoryError, PermissionError, OSError: It cannot be read.
        TypeError, ValueError: `path` is not a path, or is a remote one (`scheme://`); `into` does
            not fit or holds what cannot be filled (the error names the path in the tree, and
            nothing has been written); `into` is given together with `map_location` or `mmap`;
            `mmap` of a file that another program packed.
        StillframeError: The bytes could not be copied to a device.
        RuntimeError: A tensor's memory was freed or shrunk when it was saved.
        Exception: Whatever else `torch.load` raises, unchanged. Likewise what a `load_state_dict`
            raises, with a note that `into` is partly filled.
    """
    text = paths.as_text(path)
    refuse_unclear(verify=verify, shared=shared)
    cpus.spread()
    if into is not None and map_location is not None:
        raise ValueError("with into= the tensors are where they are: leave map_location out")
    if into is not None and mmap:
        raise ValueError("with into= the tensors have their memory: leave mmap out")
    if into is not None and restore.reads_no_bytes():
        raise ValueError(
            "with into= the file's bytes are read: not inside FakeTensorMode or"
            " torch.serialization.skip_data"
        )
    how = _How(text, map_location, weights_only, verify, shared)
    opened = _open(text)
    try:
        fd = opened.fileno()
        # Garbage collection takes an eighth of a load of many thousand tensors.
        with no_collection():
            if into is not None:
                return _load_into(fd, into, how)
            return _load_mapped(fd, how) if mmap else _load_fd(fd, how)
    finally:
        opened.close()


def _open(path: str) -> _core.LogLoad:
    """Open `path` once earlier saves and removes of it have ended."""
    return ordered.open_in_order(path)


def _load_fd(fd: int, how: _How) -> Any:
    """Check and load an open file, which stays the caller's.

    Checks and load use the same open file, so a save that replaces the path in between changes
    nothing here.
    """
    found, core = how.open(fd)
    if found["format"] == "foreign" and (words := looks.like(fd, how.path)) is not None:
        found["error"] = f"it is not a torch.save file; it looks like {words}"
    _refuse_damaged(found, how.path)
    why: str | None = _PACKED if found["format"] == "archive" else "it is in the legacy format"
    core, why = _usable(core, how.map_location, why)
    if core is not None:
        devices: dict[int, torch.device] = {}
        if placement.may_find(how.map_location):
            devices = placement.find(how.open_again(fd), how.map_location)
        archive = restore.open_archive(core, fd, found["nbytes"], how.map_location, devices)
        try:
            with bar.watched(core.done, how.path, found["nbytes"]):
                return archive.load(how.map_location, not how.runs_code)
        except RestoreFailed:
            if not _is_for_torch(archive.failure):
                _raise_failure(archive.failure, fd, how)
            why = _PACKED
        except restore.Missing as missing:
            raise _lacks(str(missing), fd, how) from None
        except restore.CutShort as short:
            names = _tensors_in(fd, how, str(short))
            raise RuntimeError(
                f"{how.path} cannot be loaded: record {short} is too short for what is in"
                f" it{names}; {WAS_FREED}"
            ) from None
        except pickle.UnpicklingError:
            if how.runs_code:
                raise
            why = "torch.load refuses it, and says how to go on"
    _logger.debug("%s goes to torch.load: %s", how.path, why)
    return _load_generally(fd, how)


def _usable(
    core: _core.Restore | None, map_location: MapLocation, why: str | None
) -> tuple[_core.Restore | None, str | None]:
    """Return the restore if it can read the archive; otherwise close it and return why it
    cannot."""
    if core is None:
        return None, why
    why = restore.can(core, map_location)
    if why is None:
        return core, None
    core.close()
    return None, why


def _load_into(fd: int, into: Any, how: _How) -> Any:
    """Check and load an open file, like `_load_fd`, into the tensors of `into`."""
    found, core = how.open(fd)
    _refuse_damaged(found, how.path)
    core, why = _usable(core, None, "it is no archive of torch's")
    if core is not None:
        ahead = _plan_ahead(core, into, how)
        if ahead is not None:
            gate.wait()  # saves may still copy out of these tensors
            if _fill(*ahead, fd, how, found["nbytes"]):
                return into
        why = "its pickle or its layout is for torch to read"
    _logger.debug("%s goes to its targets by way of a second copy: %s", how.path, why)
    plan = match(into, _load_fd(fd, replace(how, map_location="cpu")))
    plan.refuse_problems()
    gate.wait()  # as above
    copy(plan)
    return into


def _fill(plan: Plan, new: list[Tensor], fd: int, how: _How, nbytes: int) -> bool:
    """Read the records of a file straight to their targets.

    Args:
        nbytes: The file's length.

    Returns:
        False when another program packed the file, so that torch has to read it. The targets may
        be half written then; values are not set.

    Raises:
        CorruptCheckpointError, OSError, StillframeError: The targets are half written.
    """
    core = how.open_again(fd)
    fill = Fill(core, plan, new)
    try:
        with bar.watched(core.done, how.path, nbytes):
            fill.run()
    except RestoreFailed:
        if not _is_for_torch(fill.failure):
            _raise_failure(fill.failure, fd, how, "; what into= names is half written")
        return False
    return True


def _plan_ahead(core: _core.Restore, into: Any, how: _How) -> tuple[Plan, list[Tensor]] | None:
    """Find what goes where by the shapes in the file, without reading any tensor's bytes.

    Returns:
        The plan and its `new_tensors`. None where the pickle cannot be read ahead, or does not tell
        where the bytes are. The general road reports what is wrong with such a pickle.

    Raises:
        ValueError: Something does not fit.
    """
    shapes = restore.Shapes(core)
    try:
        found = shapes.load(not how.runs_code)
    except Exception as error:
        _logger.debug("the pickle of %s cannot be read ahead: %r", how.path, error)
        return None
    plan = match(into, found)
    plan.refuse_short(shapes.sizes)
    new = plan.new_tensors(shapes.sizes)
    return None if new is None else (plan, new)


def _load_mapped(fd: int, how: _How) -> Any:
    """Load by torch.load, with storages that are pages of the file."""
    found, core = how.open(fd)
    if core is not None:
        core.close()
    _refuse_damaged(found, how.path)
    if found["format"] == "archive" and core is None:
        raise ValueError(f"{how.path} cannot be mapped: {_PACKED}; load it without mmap=True")
    check_fd(fd, how.path, verify=how.verify)
    # This names the open file; `path` may name another one by now.
    return _torch_load(f"/proc/self/fd/{fd}", how, mmap=True)


def _load_generally(fd: int, how: _How) -> Any:
    """Load by torch.load, after a check that reads the file once more if CRCs are to be compared.

    Reading headers that are far apart would disable the readahead of a cold file. So a check
    without CRCs reads the headers after the load.
    """
    found = check_fd(fd, how.path, verify=how.verify, later=not how.verify)
    if found["format"] != "archive":
        with os.fdopen(os.dup(fd), "rb") as file:
            file.seek(0)
            return _torch_load(file, how)
    try:
        # torch.load reads through a Python object in any case, even when it is given a path.
        loaded = _torch_load(_core.File(fd, found["nbytes"]), how)
    except Exception as error:
        try:
            check_fd(fd, how.path, verify=False)
        except CorruptCheckpointError as corrupt:
            raise corrupt from error
        raise
    if not found["headers"]:
        check_fd(fd, how.path, verify=False)
    return loaded


def _torch_load(file: Any, how: _How, *, mmap: bool = False) -> Any:
    # torch's configuration may make mmap the default, and such tensors depend on the file.
    try:
        return torch.load(file, how.map_location, weights_only=how.weights_only, mmap=mmap)
    except RuntimeError as error:
        if (name := _LACKING.search(str(error))) is None:
            raise
        raise CorruptCheckpointError(
            f"{how.path} cannot be loaded: record {name[1]} is missing"
        ) from error


# ---- errors ----


def _is_for_torch(failure: Failure | None) -> bool:
    """Return whether a restore ended because torch has to read the archive, not because of a
    fault."""
    return failure is not None and failure.code == -errno.EOPNOTSUPP


def _lacks(record: str, fd: int, how: _How) -> CorruptCheckpointError:
    names = _tensors_in(fd, how, record)
    return CorruptCheckpointError(f"{how.path} cannot be loaded: record {record} is missing{names}")


def _raise_failure(failure: Failure | None, fd: int, how: _How, more: str = "") -> NoReturn:
    """Raise the error that ended a restore.

    Args:
        more: A clause with anything else the user has to know.
    """
    assert failure is not None
    if failure.code == _core.ECORRUPT:
        more = f" (at byte {failure.offset}{_tensors_in(fd, how, failure.record)}){more}"
        try:
            # The check covers the whole file and uses the words of `verify`.
            check_fd(fd, how.path, verify=how.verify)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{error}{more}") from None
        raise CorruptCheckpointError(
            f"{how.path} cannot be loaded: record {failure.record}: {failure.reason}{more}; read"
            " again, it is right: the disk or the memory is not to be trusted"
        )
    if failure.reason is not None:
        raise StillframeError(f"{how.path} cannot be loaded: {failure.reason}{more}")
    where = f"record {failure.record}, at byte {failure.offset}"
    raise OSError(-failure.code, f"{os.strerror(-failure.code)} ({where}){more}", how.path)


def _tensors_in(fd: int, how: _How, record: str) -> str:
    """Return words that name the tensors in a record, or ""."""
    folder, _, key = record.partition("/")
    if folder != "data":
        return ""
    try:
        core = how.open_again(fd)
        try:
            (pickled,) = records.read(core, ("data.pkl",))
        finally:
            core.close()
        names = keypaths.of_storage(pickled, key)
    except Exception:  # a foreign pickle may raise anything; the names only help
        return ""
    return f": {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}" if names else ""


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Add the file's name to an OSError that is raised inside."""
    try:
        yield
    except OSError as error:
        number = error.errno or errno.EIO
        reason = os.strerror(number)
        if number == errno.EISDIR:
            reason = f"{reason}: it is {looks.directory(path)}"
        raise OSError(number, reason, path) from None


def _refuse_damaged(found: dict[str, Any], path: str) -> None:
    if not found["ok"]:
        more = found["num_bad"] - 1
        rest = f" (and {more} more {'record' if more == 1 else 'records'})" if more > 0 else ""
        raise CorruptCheckpointError(f"{path} cannot be loaded: {found['error']}{rest}")


def check_fd(fd: int, path: str, *, verify: bool, later: bool = False) -> dict[str, Any]:
    """Check that the open file is a whole checkpoint; return what `_core.check` found.

    Args:
        later: The check may skip the headers of long records, for the caller to check later.

    Raises:
        CorruptCheckpointError: The file is damaged.
        OSError: It cannot be read; a directory is an IsADirectoryError. `path` is its filename.
    """
    with _named(path):
        found = _core.check(fd, verify, later=later)
    _refuse_damaged(found, path)
    return found
