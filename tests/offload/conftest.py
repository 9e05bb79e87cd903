"""Everything here runs twice: on the CPU, and with CPU tensors taken for ones on CUDA device 0 over
the fake driver, where no rule of the driver's may be broken and nobody may wait for the device."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import stillframe
import torch
from stillframe import testing

ROOT = Path(__file__).parents[2]

# Before the driver is first used by any test of this process.
os.environ.setdefault("STILLFRAME_LIBCUDA", str(ROOT / "build" / "libfake_cuda.so"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of torch's that share small work on a busy machine wait for each other most of the
    time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fake() -> Iterator[testing.FakeDriver]:
    """The driver's controls."""
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


@pytest.fixture(params=["cpu", "fake"])
def either(request: pytest.FixtureRequest) -> str:
    """On the CPU, and over the fake driver."""
    if request.param == "fake":
        request.getfixturevalue("fake")
    return str(request.param)
