"""The offload benchmark: its counts without a GPU, and its goals."""

import argparse
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture
def scripts(monkeypatch, fake):
    monkeypatch.syspath_prepend(SCRIPTS)
    before = set(sys.modules)
    import offload
    import offload_fake

    yield offload, offload_fake
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(SCRIPTS):
            del sys.modules[name]


def test_rehearsal_without_a_gpu_counts_and_claims_no_goal(scripts):
    offload, over = scripts
    figures = over.count_driver_calls(argparse.Namespace(layers=3, side=32, batch=4))
    ways = ["copies", "pageable", "pinned", "save_on_cpu", "streams", "ours"]
    assert list(figures["calls"]) == ways
    inward, outward = over.COPIES[:2]
    for way in ways:
        calls = figures["calls"][way]
        assert (calls["sync"] > 0) == (way == "save_on_cpu")
        if way != "save_on_cpu":  # save_on_cpu moves everything that autograd saves
            assert (calls[inward], calls[outward]) == (6, 3)
    assert figures["stats"]["groups_prefetched"] == 5
    judged = offload.goals(figures)
    assert len(judged) == 5 and all(each["met"] is None for each in judged.values())


def measured(compute, step, waits=0):
    """Return the figures of copies that take a second."""
    return {
        "resident": {"seconds": [compute]},
        "copies": {"seconds": 1.0, "in_gb_per_s": 50.0, "out_gb_per_s": 40.0},
        "ours": {
            "seconds": [step],
            "stats": {"share_hidden": 0.92, "onload_gb_per_s": 49.0, "offload_gb_per_s": 36.0},
            "synchronised": {"cudaStreamSynchronize": waits} if waits else {},
        },
    }


@pytest.mark.parametrize(
    ("compute", "step", "waits", "met"),
    [
        (2.0, 2.08, 0, [True, True, False, True, True]),
        (2.0, 2.12, 3, [True, True, False, False, False]),
        (0.5, 1.04, 0, [None, True, False, True, True]),  # no computation could hide the copies
    ],
)
def test_goals_are_judged_by_their_bounds(scripts, compute, step, waits, met):
    judged = scripts[0].goals(measured(compute, step, waits))
    assert [each["met"] for each in judged.values()] == met


def test_figures_count_only_the_measured_steps(scripts):
    before = {
        **dict.fromkeys(("slots_in_use", "bytes_lingering"), 0),
        "slots": 2,
        "bytes_offloaded": 10**9,
        "bytes_onloaded": 10**9,
        "stream_waited_s": 5.0,
        "offload_copy_s": 7.0,
        "onload_copy_s": 9.0,
    }
    after = {**before, "bytes_onloaded": 3 * 10**9, "onload_copy_s": 9.5, "stream_waited_s": 5.1}
    stats = scripts[0].stats_between(before, after)
    assert (stats["slots"], stats["onload_gb_per_s"], stats["offload_gb_per_s"]) == (2, 4.0, 0.0)
    assert torch.tensor(stats["share_hidden"]).isclose(torch.tensor(0.8))
