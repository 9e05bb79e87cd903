"""Runs each test of this folder on the CPU and on the fake driver.

On the fake driver, CPU tensors count as tensors of CUDA device 0. A test fails there if it breaks a
rule of the driver or makes the host wait for the device."""

import pytest
from fix_driver import fake as fake


@pytest.fixture(params=["cpu", "fake"])
def either(request: pytest.FixtureRequest) -> str:
    """Run the test on the CPU and on the fake driver."""
    if request.param == "fake":
        request.getfixturevalue("fake")
    return str(request.param)
