"""Which records of a checkpoint go to which device: as torch.load's map_location has it.

torch tells a storage's place when its pickle is unpickled, one by one. The records are read ahead
of that, straight to where they belong: so the pickle's storages are looked up first, by a reader
that imports and runs nothing.
"""

from __future__ import annotations

import functools
import io
import logging
import sys
from collections.abc import Callable
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
    """The records that go to devices, by number; none where torch has to place any of them.

    Args:
        peek: A restore of the file that has not begun; it is closed here.
    """
    try:
        locations = _locations(peek)
        to = _rule(map_location)
        devices = {key: _device.of_location(to(place)) for key, place in locations.items()}
        numbers = {key: peek.find(f"data/{key}") for key in devices}
    except Exception as error:  # of any kind: the load itself says what is wrong with a pickle
        _logger.debug("by way of host memory: no places were found ahead: %r", error)
        return {}
    finally:
        peek.close()
    return {
        numbers[key]: device
        for key, device in devices.items()
        if device is not None and numbers[key] >= 0
    }


def worth_a_look(map_location: Any) -> bool:
    """Whether `find` may find any, as far as this process and its map_location tell."""
    if callable(map_location) or not (_device.may_be_loaded_to() and _torch_places_as_known()):
        return False
    if isinstance(map_location, (str, torch.device)):
        return _device.of_location(str(map_location)) is not None
    return True


def _rule(map_location: Any) -> Callable[[str], str]:
    """Where torch.load puts what was saved at a place."""
    if map_location is None:
        return lambda place: place
    if isinstance(map_location, dict):
        return lambda place: str(map_location.get(place, place))
    return lambda place: str(map_location)


def _locations(peek: _core.Restore) -> dict[str, str]:
    """Where a pickle's storages were saved; none if their bytes need turning round."""
    pickle, byteorder = records.read(peek, ("data.pkl", "byteorder"))
    return _Locations(pickle).found if byteorder == _BYTEORDER else {}


@functools.cache
def _torch_places_as_known() -> bool:
    """Whether "cuda" means to this torch's loads what it means here, and nobody comes before."""
    registry = serialization._package_registry
    device_of = getattr(registry[1][2], "func", None) if len(registry) > 1 else None
    return (
        registry[0][2] is serialization._cpu_deserialize
        and device_of is serialization._deserialize
        and registry[1][2].args == ("cuda",)  # type: ignore[attr-defined]
    )


class _Locations(keypaths.Reader):
    """Where the storages of a pickle were when it was made."""

    def __init__(self, pickle: bytes) -> None:
        super().__init__(io.BytesIO(pickle))
        self.found: dict[str, str] = {}
        self.load()

    def persistent_load(self, pid: Any) -> keypaths.Storage:
        storage = super().persistent_load(pid)
        self.found[storage.key] = storage.location
        return storage
