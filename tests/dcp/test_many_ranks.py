"""Two to four ranks on gloo, in processes of their own. many_ranks.py has the scenarios."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fix_dcp import loaded
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ranks")
    subprocess.run(
        [sys.executable, HERE / "many_ranks.py", directory],
        env={
            **os.environ,
            "STILLFRAME_POOL_BYTES": "64MiB",
            "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
        },
        timeout=600,
        check=True,
    )
    return directory


@pytest.fixture
def notes(directory: Path) -> Any:
    """`notes(scenario)`: what each rank noted."""

    def read(scenario: str, world: object = 2, ranks: int = 2) -> list[dict[str, Any]]:
        found = [
            json.loads((directory / str(world) / scenario / f"rank{rank}.json").read_text())
            for rank in range(ranks)
        ]
        for each in found:
            assert "raised" not in each, each["raised"]
        return found

    return read


def test_an_fsdp2_state_is_saved_beside_training_as_it_was_at_each_call(notes):
    for rank in notes("fsdp2"):
        assert rank["good"] == [True] * 4
        assert rank["leased"] == 0


def test_only_the_first_save_of_a_structure_is_planned(notes):
    for rank in notes("fsdp2"):
        assert rank["plans"] == [0]


def test_ranks_tell_each_other_a_few_numbers_and_what_has_changed_is_planned_and_saved(notes):
    planned = ["words", "words", "gathered", "words", "scattered"]
    moved = ["words", "gathered", "words"]
    for rank in notes("structures"):
        for case in ("first", "wider on one rank"):
            assert rank[case] == [True, *planned, *moved, "broadcast"], case
        for case in ("same", "that again"):
            assert rank[case] == [True, "words", "words", "words"], case
        for case in ("a longer object",):
            assert rank[case] == [True, "words", *moved], case
        assert rank["as the first"][0]


def test_what_a_users_planner_raises_on_one_rank_is_every_ranks_error(notes):
    for rank in notes("planner_refuses"):
        for step in ("local plan", "global plan", "data"):
            says = rank[step]
            assert says.startswith("CheckpointException") and f"no {step}" in says
            assert rank[f"{step} left"] == []
        assert rank["good"]


def test_another_number_of_ranks_loads_it(notes, directory, tmp_path):
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


def test_our_parts_work_with_pytorchs(notes):
    for rank in notes("crossed"):
        assert len(rank) == 8 and all(rank.values()), rank


def test_saves_that_nobody_waits_for_are_all_right(notes):
    for rank in notes("back_to_back"):
        assert rank["good"] == [True] * 4


def test_a_full_disk_of_one_rank_is_every_ranks_error_and_the_old_checkpoint_loads(notes):
    for rank in notes("full_disk"):
        for says in (rank["next"], rank["own"]):
            assert says.startswith("CheckpointException") and "No space" in says
        assert rank["old"] and rank["files"] and rank["new"]


def test_a_commit_that_fails_leaves_the_old_checkpoint_and_no_file_of_the_new(notes):
    for rank in notes("commit_fails"):
        assert "no metadata today" in rank["says"] and rank["old"] and rank["files"]


def test_a_rank_that_cannot_copy_its_state_tells_the_others(notes):
    zero, one = notes("stage_fails")
    assert one["says"] == "call: PoolExhaustedError"
    assert zero["says"].startswith("CheckpointException") and "does not fit" in zero["says"]
    for rank in (zero, one):
        assert rank["in time"] and rank["new"]


def test_an_error_that_only_one_rank_has_seen_makes_nobody_wait(notes):
    zero, one = notes("seen_by_one")
    assert one["says"] == "call: CheckpointException"
    assert "nothing was saved" in zero["says"] and "[1]" in zero["says"]
    assert zero["new"] and one["new"]


def test_groups_that_are_destroyed_leave_nothing_and_a_save_under_way_gets_through(notes):
    for rank in notes("groups"):
        assert rank["good"] == [True] * 6
        planned, new, before, behind = rank["says"]
        assert planned == new == ""
        assert before.startswith("the process group was destroyed while the save of memory://c")
        assert behind.startswith("the process group was destroyed while the save of memory://d")
        assert rank["kept"] == 0 and rank["threads"] == 1


def test_where_one_rank_is_busy_all_say_so(notes):
    for rank in notes("busy"):
        assert rank["says"].startswith("BusyError")


def test_a_group_of_some_ranks_saves_for_itself_and_cannot_ask_all_whether_they_are_busy(notes):
    for rank in notes("busy"):
        assert rank["few"].startswith("ValueError") and "process_group of all ranks" in rank["few"]
        assert rank["own"]


def test_ranks_at_different_calls_are_told(notes):
    for rank in notes("out_of_step"):
        assert "not all ranks are at the same call" in rank["says"]


def test_ranks_that_save_to_different_paths_are_told_and_nothing_is_written(notes):
    for number, rank in enumerate(notes("wrong_order")):
        for name, says in zip("ba" if number else "ab", rank["says"], strict=True):
            assert says.startswith("StillframeError: not all ranks save to the same path")
            assert f"/wrong_order/{name}, and the ranks [{1 - number}] elsewhere" in says
        assert rank["files"] and rank["good"] == [True] * 3


def test_without_dist_each_process_saves_for_itself(notes):
    for rank in notes("alone"):
        assert rank["good"]


def test_a_path_that_every_rank_removes_and_saves_to_again_has_the_new_checkpoint(notes):
    for rank in notes("removed"):
        assert rank == {"done": True, "there": True, "new": True}


def test_a_slow_disk_of_one_of_four_is_waited_for_and_fewer_ranks_load(notes, directory):
    assert all(rank["good"] for rank in notes("four", 4, 4))
    assert all(rank["good"] for size in (2, 3) for rank in notes("from_four", size, size))
    full = torch.load(directory / "4/four/full.pt")
    new = {"model": {name: torch.zeros_like(value) for name, value in full.items()}}
    dcp.load(new, checkpoint_id=directory / "4/four/last", no_dist=True)
    assert all(torch.equal(new["model"][name], full[name]) for name in full)


def test_a_full_disk_of_one_of_four_with_several_files_a_rank_is_every_ranks_error(notes):
    for rank in notes("four", 4, 4):
        assert rank["says"].startswith("CheckpointException") and "No space" in rank["says"]
        assert rank["old"]


@pytest.mark.parametrize(("size", "living"), [(2, [0]), (4, [0, 1, 3])])
def test_the_ranks_that_live_are_told_of_one_that_was_killed_and_the_old_loads(
    directory, size, living
):
    path = directory / str(size) / "killed"
    for rank in living:
        note = json.loads((path / f"rank{rank}.json").read_text())
        assert "raised" not in note, note["raised"]
        assert note["says"] and "Timeout" not in note["says"]
        assert note["took"] < 30  # and not the group's timeout
        assert "a rank is gone" in note["next"]
    ones = {f"w{rank}": torch.ones(1000) for rank in range(size)}
    found = loaded(ones, path / "c")
    assert all((value == 1).all() for value in found.values())


# Who lives, the data files and temporaries that are left, and which checkpoint loads. Where one is
# killed at its data, the other may not have come to its own.
KILLED = {
    "data written": (0, 3, {".stillframe", ".metadata"}, 1),
    "data named": (0, 4, {".metadata"}, 1),
    "data of the first written": (1, 3, {".stillframe", ".metadata"}, 1),
    "metadata written": (1, 4, {".metadata"}, 1),
    "metadata named": (1, 4, set(), 2),
    "committed": (1, 4, set(), 2),
}


@pytest.mark.parametrize("step", KILLED)
def test_wherever_a_rank_is_killed_the_other_is_told_one_checkpoint_loads_and_the_next_save_tidies(
    notes, directory, step
):
    living, nr_data, temporaries, value = KILLED[step]
    told = json.loads((directory / step / f"killed_at/rank{living}.json").read_text())
    assert "closed" in told["says"] or "reset" in told["says"]
    assert told["took"] < 30  # and not the group's timeout
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
        assert files[0] == ".metadata" and len(files) == 3  # and a data file of each


def test_in_a_group_of_some_ranks_those_that_wait_for_a_living_one_hear_of_it_at_its_timeout(
    directory,
):
    """Others than stillframe may use that group: it is not given up."""
    paths = [directory / "beside/few_killed" / f"rank{rank}.json" for rank in (0, 1, 3)]
    says = [json.loads(path.read_text())["says"] for path in paths]
    assert any("timed out" in each.lower() for each in says), says
    ones = {f"w{rank}": torch.ones(1000) for rank in range(4)}
    found = loaded(ones, directory / "beside/few_killed/c")
    assert all((value == 1).all() for value in found.values())


def test_what_fsdp1_shards_and_what_it_makes_whole_is_saved_as_it_was_at_the_call(notes):
    for rank in notes("fsdp1"):
        assert rank["full False"] == [True, "ShardedTensor"]
        assert rank["full True"] == [True, "Tensor"]


def test_a_sharded_tensor_is_refused_by_the_stager_and_never_left_live(notes):
    for rank in notes("fsdp1"):
        assert rank["stager"].startswith("TypeError") and "ShardedTensor" in rank["stager"]
