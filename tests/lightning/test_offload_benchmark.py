"""benchmarks/callback.py measures what it says it does."""

import importlib
import pathlib
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    yield importlib.import_module("callback")
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT / "benchmarks")):
            del sys.modules[name]


@pytest.mark.parametrize("way", ["none", "naive", "stillframe"])
def test_benchmarked_variant_leaves_copies_in_the_checkpoint(benchmark, way):
    tensors = benchmark.plain_tensors(4000, 10)
    assert sum(tensor.nbytes for tensor in tensors.values()) == 4000
    checkpoint = {"state_dict": dict(tensors)}
    benchmark._callback_hook(way)(checkpoint)
    new = checkpoint["state_dict"]
    assert list(new) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(new[name], tensor)
        assert (new[name].data_ptr() == tensor.data_ptr()) == (way == "none")


@pytest.mark.parametrize("way", ["memcpy", "none", "naive", "stillframe"])
def test_benchmark_reports_the_time_of_each_save(benchmark, way):
    saves = benchmark.Saves(way, 4000, 10)
    for _ in range(2):
        seconds, _, freed = saves.save()
        assert seconds >= 0 and freed == 0
