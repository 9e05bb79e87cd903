"""Waits for events of other threads, without assumptions about their time."""

from __future__ import annotations

import time
from collections.abc import Callable

import stillframe


def eventually(holds: Callable[[], bool], timeout_s: float = 60) -> bool:
    """Wait until `holds()` is true; return False after the timeout."""
    end = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def leased(engine: stillframe.Engine) -> int:
    """Return the bytes of the engine's pool that are in use."""
    return int(engine.stats()["leased_bytes"])
