"""`load`: reading a checkpoint back, after a check that it is whole.

There are three ways to read a file:

    new memory   restore.py   The usual way: torch unpickles, and threads read ahead of it.
    in place     fill.py      For into=: the pickle is read first, into tensors that have no memory.
                              Then threads read the records into the targets.
    torch.load   below        For mmap=True and fake modes, and for files that the other two cannot
                              read: legacy format, TorchScript, archives of other programs.

A safetensors file has no pickle: flat.py reads its tensors into new memory or in place.

The pickle may not tell which bytes go to which target of into=. Then the file is loaded into new
memory, and copied from there to the targets.
"""

from __future__ import annotations

import logging
import os
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stillframe import _core
from stillframe._base import bar, cpus, file_kinds
from stillframe._base.arguments import check_booleans
from stillframe._base.calls import no_garbage_collection
from stillframe._base.disk import OpenFile
from stillframe._load import flat, placement, restore
from stillframe._load.errors import (
    HALF_WRITTEN,
    PACKED,
    MapLocation,
    Path,
    Request,
    TorchMustReadError,
    check_fd,
    note_half_written_on_error,
    refuse_damaged,
    translate_restore_errors,
)
from stillframe._load.fill import Fill
from stillframe._load.into import Plan, copy, match
from stillframe._remote import disk as disks
from stillframe._watch import gate
from stillframe.errors import CorruptCheckpointError

# The message of torch's reader about a record that the archive lacks.
_LACKING = re.compile(r"failed locating file (\S+?)(?: in archive|: file not found)")
_logger = logging.getLogger("stillframe")


