"""How often a save from a device calls the driver, and how soon its bytes are deferred."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from stillframe.testing import FakeDriver

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from gpu_counts import bounds, count

MIB = 1 << 20


@pytest.mark.parametrize("batches", [True, False], ids=["batches", "single copies of rows"])
def test_few_calls_and_nearly_all_bytes_are_deferred(
    batches: bool, tmp_path: Path, fake: FakeDriver
) -> None:
    if not batches:  # the driver's age that has batches of spans, and none of rows
        fake.fail("cuMemcpy3DBatchAsync_v2", sticky=True, code=801)
    found = count(tmp_path, nbytes=72 << 10, block_bytes=4 * MIB)
    assert found["tensors"] == 1200
    for what, figure, most in bounds(found):
        if not batches and what.startswith("calls in async_save"):
            most += 1200  # one a storage, and no more
        assert figure <= most, what
    assert found["call"]["samples"] > 0
    assert found["deferred_after_step"][0] == 0
