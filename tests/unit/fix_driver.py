"""The fake CUDA driver for tests, over which host tensors count as tensors on CUDA device 0."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import stillframe
from stillframe import testing

# Set before any test of this process uses the driver.
os.environ.setdefault(
    "STILLFRAME_LIBCUDA", str(Path(__file__).parents[2] / "build/libfake_cuda.so")
)


@pytest.fixture
def fake() -> Iterator[testing.FakeDriver]:
    """Yield the driver's controls; at the end no rule was broken and no call waited for the
    device."""
    with testing.host_as_device() as driver:
        driver.reset()
        yield driver
        driver.hold(False)
        # A test that causes errors checks them itself.
        with contextlib.suppress(stillframe.StillframeError):
            stillframe.wait_all(timeout=60)
        violations, syncs = driver.violations, driver.calls("sync")
        driver.reset()
        assert violations == [], violations
        assert syncs == 0
