"""Skips the tests of this folder, with the reason, on machines without a GPU.

`make gpu` runs them with a Python whose torch sees a device.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch


def missing() -> str:
    """Return why the tests cannot run here, or ""."""
    if torch.version.cuda is None:
        return f"needs a GPU: torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "needs a GPU: torch finds no CUDA device"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = missing()
    for item in items:
        if why and "gpu" in item.path.parent.name:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(autouse=True)
def device_is_well() -> Iterator[None]:
    """Synchronise after each test, so that a device error fails the test that caused it."""
    yield
    if not missing():
        torch.cuda.synchronize()


@pytest.fixture
def busy() -> Any:
    """Keep the current stream busy for tenths of a second; return a test whether it still is."""

    def keep() -> Any:
        event = torch.cuda.Event()
        torch.cuda._sleep(600_000_000)
        event.record()
        return lambda: not event.query()

    return keep
