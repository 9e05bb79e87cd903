"""Storages around the sizes of chunks of copies and writes: 1, 4 and 16 MiB."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import stillframe
import stillframe.dcp
import torch
from torch.distributed import checkpoint as dcp

MIB = 1 << 20
NUMELS = [n * MIB // 4 + more for n, more in itertools.product((1, 4, 16), (-1025, -1, 0, 1))]


def trained() -> dict[str, Any]:
    """Return parameters and momenta that saves defer, and as many tensors that they capture."""
    parameters = [torch.nn.Parameter(torch.zeros(numel)) for numel in NUMELS]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for parameter in parameters:
        parameter.grad = torch.arange(len(parameter), dtype=torch.float32)
    for _ in range(5):
        optimizer.step()
    momenta = [optimizer.state[each]["momentum_buffer"] for each in parameters]
    return {
        "optimizer": optimizer,
        "deferred": [each.detach() for each in parameters] + momenta,
        "captured": [torch.arange(numel) for numel in NUMELS[:8]],
    }


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    return trained()


def flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    tensors = state["deferred"] + state["captured"]
    return {f"t{number}": tensor for number, tensor in enumerate(tensors)}


def assert_same(found: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
    expected = flat(state)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), (name, len(tensor))


@pytest.mark.parametrize("block", [MIB, 4 * MIB, 16 * MIB])
@pytest.mark.parametrize("overlap", [True, False])
def test_long_storages_are_saved_completely(block, overlap, state, tmp_path):
    with stillframe.Engine(pool_bytes=4 * block, block_bytes=block) as engine:
        handle = stillframe.async_save(
            flat(state), tmp_path / "x.pt", durable=False, overlap=overlap, engine=engine
        )
        handle.wait_staged()  # as the next step does, which helps to copy
        report = handle.result()
    assert report is not None and (report.deferred_nbytes > 80 * MIB) == overlap
    assert_same(torch.load(tmp_path / "x.pt"), state)
    assert_same(stillframe.load(tmp_path / "x.pt"), state)


@pytest.mark.parametrize("overlap", [True, False])
def test_snapshots_of_long_storages_are_complete(overlap, state):
    with (
        stillframe.Engine(pool_bytes=256 * MIB) as engine,
        stillframe.snapshot(flat(state), overlap=overlap, engine=engine) as snapshot,
    ):
        snapshot.wait()
        assert_same(snapshot.tree, state)


@pytest.mark.filterwarnings("ignore")  # DCP warns that there is only one process
def test_sharded_saves_of_long_storages_are_complete(state, tmp_path):
    stillframe.dcp.save(flat(state), tmp_path / "a", durable=False, no_dist=True)
    found = {name: torch.zeros_like(tensor) for name, tensor in flat(state).items()}
    dcp.load(found, checkpoint_id=tmp_path / "a", no_dist=True)
    assert_same(found, state)
