"""Everything here runs twice: on the CPU, and with CPU tensors taken for ones on CUDA device 0 over
the fake driver, where no rule of the driver's may be broken and nobody may wait for the device."""

from collections.abc import Iterator

import pytest
import torch
from fix_driver import fake as fake


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of torch's that share small work on a busy machine wait for each other most of the
    time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["cpu", "fake"])
def either(request: pytest.FixtureRequest) -> str:
    """On the CPU, and over the fake driver."""
    if request.param == "fake":
        request.getfixturevalue("fake")
    return str(request.param)
