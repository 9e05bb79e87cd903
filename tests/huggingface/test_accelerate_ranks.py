"""Accelerate on two gloo ranks, started by torchrun: one directory with the files of both."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from fix_processes import run_program, run_python

HERE = Path(__file__).parent
NAMES = [
    "custom_checkpoint_0.pkl",
    "model.safetensors",
    "optimizer.bin",
    "random_states_0.pkl",
    "random_states_1.pkl",
    "scheduler.bin",
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Run all scenarios; return `ran(scenario)`, the notes of both ranks."""
    directory = tmp_path_factory.mktemp("accelerate")
    run_program(HERE / "accelerate_ranks.py", directory, ranks=2)
    assert sorted(path.name for path in (directory / "last").iterdir()) == NAMES

    def notes(scenario):
        both = [
            json.loads((directory / f"{scenario}-{rank}.json").read_text()) for rank in range(2)
        ]
        for each in both:
            assert "failed" not in each, each["failed"]
        return both

    return notes


def test_files_of_all_ranks_are_those_of_accelerate(ran):
    expected = {"equal": True, "names": sorted([*NAMES, "scaler.pt"]), "state": "durable"}
    for note in ran("same_files"):
        assert note == expected | {"scale": 1.0}  # the leader's


def test_all_ranks_resume_from_a_save_in_flight(ran):
    assert ran("resumes") == [{"count": 3, "same": True}] * 2


def test_the_directory_appears_with_the_files_of_all_ranks(ran):
    assert ran("appears_whole") == [{"before": [False, False], "names": NAMES}] * 2


def test_total_limit_holds_with_several_ranks(ran):
    assert ran("keeps_the_newest") == [{"names": ["checkpoint_3"]}] * 2


def test_full_disk_is_reported_to_all_ranks_and_keeps_the_old_checkpoint(ran):
    first, other = ran("full_disk")
    assert first["error"] == "SaveError"
    assert other["error"] == "StillframeError"
    assert "No space left on device" in other["words"]
    for note in first, other:
        assert note["state"] == "failed"
        assert note["kept"]
        assert note["left"] == ["c"]


def test_error_of_one_rank_leaves_nothing_and_is_raised_by_the_leader(ran):
    first, other = ran("hook_of_one_rank_fails")
    assert other["raised"] == ["RuntimeError", "the hook fails"]
    assert first["raised"][0] == "StillframeError"
    assert "rank 1" in first["raised"][1]
    assert "the hook fails" in first["raised"][1]
    for note in first, other:
        assert note["names"] == NAMES
    assert first["left"] == []


@pytest.mark.parametrize("scenario", ["hook_of_the_leader_fails", "directory_is_made_anew"])
def test_error_of_the_leader_is_raised_on_all_ranks_and_the_name_is_used_again(ran, scenario):
    first, other = ran(scenario)
    assert first["left"] == other["left"] == []
    assert first["raised"] == ["RuntimeError", "the hook fails"]
    assert other["raised"][0] == "StillframeError"
    assert "rank 0: RuntimeError: the hook fails" in other["raised"][1]
    assert first["name"] == other["name"] == "checkpoint_0"


def test_a_skipped_save_is_skipped_on_all_ranks(ran):
    assert ran("busy_engine_skips") == [{"state": "skipped", "result": None, "there": False}] * 2


def test_a_name_that_is_taken_is_refused_on_all_ranks(ran):
    first, other = ran("name_is_taken")
    assert first["raised"][0] == "ValueError"
    assert other["raised"][0] == "StillframeError"
    assert "iteration" in other["raised"][1]
    assert first["names"] == ["checkpoint_0", "checkpoint_1"]


def test_process_can_end_while_a_thread_asks_for_the_end_of_saves():
    code = """
        import time, torch.distributed as dist
        from stillframe._huggingface import accelerator_saves
        store = dist.TCPStore("127.0.0.1", 0, 1, True)
        class Ranks:
            def has_ended(self, number):
                return store.check(["never"])
        accelerator_saves._POLL_S = 0  # a thread is in the store at every moment
        handle = accelerator_saves.FollowerSaveHandle
        handles = [handle("a", Ranks(), number) for number in range(8)]
        time.sleep(0.2)
    """
    done = run_python("-W", "ignore", "-c", textwrap.dedent(code))
    assert done.returncode == 0, done.stderr


def test_each_node_keeps_a_checkpoint_of_its_own(ran):
    for rank, note in enumerate(ran("saves_on_each_node")):
        own = [*NAMES[:3], f"random_states_{rank}.pkl", "scheduler.bin"]
        assert note["names"] == [f"checkpoints/checkpoint_1/{name}" for name in own]
