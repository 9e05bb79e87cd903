"""Loads safetensors files: a flat dict of tensors, without a pickle.

The header says where each tensor's bytes are. The core's threads get a list of these byte ranges,
and read them ahead of the code that makes the tensors. Here a record is the bytes of one tensor. An
index names several such files, which are loaded one after the other.

The format has no checksums, so only the structure of a file is checked.
"""

from __future__ import annotations

import array
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, serialization

from stillframe import _core
from stillframe._base import bar, file_kinds, safetensors
from stillframe._base import device as _device
from stillframe._base.disk import OpenFile
from stillframe._base.records import RestoreFailed
from stillframe._base.safetensors import Entry, Header
from stillframe._load import placement, restore
from stillframe._load.errors import HALF_WRITTEN, MapLocation, Request, add_path_to_os_errors
from stillframe._load.fill import Fill
from stillframe._load.into import Plan
from stillframe.errors import CorruptCheckpointError, StillframeError


def is_safetensors_or_index(fd: int, path: str) -> bool:
    """Return whether an open file is a safetensors file, or an index that names such files."""
    with add_path_to_os_errors(path):
        return path.endswith(safetensors.INDEX_SUFFIX) or file_kinds.is_safetensors(fd, path)


@dataclass(frozen=True, slots=True)
class _File:
    """One open safetensors file."""

    opened: OpenFile
    path: str
    header: Header
    first: int  # the number of its first tensor among the tensors of all files


class Files:
    """A safetensors file, or all files that an index names; a context manager.

    The caller closes `opened`, the file or index.

    Raises:
        CorruptCheckpointError: A file is damaged or missing.
        OSError: A file cannot be read.
        StillframeError: This torch lacks a type that a file has.
    """

    def __init__(self, opened: OpenFile, request: Request) -> None:
        self._request = request
        self._stack = contextlib.ExitStack()
        try:
            self._files = self._open(opened, request.path)
        except safetensors.Damaged as error:
            self._stack.close()
            raise CorruptCheckpointError(f"{request.path} cannot be loaded: {error}") from None
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def _open(self, opened: OpenFile, path: str) -> list[_File]:
        """Read the header of the file, or open all files of an index and read their headers."""
        if not path.endswith(safetensors.INDEX_SUFFIX):
            return [_File(opened, path, _read_header(opened.fileno(), path), 0)]
        files: list[_File] = []
        first = 0
        for name, tensors in safetensors.read_index(self._request.disk, path).items():
            shard = os.path.join(os.path.dirname(path), name)
            opened = self._stack.enter_context(self._request.open_file(shard, peek=True))
            header = _read_header(opened.fileno(), shard)
            self._request.disk.release_memory(opened)  # because there may be many files
            safetensors.refuse_missing_tensors(name, header.entries, tensors)
            files.append(_File(opened, shard, header, first))
            first += len(header.entries)
        return files

    # ---- new tensors ----

    def load(self, map_location: MapLocation) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for file in self._files:
            tensors.update(self._load(file, map_location))
        return tensors

    def _load(self, file: _File, map_location: MapLocation) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and new tensors of one file."""
        entries = file.header.entries
        if isinstance(map_location, dict):
            # In this format, all tensors count as saved on the CPU.
            map_location = map_location.get("cpu", "cpu")
        if str(map_location) == "meta" or restore.is_fake_or_skip_data_mode():
            yield from _tensors_without_bytes(entries, map_location)
            return
        if not entries:
            return

        devices: dict[int, torch.device] = {}
        if map_location is not None and placement.may_find_devices(map_location):
            device = _device.cuda_device_of_location(str(map_location))
            if device is not None:
                devices = dict.fromkeys(range(len(entries)), device)
        # Not called with `devices`, because the records are then read straight to them.
        restore_location = _restore_location_function(None if devices else map_location)
        core = self._restore(file)
        memory = restore.ReadAhead(core, restore.ahead_bytes(map_location, devices), devices)
        with (
            bar.watched(core.done, file.path, file.header.nbytes),
            _translate_restore_failures(file),
        ):
            try:
                memory.begin()
                for index, entry in enumerate(entries):
                    storage = memory.take(index)
                    assert storage is not None  # no record is taken twice
                    if not devices:
                        storage = restore_location(storage, "cpu")
                    yield entry.name, _tensor_over(storage, entry)
                memory.finish()
            finally:
                memory.close()
        self._request.disk.release_memory(file.opened)

    def mapped(self, map_location: MapLocation) -> dict[str, Tensor]:
        """Return tensors over the files' pages, mapped privately."""
        if restore.is_fake_or_skip_data_mode() or str(map_location) == "meta":
            return self.load(map_location)
        tensors: dict[str, Tensor] = {}
        restore_location = _restore_location_function(map_location)
        for file in self._files:
            fd, nbytes = file.opened.fileno(), file.header.nbytes
            _core.arrive(fd)  # waits until all bytes of a remote object are here
            # The name of the open file. Another file may be at the path by now.
            name = f"/proc/self/fd/{fd}"
            whole = torch.UntypedStorage.from_file(name, False, nbytes)
            for entry in file.header.entries:
                storage = whole[entry.begin : entry.end]
                if entry.begin % _dtype(entry).itemsize:
                    storage = storage.clone()  # torch needs aligned elements
                tensors[entry.name] = _tensor_over(restore_location(storage, "cpu"), entry)
        return tensors

    # ---- in place ----

    def shapes(self) -> tuple[dict[str, Tensor], list[int]]:
        """Return meta tensors by name, and the length of each record in bytes.
        `restore.record_number_of` tells the record of a tensor."""
        entries = [entry for file in self._files for entry in file.header.entries]
        sizes = [entry.end - entry.begin for entry in entries]
        tensors: dict[str, Tensor] = {}
        for number, (entry, size) in enumerate(zip(entries, sizes, strict=True)):
            storage = restore.new_storage(size, "meta")
            storage._checkpoint_offset = number  # for `restore.record_number_of`
            tensors[entry.name] = _tensor_over(storage, entry)
        return tensors, sizes

    def fill(self, plan: Plan, new: list[Tensor]) -> None:
        """Read the bytes into the targets. The caller then calls the plan's `finish`. `new` is the
        plan's `new_tensors`."""
        for file in self._files:
            if file.header.entries:
                core = self._restore(file)
                nbytes = file.header.nbytes
                with (
                    bar.watched(core.done, file.path, nbytes),
                    _translate_restore_failures(file, f"; {HALF_WRITTEN}"),
                ):
                    Fill(core, plan, new, file.first).run()
                self._request.disk.release_memory(file.opened)

    def _restore(self, file: _File) -> _core.Restore:
        """Return a restore whose records are the file's tensors."""
        ranges = array.array("Q")  # offset and length of each record
        for entry in file.header.entries:
            ranges.extend((entry.begin, entry.end - entry.begin))
        fd = file.opened.fileno()
        return _core.restore_bare(fd, ranges, file.header.nbytes, self._request.shared)


