"""Saves of two to four ranks on gloo, each in its own process. many_ranks.py has the scenarios."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fix_dcp import loaded
from fix_processes import run_program
from fix_ranks import notes_of
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ranks")
    run_program(HERE / "many_ranks.py", directory, timeout=600, STILLFRAME_POOL_BYTES="64MiB")
    return directory


@pytest.fixture
def notes(directory: Path) -> Any:
    """Return a function that returns each rank's notes of a scenario."""
    return functools.partial(notes_of, directory)


def test_fsdp2_saves_hold_the_state_at_each_call(notes):
    for rank in notes("fsdp2"):
        assert rank["good"] == [True] * 4
        assert rank["leased"] == 0


def test_only_the_first_save_of_a_structure_is_planned(notes):
    for rank in notes("fsdp2"):
        assert rank["plans"] == [0]


def test_known_structure_exchanges_only_numbers_and_a_changed_one_is_planned(notes):
    planned = ["exchange", "exchange", "gather", "exchange", "scatter"]
    moved = ["exchange", "gather", "exchange"]
    for rank in notes("structures"):
        for case in ("first", "wider on one rank"):
            assert rank[case] == [True, *planned, *moved, "broadcast"], case
        for case in ("same", "that again"):
            assert rank[case] == [True, "exchange", "exchange", "exchange"], case
        for case in ("a longer object",):
            assert rank[case] == [True, "exchange", *moved], case
        assert rank["as the first"][0]


def test_planner_error_of_one_rank_reaches_all_ranks(notes):
    for rank in notes("planner_refuses"):
        for step in ("local plan", "global plan", "data"):
            failure = rank[step]
            assert failure.startswith("CheckpointException") and f"no {step}" in failure
            assert rank[f"{step} left"] == []
        assert rank["good"]


def test_another_number_of_ranks_loads_the_checkpoint(notes, directory, tmp_path):
    for rank in notes("other_world", 3, 3):
        assert rank["good"]
    full = torch.load(directory / "2/fsdp2/full.pt")
    for path in ("2/fsdp2/last", "3/other_world/c"):
        new = {"model": {name: torch.zeros_like(value) for name, value in full.items()}}
        dcp.load(new, checkpoint_id=directory / path, no_dist=True)
        assert all(torch.equal(new["model"][name], full[name]) for name in full)
    dcp_to_torch_save(directory / "2/fsdp2/last", tmp_path / "file.pt")
    found = torch.load(tmp_path / "file.pt", weights_only=False)["model"]
    assert all(torch.equal(found[name], full[name]) for name in full)


def test_replicated_tensors_are_written_once(notes):
    both = notes("replicated")
    assert all(rank["good"] for rank in both)
    assert 200_000 < sum(rank["nbytes"] for rank in both) < 250_000


def test_stager_and_writer_can_be_combined_with_pytorchs(notes):
    for rank in notes("crossed"):
        assert len(rank) == 8 and all(rank.values()), rank


def test_back_to_back_saves_without_a_wait_hold_their_own_states(notes):
    for rank in notes("back_to_back"):
        assert rank["good"] == [True] * 4


def test_full_disk_of_one_rank_fails_all_and_keeps_the_old_checkpoint(notes):
    for rank in notes("full_disk"):
        for failure in (rank["next"], rank["own"]):
            assert failure.startswith("CheckpointException") and "No space" in failure
        assert rank["old"] and rank["files"] and rank["new"]


def test_failed_commit_of_ranks_keeps_the_old_checkpoint_only(notes):
    for rank in notes("commit_fails"):
        assert "no metadata today" in rank["failure"] and rank["old"] and rank["files"]


def test_copy_error_of_one_rank_reaches_all_ranks(notes):
    zero, one = notes("stage_fails")
    assert one["failure"] == "call: PoolExhaustedError"
    assert zero["failure"].startswith("CheckpointException") and "does not fit" in zero["failure"]
    for rank in (zero, one):
        assert rank["in time"] and rank["new"]


def test_error_that_only_one_rank_collected_makes_no_rank_hang(notes):
    zero, one = notes("seen_by_one")
    assert one["failure"] == "call: CheckpointException"
    assert "nothing was saved" in zero["failure"] and "[1]" in zero["failure"]
    assert zero["new"] and one["new"]


def test_save_under_way_survives_destroy_process_group(notes):
    for rank in notes("groups"):
        assert rank["good"] == [True] * 6
        planned, new, closed = rank["failure"]
        assert planned == new == ""
        assert closed.startswith("the process group was destroyed while the save of /")
        assert rank["kept"] == 0 and rank["threads"] == 1


def test_busy_rank_makes_all_ranks_raise(notes):
    for rank in notes("busy"):
        assert rank["failure"].startswith("BusyError")


def test_subgroup_saves_alone_and_refuses_when_busy_raise(notes):
    for rank in notes("busy"):
        assert rank["few"].startswith("ValueError") and "process_group of all ranks" in rank["few"]
        assert rank["own"]