def load(
    path: Path,
    map_location: MapLocation = None,
    *,
    weights_only: bool | None = True,
    verify: bool = True,
    into: Any = None,
    mmap: bool = False,
    shared: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Any:
    """Load what `async_save`, `save` or `torch.save` wrote to `path`, or a safetensors file.

    `load` waits for the saves and removes of the path or URL that were submitted before. It checks
    the file's structure before anything is unpickled, and refuses a file that is truncated or not a
    checkpoint. Then threads read the records and compare their CRCs, while torch's own unpickler
    reads the pickle. The unpickler gets only bytes that were checked.

    `torch.load` reads files in torch.save's legacy format, which has no checksums. After a check,
    it also reads TorchScript files and archives packed by other programs.

    A safetensors file, or an index of several (`model.safetensors.index.json`), gives a flat dict
    of tensors. The file's bytes tell the format, whatever its name is. The structure is checked as
    the safetensors library does. The format has neither checksums nor code, so `verify` and
    `weights_only` change nothing. If `into` is a module with tied weights, the file may have them
    under only one of their names.

    If a load ends with an error while it writes to `into`, the message or a note says that `into`
    is partly written.

    Args:
        path: A file of either format, or an index: a local path, whose symbolic links are followed,
            or a URL (`s3://`, `gs://`, `az://`, or any scheme of fsspec). From a store, the bytes
            go straight to the tensors. Besides the tensors, such a load takes about 200 MB of
            memory, whatever the object's size.
        map_location: As for `torch.load`.
        weights_only: As for `torch.load`; `False` runs whatever code the file's pickle names.
        verify: Compare the CRC of every record. With False, damaged bytes are loaded as they are.
        into: The object to fill, instead of returning a new object: a tensor, an object with
            `state_dict` and `load_state_dict`, or dictionaries, lists and tuples of them at any
            depth. All parts of `into` must be in the file; other parts of the file are ignored.
            Nothing is written until everything is known to fit. Saves under way copy their tensors
            first.

            - Tensors get the file's bytes straight into their memory, on any device and with any
              strides. Shapes and types must be those of the file.
            - Modules get their parameters and buffers filled, without a second copy. Keys must
              be those of the file. If `load_state_dict` would do more than copy (hooks, methods of
              a subclass, other types), it is called with the loaded dictionary instead.
            - Optimizers get the tensors of their state filled. An optimizer without state gets new
              memory for it. Its `load_state_dict` is called in both cases.
            - Other objects (schedulers, scalers, your own) have `load_state_dict` called with their
              part of the file, on the CPU and in new memory.
            - Other values in dictionaries and lists are replaced by the file's values. Values in a
              tuple that also holds tensors stay.

            In two cases the whole file is loaded into new memory first, and then copied in the
            order of `into`: the file has tensors that wrap others (quantized tensors, DTensors), or
            targets share memory and get different bytes of the file.
        mmap: As for `torch.load`: storages on the CPU are the file's pages, read when used and
            copied when written to. The file may be replaced or removed (as saves do), but must not
            be modified. With `verify`, every byte is read and checked first, which leaves the file
            in the page cache. With `verify=False`, bytes are read when used, unchecked. Such
            tensors cannot be resized. A remote object is fetched whole, and stays in memory.
        shared: Other processes on this machine load the file at about the same time, as the ranks
            of a training do. The disk then reads the file only once. Changes nothing for a URL.
        storage_options: Options of the store of a URL, such as credentials, under fsspec's names or
            obstore's. Options that are not given are taken from the environment.

    A load that takes more than a second shows a progress bar if stderr is a terminal.

    Returns:
        The saved object, or `into`. Its tensors own their memory, except with `mmap`.

    Raises:
        CorruptCheckpointError: The file is empty, truncated, damaged or not a checkpoint.
        FileNotFoundError, IsADirectoryError, PermissionError, OSError: The file cannot be read. For
            a URL the error names the range and the cause, for example that the object was replaced
            while it was read.
        TypeError, ValueError: An argument is wrong:

            - `path` is not a path.
            - `storage_options` are wrong, or given with a local path.
            - `into` does not fit, or holds objects that cannot be filled. The error names their
              paths in the tree. Nothing has been written.
            - `into` is given together with `map_location` or `mmap`.
            - `mmap` is given for a file that another program packed.
        StillframeError: The bytes could not be copied to a device, or this torch lacks a type of
            a safetensors file.
        RuntimeError: A tensor's memory was freed or shrunk when it was saved.
        Exception: Any other error of `torch.load`, unchanged. Errors of a `load_state_dict` have a
            note that `into` is partly filled.
    """
    check_booleans(verify=verify, shared=shared)
    cpus.spread()
    if into is not None and map_location is not None:
        raise ValueError("with into= the tensors are where they are: leave map_location out")
    if into is not None and mmap:
        raise ValueError("with into= the tensors have their memory: leave mmap out")
    if into is not None and restore.is_fake_or_skip_data_mode():
        raise ValueError(
            "with into= the file's bytes are read: not inside FakeTensorMode or"
            " torch.serialization.skip_data"
        )
    disk, text = disks.resolve_disk_and_path(path, storage_options)
    request = Request(text, disk, map_location, weights_only, verify, shared)
    with disk, request.open_file(text) as opened:
        fd = opened.fileno()
        # Garbage collection would take an eighth of a load of many thousand tensors.
        with no_garbage_collection():
            if flat.is_safetensors_or_index(fd, text):
                return _load_safetensors(opened, into, request, mmap=mmap)
            if into is not None:
                return _load_into(fd, into, request)
            if mmap:
                return _load_by_torch(fd, request, mmap=True)
            return _load_fd(fd, request)


def _open_records(fd: int, request: Request) -> tuple[int, _core.Restore | None, str]:
    """Check the directory of an open archive.

    Returns:
        - The file's length.
        - A restore of the file's records, or None if torch.load has to read the file.
        - Why torch.load has to read the file, if there is no restore.
    """
    facts, core = request.open(fd)  # `core` is the restore
    if facts["format"] == "foreign":  # neither an archive nor torch's legacy format
        likely_format = file_kinds.guess(fd, request.path)
        if likely_format is not None:
            facts["error"] = f"it is not a torch.save file; it looks like {likely_format}"
    refuse_damaged(facts, request.path)
    why_torch = PACKED if facts["format"] == "archive" else "it is in the legacy format"
    if core is not None:
        reason = restore.why_torch_must_read(core, request.map_location)
        if reason is not None:
            core.close()
            core, why_torch = None, reason
    return facts["nbytes"], core, why_torch


def _load_fd(fd: int, request: Request) -> Any:
    """Load an open file into new memory."""
    nbytes, core, why_torch = _open_records(fd, request)
    if core is not None:
        devices: dict[int, torch.device] = {}
        if placement.may_find_devices(request.map_location):
            devices = placement.find(request.open_second_restore(fd), request.map_location)
        archive = restore.open_archive(core, fd, nbytes, request.map_location, devices)
        try:
            with (
                bar.watched(core.done, request.path, nbytes),
                translate_restore_errors(fd, request),
            ):
                return archive.load(request.map_location, not request.runs_code)
        except TorchMustReadError as error:
            why_torch = str(error)
        except pickle.UnpicklingError:
            if request.runs_code:  # the error is not about code that is forbidden
                raise
            why_torch = "torch.load refuses it, and says how to go on"
    _logger.debug("%s goes to torch.load: %s", request.path, why_torch)
    return _load_by_torch(fd, request)


def _load_into(fd: int, into: Any, request: Request) -> Any:
    """Load an open file into the tensors and objects of `into`."""
    nbytes, core, why_torch = _open_records(fd, request)
    plan_and_new = None if core is None else _plan_from_pickle(core, into, request)
    if core is None:
        plan = _load_and_copy_into(fd, into, request, why_torch, _load_by_torch)
    elif plan_and_new is None:
        plan = _load_and_copy_into(
            fd, into, request, "its pickle does not tell what goes where", _load_fd
        )
    else:
        gate.wait()  # saves may still copy from the tensors of `into`
        with note_half_written_on_error():
            try:
                plan = _read_records_into_targets(*plan_and_new, fd, request, nbytes)
            except TorchMustReadError as error:
                plan = _load_and_copy_into(fd, into, request, str(error), _load_by_torch)
    plan.finish()
    return into


def _load_safetensors(opened: OpenFile, into: Any, request: Request, *, mmap: bool) -> Any:
    with flat.Files(opened, request) as files:
        if into is None:
            return files.mapped(request.map_location) if mmap else files.load(request.map_location)
        shapes, sizes = files.shapes()
        plan = match(into, flat.add_tied_tensor_names(shapes, into))
        plan.refuse_short_records(sizes)
        new = plan.new_tensors(sizes)
        if new is None:  # the bytes cannot go straight from the file to their targets

            def load_file(_fd: int, _request: Request) -> Any:
                return flat.add_tied_tensor_names(files.load("cpu"), into)

            why = "its targets share memory, or wrap tensors"
            plan = _load_and_copy_into(opened.fileno(), into, request, why, load_file)
        else:
            gate.wait()  # saves may still copy from the tensors of `into`
            with note_half_written_on_error():
                files.fill(plan, new)
    plan.finish()
    return into


def _read_records_into_targets(
    plan: Plan, new: list[Tensor], fd: int, request: Request, nbytes: int
) -> Plan:
    """Read the records of a file straight to their targets. Return the plan, whose `finish` the
    caller has to call. `new` is the plan's `new_tensors`."""
    core = request.open_second_restore(fd)
    with (
        bar.watched(core.done, request.path, nbytes),
        translate_restore_errors(fd, request, f"; {HALF_WRITTEN}"),
    ):
        Fill(core, plan, new).run()
    return plan


def _load_and_copy_into(
    fd: int, into: Any, request: Request, why: str, load_file: Callable[[int, Request], Any]
) -> Plan:
    """Load the file with `load_file` into new memory on the CPU, and copy from there to `into`.
    Return the plan, whose `finish` the caller has to call. `why` is the reason for the log."""
    _logger.debug("%s goes to its targets by way of a second copy: %s", request.path, why)
    plan = match(into, load_file(fd, replace(request, map_location="cpu")))
    plan.refuse_problems()
    gate.wait()  # saves may still copy from the tensors of `into`
    with note_half_written_on_error():
        copy(plan)
    return plan


def _plan_from_pickle(
    core: _core.Restore, into: Any, request: Request
) -> tuple[Plan, list[Tensor]] | None:
    """Find which record goes to which target from the file's pickle alone. Raise ValueError if
    something does not fit.

    Returns:
        The plan and its `new_tensors`. None if the pickle cannot be read in this way, or does not
        tell which bytes go where.
    """
    shapes = restore.Shapes(core)
    try:
        file_tree = shapes.load(not request.runs_code)
    except Exception as error:
        _logger.debug("the pickle of %s cannot be read ahead: %r", request.path, error)
        return None
    plan = match(into, file_tree)
    plan.refuse_short_records(shapes.sizes)
    new = plan.new_tensors(shapes.sizes)  # None: it is not known which bytes go where
    return None if new is None else (plan, new)


def _load_by_torch(fd: int, request: Request, *, mmap: bool = False) -> Any:
    """Load with torch.load, after a check of the file. With `mmap`, storages are the file's pages.

    A check without CRCs reads the headers of the records after the load. They are far apart, and
    reading them first would disable the kernel's readahead.
    """
    _core.arrive(fd)  # waits until all bytes of a remote object are here
    if mmap:
        facts, core = request.open(fd)
        if core is not None:
            core.close()
        refuse_damaged(facts, request.path)
        if facts["format"] == "archive" and core is None:
            raise ValueError(
                f"{request.path} cannot be mapped: {PACKED}; load it without mmap=True"
            )
    checks_headers_later = not (request.verify or mmap)
    facts = check_fd(fd, request.path, verify=request.verify, later=checks_headers_later)
    if mmap:
        # This name is that of the open file; the path may name another file by now.
        return _torch_load(f"/proc/self/fd/{fd}", request, mmap=True)
    if facts["format"] != "archive":
        with os.fdopen(os.dup(fd), "rb") as file:
            file.seek(0)
            return _torch_load(file, request)
    try:
        # `File` reads the very file that was checked.
        loaded = _torch_load(_core.File(fd, facts["nbytes"]), request)
    except Exception as error:
        try:
            check_fd(fd, request.path, verify=False)
        except CorruptCheckpointError as corrupt:
            raise corrupt from error
        raise  # the file is whole, so torch's error is the right one
    if not facts["headers"]:  # they are still to be checked
        check_fd(fd, request.path, verify=False)
    return loaded


def _torch_load(file: Any, request: Request, *, mmap: bool = False) -> Any:
    """Call torch.load. If the archive lacks a record, raise CorruptCheckpointError."""
    # `mmap` is always given, because torch's configuration may make True the default.
    try:
        return torch.load(file, request.map_location, weights_only=request.weights_only, mmap=mmap)
    except RuntimeError as error:
        lacking = _LACKING.search(str(error))
        if lacking is None:
            raise
        raise CorruptCheckpointError(
            f"{request.path} cannot be loaded: record {lacking[1]} is missing"
        ) from error
