"""Reading an archive's storages on threads while torch's unpickler reads its pickle.

torch.load has two halves. `torch.load` itself opens the file. `_load` runs an unpickler and asks
the archive for records by name; with `weights_only` torch's unpickler runs no code of the pickle.
This module is that archive.

Threads of the core read its records in the file's order, ahead of the unpickler, into memory that
torch allocated. A request for a record waits for it. So nothing unpickled ever sees bytes whose CRC
was not compared.

    the core's threads   record 0 | record 1 | record 2 | record 3 | ...
    the unpickler             asks for 0 ....... for 1 ... for 2 ...

Anything that the two halves do beyond this is left to torch.load itself: see `why_not`.
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

EVERYTHING = 1 << 62  # bytes
_BATCH_BYTES = 64 << 20  # bytes of memory that are allocated at a time
_AHEAD_BYTES = 1 << 30  # bytes of memory that are allocated ahead of the unpickler
_Devices: TypeAlias = dict[int, torch.device]  # by the number of the record
# the limit of _AHEAD_BYTES if torch copies the storages to a device afterwards
_DEVICE_AHEAD_BYTES = 256 << 20
_BYTEORDER = sys.byteorder.encode()
_KNOWN_VERSIONS = (b"1\n", b"2\n", b"3\n")


class _Loaded:
    """A storage, as torch's reader of archives returns it."""

    __slots__ = ("_untyped_storage",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._untyped_storage = storage

    def _typed_storage(self) -> _Loaded:
        return self


class CutShort(Exception):
    """The error of a tensor that reaches beyond its record; `args` has the record's name."""


class Missing(Exception):
    """The error of a record that the pickle names and the file lacks; `args` has its name."""


class Ahead:
    """Memory for the records of a file, which threads read ahead of the code that takes them.

    Args:
        ahead: How many bytes may be read before they are asked for.
        devices: The devices of records that do not stay in host memory.
    """

    def __init__(self, core: _core.Restore, ahead: int, devices: _Devices) -> None:
        self._core = core
        self._ahead = ahead
        self._devices = devices
        self._storages: list[torch.UntypedStorage | None] = []
        self._waiting_nbytes = 0  # bytes of allocated memory that no caller has taken yet

    def begin(self) -> None:
        """Begin to read."""
        for device in {*self._devices.values()}:
            new_storage(1, device)  # makes torch create a context
        open_devices(self._core, numbers_of(self._devices.values()))
        self._find_memory(1)

    def take(self, index: int) -> torch.UntypedStorage | None:
        """Return a record's bytes once they are checked; None at a second request. The caller owns
        them from now on."""
        reach = self._core.reach(index)  # neighbours in the same chunk of the file need memory too
        if reach > len(self._storages) or self._waiting_nbytes < self._ahead // 2:
            self._find_memory(reach)
        records.wait(self._core, index)
        storage, self._storages[index] = self._storages[index], None
        self._waiting_nbytes -= 0 if storage is None else storage.nbytes()
        return storage

    def finish(self) -> None:
        """Wait until every record is read and checked."""
        self._find_memory(self._core.nr)
        records.wait(self._core, self._core.nr)

    def close(self) -> None:
        """End the threads, before the memory that they write to is freed."""
        self._core.close()
        self._storages.clear()

    def _find_memory(self, least: int) -> None:
        """Allocate memory for records: at least the first `least`, and those that may be read
        ahead."""
        first = found = len(self._storages)
        while first < least or (first < self._core.nr and self._waiting_nbytes < self._ahead):
            sizes = self._core.sizes(first, _BATCH_BYTES)
            self._storages += give_memory(self._core, first, sizes, self._devices)
            self._waiting_nbytes += sum(sizes)
            first += len(sizes)
        # Not after each batch: readers that fill new memory hold the lock of this process's address
        # space. Each further allocation would wait for them, and make other readers wait.
        if first > found:
            self._core.go(first)


class Archive:
    """The records of an open file, as torch's `_load` asks for them.

    Args:
        fd: The open file; it stays the caller's.
        nbytes: Its length.
        ahead, devices: As for `Ahead`.
    """

    def __init__(
        self, core: _core.Restore, fd: int, nbytes: int, ahead: int, devices: _Devices
    ) -> None:
        self.is_native = False  # the file has this machine's byte order
        self._core = core
        self._fd = fd
        self._nbytes = nbytes
        self._records = Ahead(core, ahead, devices)
        # (storage, its record, the record's length) of each storage that tensors were laid over.
        self._given: list[tuple[weakref.ref[torch.UntypedStorage], str, int]] = []

    def load(self, map_location: Any, weights_only: bool) -> Any:
        """Return what torch.load would return.

        Raises:
            records.RestoreFailed: A record is damaged or could not be read.
            CutShort: A record is shorter than a tensor in it.
            Missing: The file lacks a record.
            Everything that torch.load raises after it has opened the file.
        """
        unpickler: Any = _weights_only_unpickler if weights_only else pickle
        quick = _cpu_storages_stay_as_they_are() and (map_location is None or _is_cpu(map_location))
        is_ours = _is_ours(map_location is not None) if quick else None
        unpickler = SimpleNamespace(Unpickler=_unpickler(unpickler.Unpickler, self, is_ours))
        try:
            self._records.begin()
            if self.get_record("version") not in _KNOWN_VERSIONS:
                _ = self._torch  # torch's reader raises for versions that it does not know
            loaded = serialization._load(self, map_location, unpickler, encoding="utf-8")  # type: ignore[no-untyped-call]
            self._records.finish()
        finally:
            self._records.close()
        return loaded

    def storage(self, kind: Any, key: str, numel: int) -> Any:
        """Return a storage on the CPU as `_load` makes it, or None if torch has to make it."""
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        if not isinstance(key, str) or self._core.find(name := f"data/{key}") < 0:
            return None
        storage = self._take(name)
        if storage.nbytes() != numel * dtype.itemsize:
            return None
        self._note_given(name, storage)
        return _typed(wrap_storage=storage, dtype=dtype)

    # ---- called by `_load` ----

    def has_record(self, name: str) -> bool:
        return self._core.find(name) >= 0

    def get_record(self, name: str) -> bytes:
        data = bytes_of(self._take(name))
        if name == "byteorder":
            self.is_native = data == _BYTEORDER
        return data

    def get_storage_from_record(self, name: str, nbytes: int, kind: Any) -> Any:
        storage = self._take(name)
        if storage.nbytes() != nbytes:  # leave it to torch how to treat this
            return self._torch.get_storage_from_record(name, nbytes, kind)
        self._note_given(name, storage)
        return _Loaded(storage)

    def serialization_id(self) -> str:
        name = ".data/serialization_id"
        return self.get_record(name).decode() if self.has_record(name) else ""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of torch's own reader, in case another version of torch asks for one
        that is not here."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._torch, name)

    # ---- records ----

    def _note_given(self, name: str, storage: torch.UntypedStorage) -> None:
        self._given.append((weakref.ref(storage), name, storage.nbytes()))

    def refuse_short(self) -> None:
        """Raise CutShort if a storage had to grow under a tensor, since its new bytes are
        undefined.

        torch.load's storages cannot grow.
        """
        for alive, name, nbytes in self._given:
            storage = alive()
            if storage is not None and storage.nbytes() != nbytes:
                raise CutShort(name)

    @functools.cached_property
    def _torch(self) -> Any:
        """torch's own reader of the same file."""
        return torch._C.PyTorchFileReader(cast("IO[bytes]", _core.File(self._fd, self._nbytes)))

    def _take(self, name: str) -> torch.UntypedStorage:
        """Return the record's bytes once they are checked. The caller owns them from now on."""
        index = self._core.find(name)
        if index < 0:
            raise Missing(name)
        storage = self._records.take(index)
        if storage is None:  # a second request: torch caches all but empty ones
            return _storage_of(self._torch.get_record(name))
        return storage


def _storage_of(data: bytes) -> torch.UntypedStorage:
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
    """Allocate memory of these sizes for the records from `first` on, each on its device.

    Raises:
        torch.OutOfMemoryError, RuntimeError: There is none.
    """
    there = range(first, first + len(sizes)) if devices else ()
    storages = [
        new_storage(size, devices.get(first + i, "cpu") if devices else "cpu")
        for i, size in enumerate(sizes)
    ]
    core.into(first, [0 if first + i in devices else s.data_ptr() for i, s in enumerate(storages)])
    on_devices = [(index, devices[index]) for index in there if index in devices]
    # After the allocations: memory that torch returns may still be in use on its stream.
    open_devices(core, numbers_of(device for _, device in on_devices))
    for index, device in on_devices:
        address = _device.address_of(storages[index - first])
        core.into_device(index, _device.number_of(device) - 1, address)
    return storages


def numbers_of(devices: Iterable[torch.device]) -> set[int]:
    return {_device.number_of(device) - 1 for device in devices}


def open_devices(core: _core.Restore, numbers: set[int]) -> None:
    """Make later copies come after the work on the current streams of these devices.

    Raises:
        StillframeError: A device cannot be used.
    """
    for number in sorted(numbers):
        if why := core.device(number, _device.current_stream(number)):
            raise StillframeError(f"nothing can be loaded to a device: {why}")


def _is_ours(everything: bool) -> Callable[[str], bool]:
    """Return a test for locations on the CPU; with `everything`, all of them are."""
    return (lambda _: True) if everything else "cpu".__eq__


def _unpickler(base: Any, archive: Archive, is_ours: Callable[[str], bool] | None) -> Any:
    """Return torch's unpickler, with a short cut for storages on the CPU where it may be taken.

    For every storage `_load` asks three times whether tensors are to be fake, and where it belongs.
    With many small tensors that is a quarter of the whole load.

    A class is part of a reference cycle and lives until garbage is collected. So it has only a weak
    reference to the archive, whose threads and memory a Ctrl-C may have left open.
    """
    alive = weakref.ref(archive)

    class Unpickler(base):  # type: ignore[misc]
        def load(self) -> Any:
            archive = alive()
            assert archive is not None
            if is_ours is not None:
                theirs: Callable[[Any], Any] = super().__getattribute__("persistent_load")
                self.persistent_load = _short_cut(archive, is_ours, theirs)
            loaded = super().load()
            archive.refuse_short()
            return loaded

    return Unpickler


def _short_cut(
    archive: Archive, is_ours: Callable[[str], bool], theirs: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    """Return a `persistent_load` that handles plain storages itself and others as torch does."""
    made: dict[str, Any] = {}

    def persistent_load(saved: Any) -> Any:
        if type(saved) is tuple and len(saved) == 5 and saved[0] == "storage":
            _, kind, key, location, numel = saved
            if key in made:
                return made[key]
            if is_ours(location) and archive.is_native:
                storage = archive.storage(kind, key, numel)
                if storage is not None:
                    if storage._data_ptr():  # torch makes a new object for each empty storage
                        made[key] = storage
                    return storage
        return theirs(saved)

    return persistent_load


_typed: Any = functools.partial(torch.storage.TypedStorage, _internal=True)


def _is_cpu(map_location: Any) -> bool:
    return isinstance(map_location, (str, torch.device)) and str(map_location) == "cpu"


def _cpu_storages_stay_as_they_are() -> bool:
    """Return whether nobody has registered another rule for storages that were saved on the CPU."""
    return serialization._package_registry[0][2] is serialization._cpu_deserialize


class Shapes:
    """An archive of which only the pickle is read: every tensor is on the meta device.

    Its storages know their records by the offset that torch notes in them for such loads.

    Attributes:
        sizes: How long each record is.
    """

    _NAMES = ("data.pkl", "byteorder")

    def __init__(self, core: _core.Restore) -> None:
        self.sizes = core.sizes(0, EVERYTHING)
        self._core = core
        self._records: dict[str, bytes] = {}

    def load(self, weights_only: bool) -> Any:
        """Return the tree on the meta device; the arguments are those of `Archive.load`."""
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
        return name in self._records  # .format_version is left out, so torch asks for each offset

    def get_record(self, name: str) -> bytes:
        return self._records[name]

    def get_record_offset(self, name: str) -> int:
        index = self._core.find(name)
        if index < 0:
            raise Missing(name)
        return index

    def serialization_id(self) -> str:
        return ""  # the record is the last one of the file


def record_of(tensor: torch.Tensor) -> int | None:
    """Return the record of a tensor of `Shapes`, or None if the tensor wraps others."""
    return tensor.untyped_storage()._checkpoint_offset


def why_not(core: _core.Restore, map_location: Any) -> str | None:
    """Return why torch.load has to read an archive; None if this module can read it."""
    if not _load_is_as_known():
        return "this torch loads in another way"
    if core.find("constants.pkl") >= 0:
        return "it is TorchScript"
    if core.find("version") < 0:
        return "its version is in another record"
    if map_location is not None and str(map_location) == "meta":
        return "no storage is asked for"
    if reads_no_bytes():
        return "no storage is asked for"
    forced = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    if any(name in os.environ for name in forced):
        return "the environment tells torch.load what to trust"
    return None


def reads_no_bytes() -> bool:
    """Return whether torch.load returns tensors without the file's bytes here."""
    return (
        torch._guards.detect_fake_mode(None) is not None
        or serialization._serialization_tls.skip_data
    )


@functools.cache
def _load_is_as_known() -> bool:
    load = getattr(serialization, "_load", None)
    return load is not None and [*inspect.signature(load).parameters][:3] == [
        "zip_file",
        "map_location",
        "pickle_module",
    ]


def open_archive(
    core: _core.Restore, fd: int, nbytes: int, map_location: Any, devices: _Devices
) -> Archive:
    """Return the archive for a load to `map_location`; arguments as for `Archive`."""
    return Archive(core, fd, nbytes, ahead_bytes(map_location, devices), devices)


def ahead_bytes(map_location: Any, devices: _Devices) -> int:
    """Return how many bytes a load to `map_location` may read ahead."""
    final = map_location is None or _is_cpu(map_location) or bool(devices)
    return _AHEAD_BYTES if final else _DEVICE_AHEAD_BYTES