def add_tied_tensor_names(tensors: dict[str, Tensor], into: Any) -> dict[str, Tensor]:
    """Return a file's tensors by name. If `into` is a module, add the other names of tied tensors.

    Tied tensors share memory. A safetensors file has them once, under one of their names.
    """
    if not isinstance(into, torch.nn.Module):
        return tensors
    memory_of: dict[str, tuple[Any, ...]] = {}  # equal for tied tensors
    for name, tensor in into.state_dict().items():
        if isinstance(tensor, Tensor) and tensor.numel():
            layout = tensor.shape, tensor.stride(), tensor.dtype
            memory_of[name] = tensor.device, tensor.data_ptr(), *layout
    name_in_file: dict[tuple[Any, ...], str] = {}  # by memory
    for name, memory in memory_of.items():
        if name in tensors:
            name_in_file.setdefault(memory, name)
    with_all_names = dict(tensors)
    for name, memory in memory_of.items():
        if name not in tensors and memory in name_in_file:
            with_all_names[name] = tensors[name_in_file[memory]]
    return with_all_names


def _read_header(fd: int, path: str) -> Header:
    """Return the header of an open file. Raise the errors of `Files`."""
    try:
        header = safetensors.read_header(fd)
    except safetensors.Damaged as error:
        raise CorruptCheckpointError(f"{path} cannot be loaded: {error}") from None
    for entry in header.entries:
        _, name_in_torch = safetensors.DTYPES[entry.dtype]
        if not name_in_torch or not hasattr(torch, name_in_torch):
            raise StillframeError(
                f"{path} cannot be loaded: tensor {entry.name} is of type {entry.dtype}, which this"
                " torch does not have"
            )
    return header


def _dtype(entry: Entry) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, safetensors.DTYPES[entry.dtype][1])
    return dtype


def _shape(entry: Entry) -> tuple[int, ...]:
    """Return the tensor's shape in torch, which counts a pair of 4-bit numbers as one element."""
    if entry.dtype != "F4" or not entry.shape:
        return entry.shape
    return (*entry.shape[:-1], entry.shape[-1] // 2)


def _tensor_over(storage: torch.UntypedStorage, entry: Entry) -> Tensor:
    """Return an entry's tensor over `storage`, which has the bytes of this tensor only."""
    shape = _shape(entry)
    strides: list[int] = []  # of a contiguous tensor
    stride = 1
    for size in reversed(shape):
        strides.insert(0, stride)
        stride *= max(size, 1)
    empty = torch.empty(0, dtype=_dtype(entry), device=storage.device)
    return empty.set_(storage, 0, shape, tuple(strides))


def _tensors_without_bytes(
    entries: list[Entry], map_location: MapLocation
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors whose bytes are not read: on "meta", or under FakeTensorMode."""
    device = "meta" if str(map_location) == "meta" else "cpu"
    for entry in entries:
        yield entry.name, torch.empty(_shape(entry), dtype=_dtype(entry), device=device)


def _restore_location_function(map_location: MapLocation) -> Any:
    """Return torch.load's function for `map_location`, which moves a storage to its device."""
    return serialization._get_restore_location(map_location)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _translate_restore_failures(file: _File, suffix: str = "") -> Iterator[None]:
    """Turn a RestoreFailed of the block into an error for users, whose message ends with
    `suffix`."""
    try:
        yield
    except RestoreFailed as failed:
        failure = failed.failure
        if failure.reason is None:  # a system call failed
            message = f"{os.strerror(-failure.code)} (at byte {failure.offset}){suffix}"
            raise OSError(-failure.code, message, file.path) from None
        is_damaged = failure.code == _core.ECORRUPT
        error_class = CorruptCheckpointError if is_damaged else StillframeError
        raise error_class(f"{file.path} cannot be loaded: {failure.reason}{suffix}") from None
