"""The tests' CUDA driver: over it, tensors in host memory are taken for ones on CUDA device 0."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import stillframe
from stillframe import testing

# Before the driver is first used by any test of this process.
os.environ.setdefault(
    "STILLFRAME_LIBCUDA", str(Path(__file__).parents[2] / "build/libfake_cuda.so")
)


@pytest.fixture
def fake() -> Iterator[testing.FakeDriver]:
    """The driver's controls; afterwards no rule was broken and nobody waited for the device."""
    with testing.host_as_device() as driver:
        driver.reset()
        yield driver
        driver.hold(False)
        # An error that the test did not ask for is the test's business.
        with contextlib.suppress(stillframe.StillframeError):
            stillframe.wait_all(timeout=60)
        violations, syncs = driver.violations, driver.calls("sync")
        driver.reset()
        assert violations == [], violations
        assert syncs == 0
