"""The devices that a checkpoint's records go to, according to torch.load's map_location.

torch decides the location of each storage when it unpickles it, one by one. Records are read ahead
of that, straight to their device. If map_location names one device, all go there. Otherwise it
depends on where each storage was saved, which only the pickle says: it is looked up first, by a
reader that imports and runs nothing.
"""

from __future__ import annotations

import functools
import io
import itertools
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


def find(peek: _core.Restore, map_location: Any) -> dict[int, torch.device]:
    """Return the records that go to devices, by number; none if torch has to place any of them.

    Args:
        peek: A restore of the file that has not begun; it is closed here.
    """
    try:
        devices = _devices(peek, map_location)
        numbers = {key: peek.find(f"data/{key}") for key in devices}
    except Exception as error:  # whatever it is: the load itself reports a bad pickle
        _logger.debug("by way of host memory: no devices were found ahead: %r", error)
        return {}
    finally:
        peek.close()
    return {
        numbers[key]: device
        for key, device in devices.items()
        if device is not None and numbers[key] >= 0
    }


def _devices(peek: _core.Restore, map_location: Any) -> dict[str, torch.device | None]:
    """Return the device of each storage, by its key; none if its bytes have another order."""
    if isinstance(map_location, (str, torch.device)):
        # All go there, so the pickle need not be read. torch numbers storages from 0 on.
        (byteorder,) = records.read(peek, ("byteorder",))
        device = _device.of_location(str(map_location))
        keys = itertools.takewhile(
            lambda key: peek.find(f"data/{key}") >= 0, map(str, itertools.count())
        )
        return dict.fromkeys(keys, device) if byteorder == _BYTEORDER else {}
    pickle, byteorder = records.read(peek, ("data.pkl", "byteorder"))
    if byteorder != _BYTEORDER:
        return {}
    moved = map_location or {}
    return {
        key: _device.of_location(str(moved.get(location, location)))
        for key, location in _Locations(pickle).found.items()
    }


def may_find(map_location: Any) -> bool:
    """Return False if `find` cannot find any device, judging by this process and map_location
    alone."""
    if callable(map_location) or not (_device.may_be_loaded_to() and _is_torchs_rule_known()):
        return False
    if isinstance(map_location, (str, torch.device)):
        return _device.of_location(str(map_location)) is not None
    return True


@functools.cache
def _is_torchs_rule_known() -> bool:
    """Return whether this torch restores the location "cuda" as this module does.

    It does not if other code has registered a rule of its own before torch's.
    """
    registry = serialization._package_registry
    device_of = getattr(registry[1][2], "func", None) if len(registry) > 1 else None
    return (
        registry[0][2] is serialization._cpu_deserialize
        and device_of is serialization._deserialize
        and registry[1][2].args == ("cuda",)  # type: ignore[attr-defined]
    )


class _Locations(keypaths.Reader):
    """The locations that a pickle records for its storages."""

    def __init__(self, pickle: bytes) -> None:
        super().__init__(io.BytesIO(pickle))
        self.found: dict[str, str] = {}
        self.load()

    def persistent_load(self, pid: Any) -> keypaths.Storage:
        storage = super().persistent_load(pid)
        self.found[storage.key] = storage.location
        return storage
