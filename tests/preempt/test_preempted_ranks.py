"""`stillframe.preemption` in several ranks. preempted_ranks.py has the scenarios."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as stock
from fix_preempt import Ended
from fix_processes import run_program

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ranks")
    program = HERE / "preempted_ranks.py"
    run_program(program, directory, folders=[HERE.parent / "dcp"], timeout=600)
    return directory


@pytest.fixture
def ranks(directory):
    """Return a function that tells how each rank of a scenario ended."""

    def ends_of(name):
        ends = [Ended(*each) for each in json.loads((directory / name / "ended.json").read_text())]
        assert [each.left for each in ends] == [[]] * len(ends)
        return ends

    return ends_of


def stops(ends):
    """Return the steps at which ranks have stopped."""
    return {each.output.partition("stopped at ")[2].split()[0] for each in ends}


# A rank may get its own signal after it has left the block: it then ends by the signal itself.
SIGNALLED, OTHERS = {143, -15}, {0}


@pytest.mark.parametrize(
    ("name", "signalled"),
    [
        ("signal_at_one", [1]),
        ("signal_at_all", [0, 1]),
        ("signals_at_different_times", [0, 1, 3]),
        ("ranks_that_meet_in_each_step", [2]),
        ("group_made_in_the_block", [0]),
        ("loop_of_its_own", [1]),
        ("one_file_of_rank_0", [0]),
        ("distributed_checkpoint", [1]),
        ("block_after_block", [0, 1]),
    ],
)
def test_all_ranks_stop_at_the_same_boundary(ranks, name, signalled):
    ends = ranks(name)
    assert len(stops(ends)) == 1, ends
    for rank, end in enumerate(ends):
        assert end.status in (SIGNALLED if rank in signalled else OTHERS), end


def test_rank_without_a_signal_continues_after_the_block(ranks):
    assert "after the block" in ranks("signal_at_one")[0].output


def test_file_of_rank_0_is_durable_before_any_rank_leaves(ranks):
    assert "durable True" in ranks("one_file_of_rank_0")[1].output


def test_loops_without_should_stop_end_after_the_same_step(ranks, directory):
    (stop,) = stops(ranks("loop_of_its_own"))
    assert torch.load(directory / "loop_of_its_own/0/last.pt") == {"steps": int(stop)}


def test_distributed_checkpoint_has_the_same_boundary_of_all_ranks(ranks):
    ends = ranks("distributed_checkpoint")
    (stop,) = stops(ends)
    assert f"loaded {stop} {stop}" in ends[0].output


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.leaves_temporaries
def test_rank_without_a_boundary_keeps_the_old_checkpoint(ranks, directory):
    path = directory / "no_boundary_of_one_rank"
    first, second = ranks("no_boundary_of_one_rank")
    assert (first.status, second.status) == (143, 143)
    assert "checkpoint was not durable when time was up" in first.output
    assert "no step boundary was reached" in second.output
    assert torch.load(path / "0/last.pt") == {"steps": 2}
    loaded = {"own0": torch.zeros(1), "own1": torch.zeros(1), "steps": 0}
    stock.load(loaded, checkpoint_id=path / "checkpoint", no_dist=True)
    assert loaded == {"own0": torch.ones(1), "own1": torch.ones(1), "steps": 1}


def test_rank_outside_the_block_is_left_out(ranks):
    outside, inside = ranks("rank_outside_the_block")
    assert (outside.status, inside.status) == (0, 143), (outside, inside)
    assert inside.output.count("no answer from rank 0: the others stop without it") == 1
    assert "stopped at" in inside.output
