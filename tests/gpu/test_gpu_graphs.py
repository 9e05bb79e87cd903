"""CUDA graphs and compiled steps on a real device: captures stay valid, replays are noticed."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import stillframe
import torch
from fix_gpu import Training, same

MIB = 1 << 20
CAPTURABLE = functools.partial(torch.optim.AdamW, capturable=True)


@pytest.fixture
def engine() -> Any:
    with stillframe.Engine(pool_bytes=256 * MIB, block_bytes=4 * MIB) as engine:
        engine.warm_up(128 * MIB)
        yield engine


def test_save_inside_a_graph_capture_is_refused_and_does_not_break_it(tmp_path, engine):
    value = torch.ones(MIB, device="cuda")
    stillframe.save([value], tmp_path / "a.pt", engine=engine)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value.add_(1.0)
        with pytest.raises(stillframe.StillframeError, match="graph"):
            stillframe.async_save([value], tmp_path / "a.pt", engine=engine)
        with pytest.raises(stillframe.StillframeError, match="graph"):
            stillframe.snapshot([value], engine=engine)
    graph.replay()
    assert value.eq(2.0).all()


def test_copies_of_a_save_do_not_break_a_graph_capture(tmp_path, engine):
    """In torch's default capture mode, a query of an event by any thread breaks the capture."""
    training = Training(CAPTURABLE)
    extra = torch.zeros(MIB, device="cuda")
    torch.cuda.synchronize()
    for _ in range(5):
        wanted = training.now()
        handle = stillframe.async_save(training.state(), tmp_path / "a.pt", engine=engine)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(200):
                extra.add_(1.0)
        graph.replay()
        handle.result()
        same(torch.load(tmp_path / "a.pt", map_location="cpu"), wanted)


def test_captured_step_is_detected_and_its_replays_tear_no_save(tmp_path, engine):
    training = Training(CAPTURABLE)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            training.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.step()
    for _ in range(5):
        graph.replay()
        wanted = training.now()
        handle = stillframe.async_save(training.state(), tmp_path / "a.pt", engine=engine)
        graph.replay()
        report = handle.result()
        assert report.deferred_nbytes == 0
        same(torch.load(tmp_path / "a.pt", map_location="cpu"), wanted)


def test_compiled_step_waits_for_the_copy(tmp_path, engine):
    training = Training(CAPTURABLE)
    try:
        step = torch.compile(training.optimizer.step)
        training.model(training.input).square().mean().backward()
        step()
    except Exception as error:  # a machine without a working Triton
        pytest.skip(f"torch.compile does not work here: {error}")
    for _ in range(4):
        wanted = training.now()
        handle = stillframe.async_save(training.state(), tmp_path / "a.pt", engine=engine)
        training.optimizer.zero_grad(set_to_none=False)
        training.model(training.input).square().mean().backward()
        step()
        handle.result()
        same(torch.load(tmp_path / "a.pt", map_location="cpu"), wanted)
