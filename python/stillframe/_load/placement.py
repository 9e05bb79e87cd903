"""Finds the devices that a checkpoint's records go to, according to torch.load's map_location.

The records are read straight to their devices, before torch unpickles. If map_location names one
device, all records go there. Otherwise the device depends on where each storage was saved. To find
that, the pickle is read first, by a reader that imports and runs nothing.
"""

from __future__ import annotations

import functools
import io
import logging
import sys
from typing import Any

import torch
from torch import serialization

from stillframe import _core
from stillframe._base import device as _device
from stillframe._base import records
from stillframe._tree import keypaths

_logger = logging.getLogger("stillframe")
_BYTEORDER = sys.byteorder.encode()


def find(core: _core.Restore, map_location: Any) -> dict[int, torch.device]:
    """Return the CUDA device of each record that can be read straight to it, by record number.
    Return {} if torch has to decide on the devices itself. `core` is a restore of the file; this
    closes it."""
    device_of: dict[int, torch.device] = {}
    try:
        for key, device in _devices(core, map_location).items():
            number = core.find(f"data/{key}")  # -1 if the file lacks the record
            if device is not None and number >= 0:
                device_of[number] = device
    except Exception as error:  # the load itself reports a bad pickle
        _logger.debug("by way of host memory: no devices were found ahead: %r", error)
        return {}
    finally:
        core.close()
    return device_of


def _devices(core: _core.Restore, map_location: Any) -> dict[str, torch.device | None]:
    """Return the CUDA device of each storage by its key; None for a storage that goes to the host.
    Return {} if the file has another byte order, because torch then has to swap bytes."""
    if isinstance(map_location, (str, torch.device)):
        # Every storage goes to this device. The keys are "0", "1", ... without a gap.
        (byteorder,) = records.read(core, ("byteorder",))
        device = _device.cuda_device_of_location(str(map_location))
        keys: list[str] = []
        while core.find(f"data/{len(keys)}") >= 0:
            keys.append(str(len(keys)))
        return dict.fromkeys(keys, device) if byteorder == _BYTEORDER else {}
    pickle, byteorder = records.read(core, ("data.pkl", "byteorder"))
    if byteorder != _BYTEORDER:
        return {}
    new_locations = map_location or {}  # a dict, or None
    return {
        key: _device.cuda_device_of_location(str(new_locations.get(location, location)))
        for key, location in _StorageLocationReader(pickle).location_of.items()
    }


def may_find_devices(map_location: Any) -> bool:
    """Return False if `find` would find no device in any file."""
    if callable(map_location):
        return False  # the function chooses the devices while torch loads
    if not (_device.has_cuda_device() and _is_cuda_rule_torchs_own()):
        return False
    if isinstance(map_location, (str, torch.device)):
        return _device.cuda_device_of_location(str(map_location)) is not None
    return True


@functools.cache
def _is_cuda_rule_torchs_own() -> bool:
    """Return whether torch restores the location "cuda" by its own rule, which this module follows.
    Other code may have registered a rule before torch's."""
    # Rows of (priority, function for saving, function for loading), lowest priority first.
    registry = serialization._package_registry
    if len(registry) < 2:
        return False
    load_cpu, load_cuda = registry[0][2], registry[1][2]  # torch makes `load_cuda` with partial()
    return (
        load_cpu is serialization._cpu_deserialize
        and getattr(load_cuda, "func", None) is serialization._deserialize
        and load_cuda.args == ("cuda",)  # type: ignore[attr-defined]
    )


class _StorageLocationReader(keypaths.Reader):
    """The locations that a pickle records for its storages: `location_of` has them by key."""

    def __init__(self, pickle: bytes) -> None:
        super().__init__(io.BytesIO(pickle))
        self.location_of: dict[str, str] = {}
        self.load()

    def persistent_load(self, pid: Any) -> keypaths.Storage:
        storage = super().persistent_load(pid)
        self.location_of[storage.key] = storage.location
        return storage
