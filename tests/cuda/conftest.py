"""Everything here saves tensors in host memory as if they lived on CUDA device 0, over the fake
driver of tests/c/cuda/fake_cuda.c, and fails when a rule of the driver's was broken."""

import pytest
from fix_driver import fake as fake
from stillframe import testing


@pytest.fixture(autouse=True)
def over_the_driver(fake: testing.FakeDriver) -> None:
    """Of every test, whether or not it asks for the controls."""
