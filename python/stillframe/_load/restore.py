"""Reads an archive's storages on threads while torch's unpickler reads its pickle.

torch's function `serialization._load` runs an unpickler, and asks an object for the archive's
records by name. `Archive` is such an object.

Threads of the core read the records in the file's order, ahead of the unpickler, into memory that
torch allocated. A request for a record waits until the record is read and its CRC is compared.

    the core's threads   record 0 | record 1 | record 2 | record 3 | ...
    the unpickler             asks for 0 ....... for 1 ... for 2 ...

Some files, such as TorchScript, are left to torch.load: see `why_torch_must_read`.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import IO, Any, TypeAlias, cast

import torch
from torch import _weights_only_unpickler, serialization

from stillframe import _core
from stillframe._base import device as _device
from stillframe._base import records
from stillframe.errors import StillframeError

EVERYTHING = 1 << 62  # bytes; more than any file has
_BATCH_BYTES = 64 << 20  # bytes of memory that are allocated at a time
_AHEAD_BYTES = 1 << 30  # bytes of memory that are allocated ahead of the unpickler
# The same if torch copies each storage to a device afterwards.
_DEVICE_AHEAD_BYTES = 256 << 20
_Devices: TypeAlias = dict[int, torch.device]  # number of a record -> the device it is read to
_BYTEORDER = sys.byteorder.encode()
_KNOWN_VERSIONS = (b"1\n", b"2\n", b"3\n")  # contents of the record "version"


class _LoadedStorage:
    """Wraps a storage for `_load`, as torch's reader of archives does."""

    __slots__ = ("_untyped_storage",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._untyped_storage = storage

    def _typed_storage(self) -> _LoadedStorage:
        return self


class RecordTooShortError(Exception):
    """The error of a tensor that reaches beyond its record; `args` has the record's name."""


class Missing(Exception):
    """The error of a record that the pickle names and the file lacks; `args` has its name."""


class ReadAhead:
    """Memory for the records of a file, which threads read ahead of the code that takes them.

    Args:
        core: A restore of the file that has not begun.
        ahead: How many bytes may be read before a caller takes them.
        devices: The devices of those records that are not read into host memory.
    """

    def __init__(self, core: _core.Restore, ahead: int, devices: _Devices) -> None:
        self._core = core
        self._ahead = ahead
        self._devices = devices
        # The memory of the first records, in order; None once a caller has taken it.
        self._storages: list[torch.UntypedStorage | None] = []
        self._waiting_nbytes = 0  # bytes in `_storages`

    def begin(self) -> None:
        """Allocate memory for the first records and start the threads."""
        for device in set(self._devices.values()):
            new_storage(1, device)  # makes torch create a context of the driver for the device
        prepare_copies_to_devices(self._core, numbers_of(self._devices.values()))
        self._allocate_memory(least=1)

    def take(self, index: int) -> torch.UntypedStorage | None:
        """Wait until a record is read and checked, and return its memory, which the caller then
        owns. Return None if the record was taken before."""
        # All records in a chunk of the file are read together, so the first `reach` need memory.
        reach = self._core.reach(index)
        runs_low = self._waiting_nbytes < self._ahead // 2
        if reach > len(self._storages) or runs_low:
            self._allocate_memory(reach)
        records.wait(self._core, index)
        storage, self._storages[index] = self._storages[index], None
        if storage is not None:
            self._waiting_nbytes -= storage.nbytes()
        return storage

    def finish(self) -> None:
        """Wait until all records are read and checked."""
        self._allocate_memory(self._core.nr)
        records.wait(self._core, self._core.nr)

    def close(self) -> None:
        """End the threads, before the memory that they write to is freed."""
        self._core.close()
        self._storages.clear()

    def _allocate_memory(self, least: int) -> None:
        """Allocate memory for the first `least` records, and for as many more as may be read ahead.
        Let the threads read them."""
        nr_before = nr = len(self._storages)  # how many records have memory
        while nr < self._core.nr:
            if nr >= least and self._waiting_nbytes >= self._ahead:
                break
            sizes = self._core.sizes(nr, _BATCH_BYTES)  # of the next records
            self._storages += give_memory(self._core, nr, sizes, self._devices)
            self._waiting_nbytes += sum(sizes)
            nr += len(sizes)
        # The threads start only after all batches. While they fill new memory, they hold the
        # kernel's lock of the address space, and an allocation would wait for the lock.
        if nr > nr_before:
            self._core.go(nr)


class Archive:
    """The records of an open file of `nbytes` bytes, in place of torch's reader: `_load` asks for
    them by name. The caller closes `fd`."""

    def __init__(
        self, core: _core.Restore, fd: int, nbytes: int, ahead: int, devices: _Devices
    ) -> None:
        self.is_native = False  # whether the file is known to have this machine's byte order
        self._core = core
        self._fd = fd
        self._nbytes = nbytes
        self._records = ReadAhead(core, ahead, devices)
        # The storages that torch has got: (storage, name of its record, record's length).
        self._handed_out: list[tuple[weakref.ref[torch.UntypedStorage], str, int]] = []

    def load(self, map_location: Any, weights_only: bool) -> Any:
        """Return what torch.load would return, or raise what it would raise.

        Raises:
            records.RestoreFailed: A record is damaged or could not be read.
            RecordTooShortError: A record is shorter than a tensor in it.
            Missing: The file lacks a record.
        """
        torchs_module: Any = _weights_only_unpickler if weights_only else pickle
        stays_on_cpu: Callable[[str], bool] | None = None
        if _is_cpu_rule_torchs_own() and (map_location is None or _is_cpu(map_location)):
            stays_on_cpu = _make_cpu_location_test(always=map_location is not None)
        # `_load` takes a module that has a class Unpickler.
        module = SimpleNamespace(
            Unpickler=_make_unpickler_class(torchs_module.Unpickler, self, stays_on_cpu)
        )
        try:
            self._records.begin()
            if self.get_record("version") not in _KNOWN_VERSIONS:
                _ = self._torch  # torch's own reader raises an error for an unknown version
            loaded = serialization._load(self, map_location, module, encoding="utf-8")  # type: ignore[no-untyped-call]
            self._records.finish()
        finally:
            self._records.close()
        return loaded

    def storage(self, kind: Any, key: Any, numel: int) -> Any:
        """Return the storage of the record data/<key>, of class `kind`, on the CPU. `numel` is the
        number of elements in the pickle. Return None if the record does not fit the pickle: torch
        then decides what to do."""
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        if not isinstance(key, str):
            return None
        name = f"data/{key}"
        if self._core.find(name) < 0:
            return None
        storage = self._take(name)
        if storage.nbytes() != numel * dtype.itemsize:
            return None
        self._note_handed_out(name, storage)
        return _typed(wrap_storage=storage, dtype=dtype)

    # ---- the methods of torch's PyTorchFileReader, which `_load` calls ----

    def has_record(self, name: str) -> bool:
        return self._core.find(name) >= 0

    def get_record(self, name: str) -> bytes:
        data = bytes_of(self._take(name))
        if name == "byteorder":
            self.is_native = data == _BYTEORDER
        return data

    def get_storage_from_record(self, name: str, nbytes: int, kind: Any) -> Any:
        storage = self._take(name)
        if storage.nbytes() != nbytes:  # the record does not fit the pickle: torch's reader decides
            return self._torch.get_storage_from_record(name, nbytes, kind)
        self._note_handed_out(name, storage)
        return _LoadedStorage(storage)

    def serialization_id(self) -> str:
        name = ".data/serialization_id"
        return self.get_record(name).decode() if self.has_record(name) else ""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of torch's own reader, for versions of torch that need more."""
        if name.startswith("_"):  # not part of the interface of torch's reader
            raise AttributeError(name)
        return getattr(self._torch, name)

    # ---- records ----

    def _note_handed_out(self, name: str, storage: torch.UntypedStorage) -> None:
        """Note the length of a storage that torch gets, for `refuse_short_records`."""
        self._handed_out.append((weakref.ref(storage), name, storage.nbytes()))

    def refuse_short_records(self) -> None:
        """Raise RecordTooShortError if a tensor reaches beyond its record. torch has then
        lengthened the storage, and the new bytes are undefined."""
        for weak_storage, name, nbytes in self._handed_out:
            storage = weak_storage()
            if storage is not None and storage.nbytes() != nbytes:
                raise RecordTooShortError(name)

    @functools.cached_property
    def _torch(self) -> Any:
        """torch's own reader of the same file."""
        return torch._C.PyTorchFileReader(cast("IO[bytes]", _core.File(self._fd, self._nbytes)))

    def _take(self, name: str) -> torch.UntypedStorage:
        """Wait until a record is read and checked, and return its bytes."""
        index = self._core.find(name)
        if index < 0:
            raise Missing(name)
        storage = self._records.take(index)
        if storage is None:  # taken before, which torch does with empty records only
            return _storage_from_bytes(self._torch.get_record(name))
        return storage


def _storage_from_bytes(data: bytes) -> torch.UntypedStorage:
    storage = new_storage(len(data))
    if data:
        ctypes.memmove(storage.data_ptr(), data, len(data))
    return storage


def bytes_of(storage: torch.UntypedStorage) -> bytes:
    return ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""


def new_storage(nbytes: int, device: torch.device | str = "cpu") -> torch.UntypedStorage:
    return torch.UntypedStorage(nbytes, device=device)  # type: ignore[no-untyped-call]


def give_memory(
    core: _core.Restore, first: int, sizes: list[int], devices: _Devices
) -> list[torch.UntypedStorage]:
    """Allocate memory for the records from `first` on, each on its device, and make it the
    destination of the record. `sizes` has the bytes of each record. Return the memory."""
    storages: list[torch.UntypedStorage] = []
    addresses: list[int] = []
    on_devices: list[int] = []  # numbers of records
    for number, size in enumerate(sizes, first):
        storage = new_storage(size, devices.get(number, "cpu"))
        storages.append(storage)
        if number in devices:
            on_devices.append(number)
            addresses.append(0)  # no destination in host memory
        else:
            addresses.append(storage.data_ptr())
    core.into(first, addresses)
    # Earlier work on a stream may still use memory that torch has just given us. The copies wait
    # for the work that is on the streams now.
    prepare_copies_to_devices(core, numbers_of(devices[number] for number in on_devices))
    for number in on_devices:
        address = _device.address_of(storages[number - first])
        core.into_device(number, _device.device_number_of(devices[number]) - 1, address)
    return storages


def numbers_of(devices: Iterable[torch.device]) -> set[int]:
    """Return the core's numbers of CUDA devices: 0 for the first one, which is 1 in `_device`."""
    return {_device.device_number_of(device) - 1 for device in devices}


def prepare_copies_to_devices(core: _core.Restore, device_numbers: set[int]) -> None:
    """Prepare copies to devices. Later copies wait for the work on the devices' current streams.
    Raise StillframeError if a device cannot be used."""
    for number in sorted(device_numbers):
        if why := core.device(number, _device.current_stream(number)):
            raise StillframeError(f"nothing can be loaded to a device: {why}")


def _make_cpu_location_test(always: bool) -> Callable[[str], bool]:
    """Return a function that says whether a storage is loaded to the CPU. Its argument is the
    location where the storage was saved."""
    if always:
        return lambda location: True
    return lambda location: location == "cpu"


def _make_unpickler_class(
    base: Any, archive: Archive, stays_on_cpu: Callable[[str], bool] | None
) -> Any:
    """Return a subclass of torch's unpickler `base` that makes storages on the CPU itself. This
    saves a quarter of a load of many small tensors. If `stays_on_cpu` is None, torch makes all."""
    # The class lives until garbage is collected, and must not keep the archive's memory.
    weak_archive = weakref.ref(archive)

    class Unpickler(base):  # type: ignore[misc]
        def load(self) -> Any:
            archive = weak_archive()
            assert archive is not None
            if stays_on_cpu is not None:
                # `_load` has set its own function on this object. Replace that function.
                torchs_load: Callable[[Any], Any] = super().__getattribute__("persistent_load")
                self.persistent_load = _make_persistent_load(archive, stays_on_cpu, torchs_load)
            loaded = super().load()
            archive.refuse_short_records()
            return loaded

    return Unpickler


def _make_persistent_load(
    archive: Archive, stays_on_cpu: Callable[[str], bool], torchs_load: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    """Return a `persistent_load`: the function that turns an unpickler's reference to a storage
    into the storage. It makes storages on the CPU, and calls `torchs_load` for others."""
    made: dict[str, Any] = {}  # the storages made so far, by key

    def persistent_load(saved: Any) -> Any:
        if type(saved) is tuple and len(saved) == 5 and saved[0] == "storage":
            _, kind, key, location, numel = saved
            if key in made:
                return made[key]
            if stays_on_cpu(location) and archive.is_native:
                storage = archive.storage(kind, key, numel)
                if storage is not None:
                    is_empty = not storage._data_ptr()
                    if not is_empty:  # like torch, make a new object for each empty storage
                        made[key] = storage
                    return storage
        return torchs_load(saved)

    return persistent_load


# `_internal` suppresses torch's warning that TypedStorage is deprecated.
_typed: Any = functools.partial(torch.storage.TypedStorage, _internal=True)


def _is_cpu(map_location: Any) -> bool:
    return isinstance(map_location, (str, torch.device)) and str(map_location) == "cpu"


def _is_cpu_rule_torchs_own() -> bool:
    """Return whether torch's own rule restores storages that were saved on the CPU."""
    return serialization._package_registry[0][2] is serialization._cpu_deserialize


class Shapes:
    """A reader of an archive's pickle alone, which makes every tensor on the meta device.

    torch asks for the offset of each record and keeps the answer in the storage. This class answers
    with the record's number instead, for `record_number_of`.
    """

    _NAMES = ("data.pkl", "byteorder")

    def __init__(self, core: _core.Restore) -> None:
        self.sizes = core.sizes(0, EVERYTHING)  # the bytes of each record
        self._core = core
        self._records: dict[str, bytes] = {}

    def load(self, weights_only: bool) -> Any:
        """Return the tree with its tensors on the meta device."""
        unpickler = _weights_only_unpickler if weights_only else pickle
        names = [name for name in self._NAMES if self._core.find(name) >= 0]
        try:
            self._records = dict(zip(names, records.read(self._core, tuple(names)), strict=True))
            if self._records.get("byteorder", _BYTEORDER) != _BYTEORDER:
                raise ValueError("it has another byte order")
            return serialization._load(self, "meta", unpickler, encoding="utf-8")  # type: ignore[no-untyped-call]
        finally:
            self._core.close()

    def has_record(self, name: str) -> bool:
        # False for ".format_version": otherwise torch would not call get_record_offset.
        return name in self._records

    def get_record(self, name: str) -> bytes:
        return self._records[name]

    def get_record_offset(self, name: str) -> int:
        index = self._core.find(name)
        if index < 0:
            raise Missing(name)
        return index

    def serialization_id(self) -> str:
        return ""  # not needed here, and its record is at the end of the file


def record_number_of(tensor: torch.Tensor) -> int | None:
    """Return the number of the record of a tensor that `Shapes` has made. Return None if the tensor
    wraps others."""
    return tensor.untyped_storage()._checkpoint_offset  # a record's number here; see `Shapes`


def why_torch_must_read(core: _core.Restore, map_location: Any) -> str | None:
    """Return why torch.load has to read an archive, or None if this module can read it."""
    if not _has_known_torch_load():
        return "this torch loads in another way"
    if core.find("constants.pkl") >= 0:
        return "it is TorchScript"
    if core.find("version") < 0:
        return "its version is in another record"
    if map_location is not None and str(map_location) == "meta":
        return "no storage is asked for"
    if is_fake_or_skip_data_mode():
        return "no storage is asked for"
    forced = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    if any(name in os.environ for name in forced):
        return "the environment tells torch.load what to trust"
    return None


def is_fake_or_skip_data_mode() -> bool:
    """Return whether torch.load returns tensors without the file's bytes here."""
    return (
        torch._guards.detect_fake_mode(None) is not None
        or serialization._serialization_tls.skip_data
    )


@functools.cache
def _has_known_torch_load() -> bool:
    """Return whether torch has the private function `_load` with the parameters that we pass."""
    load = getattr(serialization, "_load", None)
    if load is None:
        return False
    first_parameters = [*inspect.signature(load).parameters][:3]
    return first_parameters == ["zip_file", "map_location", "pickle_module"]


def open_archive(
    core: _core.Restore, fd: int, nbytes: int, map_location: Any, devices: _Devices
) -> Archive:
    return Archive(core, fd, nbytes, ahead_bytes(map_location, devices), devices)


def ahead_bytes(map_location: Any, devices: _Devices) -> int:
    """Return how many bytes a load to `map_location` may read ahead."""
    stays_on_cpu = map_location is None or _is_cpu(map_location)
    torch_copies = not (stays_on_cpu or devices)  # to the device, after the records are read
    return _DEVICE_AHEAD_BYTES if torch_copies else _AHEAD_BYTES