def test_ranks_at_different_calls_get_an_error(notes):
    for rank in notes("out_of_step"):
        assert "not all ranks are at the same call" in rank["failure"]


def test_ranks_with_different_paths_get_an_error_and_write_nothing(notes):
    for number, rank in enumerate(notes("wrong_order")):
        for name, failure in zip("ba" if number else "ab", rank["failure"], strict=True):
            assert failure.startswith("StillframeError: not all ranks save to the same path")
            assert f"/wrong_order/{name}, and the ranks [{1 - number}] elsewhere" in failure
        assert rank["files"] and rank["good"] == [True] * 3


def test_no_dist_makes_each_process_save_alone(notes):
    for rank in notes("alone"):
        assert rank["good"]


def test_path_removed_and_saved_again_by_all_ranks_has_the_new_checkpoint(notes):
    for rank in notes("removed"):
        assert rank == {"done": True, "there": True, "new": True}


def test_slow_disk_of_one_of_four_ranks_is_waited_for(notes, directory):
    assert all(rank["good"] for rank in notes("four", 4, 4))
    assert all(rank["good"] for size in (2, 3) for rank in notes("from_four", size, size))
    full = torch.load(directory / "4/four/full.pt")
    new = {"model": {name: torch.zeros_like(value) for name, value in full.items()}}
    dcp.load(new, checkpoint_id=directory / "4/four/last", no_dist=True)
    assert all(torch.equal(new["model"][name], full[name]) for name in full)


def test_full_disk_of_one_of_four_ranks_with_several_files_fails_all(notes):
    for rank in notes("four", 4, 4):
        assert rank["failure"].startswith("CheckpointException") and "No space" in rank["failure"]
        assert rank["old"]


@pytest.mark.parametrize(("size", "living"), [(2, [0]), (4, [0, 1, 3])])
def test_killed_rank_fails_the_others_and_keeps_the_old_checkpoint(directory, size, living):
    path = directory / str(size) / "killed"
    for rank in living:
        note = json.loads((path / f"rank{rank}.json").read_text())
        assert "raised" not in note, note["raised"]
        assert note["failure"] and "Timeout" not in note["failure"]
        assert note["took"] < 30  # much less than the group's timeout
        assert "a rank is gone" in note["next"]
    ones = {f"w{rank}": torch.ones(1000) for rank in range(size)}
    found = loaded(ones, path / "c")
    assert all((value == 1).all() for value in found.values())


# For each kill: the surviving rank, the data files and temporaries left, and which checkpoint
# loads. If one rank dies before its data is written, the other may not have written its own.
KILLED = {
    "data written": (0, 3, {".stillframe", ".metadata"}, 1),
    "data named": (0, 4, {".metadata"}, 1),
    "data of the first written": (1, 3, {".stillframe", ".metadata"}, 1),
    "metadata written": (1, 4, {".metadata"}, 1),
    "metadata named": (1, 4, set(), 2),
    "committed": (1, 4, set(), 2),
}


@pytest.mark.parametrize("step", KILLED)
def test_kill_of_a_rank_at_any_step_leaves_a_loadable_checkpoint(notes, directory, step):
    living, nr_data, temporaries, value = KILLED[step]
    note = json.loads((directory / step / f"killed_at/rank{living}.json").read_text())
    assert "closed" in note["failure"] or "reset" in note["failure"]
    assert note["took"] < 30  # much less than the group's timeout
    for rank in notes("after_kills", "after"):
        left, values, is_good, files = rank[step]
        assert values == [value]
        temporary = [name for name in left if name.endswith(".tmp")]
        missing = nr_data - sum(name.endswith(".distcp") for name in left)
        kinds = {re.split(r"(?<=\w)\W", name)[0] for name in temporary}
        if step.startswith("data"):
            assert missing in (0, 1) and temporaries - {".metadata"} <= kinds <= temporaries
        else:
            assert missing == 0 and kinds == temporaries
        assert is_good
        assert files[0] == ".metadata" and len(files) == 3  # with a data file of each rank


def test_killed_rank_of_a_subgroup_is_noticed_at_the_timeout(directory):
    """Other code may use that group, so stillframe does not destroy it."""
    paths = [directory / "beside/few_killed" / f"rank{rank}.json" for rank in (0, 1, 3)]
    failures = [json.loads(path.read_text())["failure"] for path in paths]
    assert any("timed out" in each.lower() for each in failures), failures
    ones = {f"w{rank}": torch.ones(1000) for rank in range(4)}
    found = loaded(ones, directory / "beside/few_killed/c")
    assert all((value == 1).all() for value in found.values())


def test_fsdp1_sharded_and_full_states_hold_the_values_at_the_call(notes):
    for rank in notes("fsdp1"):
        assert rank["full False"] == [True, "ShardedTensor"]
        assert rank["full True"] == [True, "Tensor"]


def test_stager_refuses_a_sharded_tensor(notes):
    for rank in notes("fsdp1"):
        assert rank["stager"].startswith("TypeError") and "ShardedTensor" in rank["stager"]
