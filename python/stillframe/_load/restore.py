"""Reading an archive's storages by threads while torch's unpickler reads its pickle.

torch.load has two halves: `torch.load` itself, which opens the file, and `_load`, which runs an
unpickler (torch's own, which with `weights_only` obeys no pickle's orders) and asks the archive for
records by name. This module is that archive. Its records are read by threads of the core in the
file's order, ahead of the unpickler, into memory that torch allocated; a record that is asked for
is waited for, so nothing unpickled ever sees bytes whose CRC was not compared.

    the core's threads   record 0 | record 1 | record 2 | record 3 | ...
    the unpickler             asks for 0 ....... for 1 ... for 2 ...

What the two halves do between them, and what is not here, is for torch.load itself: see `can`.
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
from stillframe._base.records import Failure, RestoreFailed, read
from stillframe.errors import StillframeError

EVERYTHING = 1 << 62  # bytes
_BATCH_BYTES = 64 << 20  # bytes of memory that are found at a time
_AHEAD_BYTES = 1 << 30  # and how much of it before it is asked for
_Devices: TypeAlias = dict[int, torch.device]  # by the number of the record
_DEVICE_AHEAD_BYTES = 256 << 20  # where it is only on its way: bytes of host memory
_BYTEORDER = sys.byteorder.encode()
_KNOWN_VERSIONS = (b"1\n", b"2\n", b"3\n")


class _Loaded:
    """A storage in the shape in which torch's reader of archives hands one out."""

    __slots__ = ("_untyped_storage",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._untyped_storage = storage

    def _typed_storage(self) -> _Loaded:
        return self


class CutShort(Exception):
    """A tensor reaches beyond its record; `args` has the record's name."""


class Missing(Exception):
    """The pickle names a record that the file does not have; `args` has the record's name."""


class Archive:
    """The records of an open file, as torch's `_load` asks for them.

    Args:
        fd: The open file; it stays the caller's.
        nbytes: Its length.
        ahead: How many bytes may be read before they are asked for.
        devices: Where records go that do not stay in host memory.
    """

    def __init__(
        self, core: _core.Restore, fd: int, nbytes: int, ahead: int, devices: _Devices
    ) -> None:
        self.failure: Failure | None = None
        self.is_native = False  # as far as the file says
        self._core = core
        self._fd = fd
        self._nbytes = nbytes
        self._ahead = ahead
        self._devices = devices
        self._storages: list[torch.UntypedStorage | None] = []
        self._waiting_nbytes = 0  # of memory that was found and not asked for yet
        # What tensors are laid over: its record, and how long that is.
        self._given: list[tuple[weakref.ref[torch.UntypedStorage], str, int]] = []

    def load(self, map_location: Any, weights_only: bool) -> Any:
        """What torch.load would return.

        Raises:
            RestoreFailed: A record is damaged or could not be read.
            CutShort: A record is shorter than a tensor in it.
            Missing: The file lacks a record.
            Everything that torch.load raises behind its opening of the file.
        """
        unpickler: Any = _weights_only_unpickler if weights_only else pickle
        quick = _cpu_storages_stay_as_they_are() and (map_location is None or _is_cpu(map_location))
        places = _own_places(map_location is not None) if quick else None
        unpickler = SimpleNamespace(Unpickler=_unpickler(unpickler.Unpickler, self, places))
        try:
            for device in {*self._devices.values()}:
                new_storage(1, device)  # a context, where torch has none yet
            open_devices(self._core, numbers_of(self._devices.values()))
            self._find_memory(1)
            if self.get_record("version") not in _KNOWN_VERSIONS:
                _ = self._torch  # knows which there are, and says so
            loaded = serialization._load(self, map_location, unpickler, encoding="utf-8")  # type: ignore[no-untyped-call]
            self._find_memory(self._core.nr)
            if not self._core.wait(self._core.nr):
                raise RestoreFailed
        finally:
            self.failure = Failure(*self._core.failure())
            # First the threads, then the memory that they write to.
            self._core.close()
            self._storages.clear()
        return loaded

    def storage(self, kind: Any, key: str, numel: int) -> Any:
        """A storage of the processor's as `_load` makes it; None if it is torch's to make."""
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        if not isinstance(key, str) or self._core.find(name := f"data/{key}") < 0:
            return None
        storage = self._take(name)
        if storage.nbytes() != numel * dtype.itemsize:
            return None
        self._note_given(name, storage)
        return _typed(wrap_storage=storage, dtype=dtype)

    # ---- what `_load` calls ----

    def has_record(self, name: str) -> bool:
        return self._core.find(name) >= 0

    def get_record(self, name: str) -> bytes:
        data = bytes_of(self._take(name))
        if name == "byteorder":
            self.is_native = data == _BYTEORDER
        return data

    def get_storage_from_record(self, name: str, nbytes: int, kind: Any) -> Any:
        storage = self._take(name)
        if storage.nbytes() != nbytes:  # torch decides what becomes of it
            return self._torch.get_storage_from_record(name, nbytes, kind)
        self._note_given(name, storage)
        return _Loaded(storage)

    def serialization_id(self) -> str:
        name = ".data/serialization_id"
        return self.get_record(name).decode() if self.has_record(name) else ""

    def __getattr__(self, name: str) -> Any:
        """What another torch may ask for."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._torch, name)

    # ---- records ----

    def _note_given(self, name: str, storage: torch.UntypedStorage) -> None:
        self._given.append((weakref.ref(storage), name, storage.nbytes()))

    def refuse_short(self) -> None:
        """Raises CutShort where a storage had to grow under a tensor: with what, nobody knows.
        torch.load's storages cannot grow."""
        for alive, name, nbytes in self._given:
            storage = alive()
            if storage is not None and storage.nbytes() != nbytes:
                raise CutShort(name)

    @functools.cached_property
    def _torch(self) -> Any:
        """torch's own reader of the same file."""
        return torch._C.PyTorchFileReader(cast("IO[bytes]", _core.File(self._fd, self._nbytes)))

    def _take(self, name: str) -> torch.UntypedStorage:
        """The record's bytes, there and checked. The caller owns them from now on."""
        index = self._core.find(name)
        if index < 0:
            raise Missing(name)
        reach = self._core.reach(index)  # neighbours that share a piece of the file need theirs too
        if reach > len(self._storages) or self._waiting_nbytes < self._ahead // 2:
            self._find_memory(reach)
        if not self._core.wait(index):
            raise RestoreFailed
        storage, self._storages[index] = self._storages[index], None
        if storage is None:  # asked for a second time: torch keeps all but empty ones
            return _storage_of(self._torch.get_record(name))
        self._waiting_nbytes -= storage.nbytes()
        return storage

    def _find_memory(self, least: int) -> None:
        """Gives the next records their places: `least` of all, and those that may be read ahead."""
        first = found = len(self._storages)
        while first < least or (first < self._core.nr and self._waiting_nbytes < self._ahead):
            sizes = self._core.sizes(first, _BATCH_BYTES)
            self._storages += give_memory(self._core, first, sizes, self._devices)
            self._waiting_nbytes += sum(sizes)
            first += len(sizes)
        # Not after each batch: a reader that fills new memory holds the lock of this process's
        # address space, and each further allocation would wait for it and stop the others.
        if first > found:
            self._core.go(first)


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
    """Gives records from `first` on memory of these sizes, where each belongs.

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
    # Behind the allocations: what torch gives out may still be used on its stream.
    open_devices(core, numbers_of(device for _, device in on_devices))
    for index, device in on_devices:
        address = _device.address_of(storages[index - first])
        core.into_device(index, _device.place_of(device) - 1, address)
    return storages


def numbers_of(devices: Iterable[torch.device]) -> set[int]:
    return {_device.place_of(device) - 1 for device in devices}


def open_devices(core: _core.Restore, numbers: set[int]) -> None:
    """Has what is read from now on come behind what is on the current streams of these devices.

    Raises:
        StillframeError: One cannot be had.
    """
    for number in sorted(numbers):
        if why := core.device(number, _device.current_stream(number)):
            raise StillframeError(f"nothing can be loaded to a device: {why}")


def _own_places(everything: bool) -> Callable[[str], bool]:
    """Which places are the processor's; with `everything`, all are."""
    return (lambda _: True) if everything else "cpu".__eq__


def _unpickler(base: Any, archive: Archive, own: Callable[[str], bool] | None) -> Any:
    """torch's unpickler, with a short cut for storages of the places that are the processor's own,
    where it may be taken.

    `_load` asks three times for every storage whether tensors are to be fake, and where it belongs;
    of a checkpoint of many small tensors that is a quarter of the whole load.

    A class is in a circle with itself and lives until garbage is collected: it must not keep the
    archive, with its threads and memory, where a Ctrl-C has kept that from being closed.
    """
    alive = weakref.ref(archive)

    class Unpickler(base):  # type: ignore[misc]
        def load(self) -> Any:
            archive = alive()
            assert archive is not None
            if own is not None:
                theirs: Callable[[Any], Any] = super().__getattribute__("persistent_load")
                self.persistent_load = _short_cut(archive, own, theirs)
            loaded = super().load()
            archive.refuse_short()
            return loaded

    return Unpickler


def _short_cut(
    archive: Archive, own: Callable[[str], bool], theirs: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    made: dict[str, Any] = {}

    def persistent_load(saved: Any) -> Any:
        if type(saved) is tuple and len(saved) == 5 and saved[0] == "storage":
            _, kind, key, location, numel = saved
            if key in made:
                return made[key]
            if own(location) and archive.is_native:
                storage = archive.storage(kind, key, numel)
                if storage is not None:
                    if storage._data_ptr():  # an empty one is made anew, as torch does
                        made[key] = storage
                    return storage
        return theirs(saved)

    return persistent_load


_typed: Any = functools.partial(torch.storage.TypedStorage, _internal=True)


def _is_cpu(map_location: Any) -> bool:
    return isinstance(map_location, (str, torch.device)) and str(map_location) == "cpu"


def _cpu_storages_stay_as_they_are() -> bool:
    """Whether nobody has registered something else to be done with what was saved on the CPU."""
    return serialization._package_registry[0][2] is serialization._cpu_deserialize


class Shapes:
    """An archive of which only the pickle is read: every tensor is on the meta device.

    Its storages know their records by the offset that torch has them note for such loads.

    Attributes:
        sizes: How long each record is.
    """

    _NAMES = ("data.pkl", "byteorder")

    def __init__(self, core: _core.Restore) -> None:
        self.sizes = core.sizes(0, EVERYTHING)
        self._core = core
        self._records: dict[str, bytes] = {}

    def load(self, weights_only: bool) -> Any:
        """As `Archive.load`."""
        unpickler = _weights_only_unpickler if weights_only else pickle
        names = [name for name in self._NAMES if self._core.find(name) >= 0]
        try:
            self._records = dict(zip(names, read(self._core, tuple(names)), strict=True))
            if self._records.get("byteorder", _BYTEORDER) != _BYTEORDER:
                raise RestoreFailed  # its bytes need turning round
            return serialization._load(self, "meta", unpickler, encoding="utf-8")  # type: ignore[no-untyped-call]
        finally:
            self._core.close()

    def has_record(self, name: str) -> bool:
        return name in self._records  # without .format_version torch asks for each offset

    def get_record(self, name: str) -> bytes:
        return self._records[name]

    def get_record_offset(self, name: str) -> int:
        index = self._core.find(name)
        if index < 0:
            raise Missing(name)
        return index

    def serialization_id(self) -> str:
        return ""  # at the file's end: not worth reading all before it


def record_of(tensor: torch.Tensor) -> int | None:
    """Which record a tensor of `Shapes` lives in; None where it wraps others that do."""
    return tensor.untyped_storage()._checkpoint_offset


def can(core: _core.Restore, map_location: Any) -> str | None:
    """None where an archive can be read this way, or why it is one for torch.load."""
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
    """Whether torch.load gives tensors without the file's bytes here."""
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
    """The archive for a load to `map_location`; as for `Archive`."""
    final = map_location is None or _is_cpu(map_location) or bool(devices)
    return Archive(core, fd, nbytes, _AHEAD_BYTES if final else _DEVICE_AHEAD_BYTES, devices)
