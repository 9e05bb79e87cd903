"""Runs each test of this folder with host tensors that count as tensors of CUDA device 0.

The fake driver of tests/c/cuda/fake_cuda.c copies them. A test that breaks a rule fails."""

import pytest
from fix_driver import fake as fake
from stillframe import testing


@pytest.fixture(autouse=True)
def over_the_driver(fake: testing.FakeDriver) -> None:
    """Install the fake driver for every test, whether or not the test uses its controls."""
