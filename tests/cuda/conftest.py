"""Everything here saves tensors in host memory as if they lived on CUDA device 0, over the fake
driver of tests/c/cuda/fake_cuda.c, and fails when a rule of the driver's was broken."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import stillframe
from stillframe import testing

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "build" / "libfake_cuda.so"

# Before the driver is first used by any test of this process.
os.environ.setdefault("STILLFRAME_LIBCUDA", str(LIBRARY))


@pytest.fixture(autouse=True)
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
        assert violations == []
        assert syncs == 0
