"""The fault injection of stillframe.testing, tested with real saves."""

import os
import time

import pytest
import stillframe
import torch
from stillframe.testing import fault, held, slow


def state(value: float = 1.0) -> dict[str, torch.Tensor]:
    """Return a state of three blocks of the fixture's engine."""
    return {"weight": torch.full((3 << 18,), value)}


@pytest.mark.parametrize("limit", [1, 4096, "half", "all but one"])
def test_short_write_is_continued(engine, tmp_path, limit):
    with fault("pwrite", nth=2, limit=limit) as injected:
        stillframe.save(state(), tmp_path / "a.pt", engine=engine)
    assert injected.hits == 1
    assert torch.equal(stillframe.load(tmp_path / "a.pt", verify=True)["weight"], state()["weight"])


def test_calls_are_counted_from_the_outermost_block_on(engine, tmp_path):
    with slow("free", 0.0) as injected:
        stillframe.save(state(), tmp_path / "a.pt", engine=engine)
        with slow("free", 0.0):
            stillframe.save(state(), tmp_path / "b.pt", engine=engine)
            assert injected.calls("fdatasync") == 2
        assert injected.calls("rename") == 2
        assert injected.calls() > 10
        assert injected.calls("printf") == 0
    with slow("free", 0.0) as injected:
        assert injected.calls() == 0


def test_blocks_nest_and_the_end_of_one_leaves_the_other(engine, tmp_path):
    path = tmp_path / "a.pt"
    with fault("fdatasync", sticky=True):
        with fault("rename"):
            pass
        with pytest.raises(stillframe.SaveError):
            stillframe.save(state(), path, engine=engine)
        with pytest.raises(stillframe.SaveError):
            stillframe.save(state(), path, engine=engine)
    stillframe.save(state(), path, engine=engine)


def test_slow_copies_delay_the_call_and_nothing_else(engine, tmp_path):
    begin = time.monotonic()
    with slow("capture_copy", 0.05, sticky=False) as injected:
        stillframe.save(state(), tmp_path / "a.pt", engine=engine)
    assert time.monotonic() - begin >= 0.05
    assert injected.hits == 1
    assert torch.equal(torch.load(tmp_path / "a.pt")["weight"], state()["weight"])


def test_held_call_waits_until_the_block_is_left(engine, tmp_path):
    with held("fdatasync", sticky=False) as injected:
        handle = stillframe.async_save(state(), tmp_path / "a.pt", engine=engine)
        while injected.hits == 0:
            time.sleep(0.001)
        assert not handle.done() and os.listdir(tmp_path) != ["a.pt"]
    handle.result()
    assert torch.equal(torch.load(tmp_path / "a.pt")["weight"], state()["weight"])


def test_the_faults_end_with_the_block_also_after_an_exception(engine, tmp_path):
    with pytest.raises(KeyError), fault("fdatasync", sticky=True):
        raise KeyError
    stillframe.save(state(), tmp_path / "a.pt", engine=engine)


@pytest.mark.parametrize(
    ("call", "options"),
    [
        ("fsink", {}),
        ("free", {}),
        ("pwrite", {"nth": 0}),
        ("pwrite", {"err": 0}),
        ("pwrite", {"limit": "third"}),
        ("pwrite", {"limit": -1}),
        ("fsync", {"limit": 1}),
    ],
)
def test_impossible_fault_raises_value_error(call, options):
    with pytest.raises(ValueError), fault(call, **options):
        pytest.fail("the block was entered")


def test_slow_and_held_refuse_invalid_calls():
    for call, nth in [("nap", 1), ("free", 0)]:
        with pytest.raises(ValueError), held(call, nth=nth):
            pytest.fail("the block was entered")
    for call, seconds, nth in [("nap", 1.0, 1), ("free", -1.0, 1), ("free", 1.0, 0)]:
        with pytest.raises(ValueError), slow(call, seconds, nth=nth):
            pytest.fail("the block was entered")


def test_too_many_faults_are_refused():
    with pytest.raises(RuntimeError):
        nest(17)
    nest(16)


def nest(depth: int) -> None:
    if depth:
        with slow("free", 0.0, nth=10**9):
            nest(depth - 1)
