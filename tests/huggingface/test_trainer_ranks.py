"""Two ranks on gloo, started by torchrun: one directory has the files of both."""

import json
from pathlib import Path

import pytest
from fix_processes import run_program
from fix_trainer import differences, files_of

HERE = Path(__file__).parent
SCENARIOS = (
    "trains",
    "trains_theirs",
    "hears_late",
    "resumes",
    "other_rank_fails",
    "leader_fails_before_the_other_writes",
    "full_disk",
)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ranks")
    program = HERE / "trainer_ranks.py"
    run_program(program, *SCENARIOS, ranks=2, cwd=directory)
    return directory


def notes(ran, scenario):
    return [json.loads((ran / scenario / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def test_directory_has_the_files_of_all_ranks_as_with_transformers(ran):
    files = files_of(ran / "trains/out")
    assert {"checkpoint-8/rng_state_0.pth", "checkpoint-8/rng_state_1.pth"} <= set(files)
    assert differences(ran / "trains/out", ran / "trains_theirs/out") == []


def test_every_rank_learns_when_the_checkpoint_is_durable(ran):
    for rank, note in enumerate(notes(ran, "trains")):
        assert note["submitted"] == [[step, rank == 0] for step in (2, 4, 6, 8)]
        assert note["saved"] == [[step, True] for step in (2, 4, 6, 8)]


def test_checkpoint_is_not_rotated_until_every_rank_knows_that_it_is_durable(ran):
    for note in notes(ran, "hears_late"):
        assert note["saved"] == [[step, True] for step in (2, 4, 6, 8)]
        assert note["left"] == ["checkpoint-8"]


def test_all_ranks_resume_from_the_same_step(ran):
    assert [note["step"] for note in notes(ran, "resumes")] == [8, 8]


def test_failed_save_raises_on_every_rank(ran):
    first, second = (note["error"] for note in notes(ran, "full_disk"))
    assert "No space left" in first
    assert "rank 0" in second
    assert notes(ran, "full_disk")[0]["left"] == ["checkpoint-2"]


def test_directory_that_a_late_rank_makes_again_is_removed(ran):
    first, second = notes(ran, "leader_fails_before_the_other_writes")
    assert first["error"].startswith("OSError") and "rank 0" in second["error"]
    assert first["left"] == second["left"] == ["checkpoint-2"]


def test_rank_that_cannot_write_its_files_fails_the_checkpoint(ran):
    first, second = (note["error"] for note in notes(ran, "other_rank_fails"))
    assert "rank 1" in first
    assert "broken" in first
    assert second.startswith("OSError")
    assert notes(ran, "other_rank_fails")[0]["left"] == ["checkpoint-2"]
