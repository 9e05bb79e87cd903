"""Two ranks on gloo, real processes: spawned and forked by Lightning, and started by torchrun."""

import errno
import json
import os
from pathlib import Path

import pytest
from fix_lightning import FULL, load
from fix_processes import LIGHTNING, TORCH, run_program

TIMEOUT_S = 280
HERE = Path(__file__).parent
EVERYWHERE = ("trains", "full_disk", "full_disk_at_the_end", "resumes", "fabric")
SCENARIOS = {
    # Each of these scenarios starts two interpreters, so it takes as long as all of torchrun's
    # together.
    "spawn": EVERYWHERE if FULL else ("trains", "full_disk"),
    "fork": EVERYWHERE,
    "torchrun": (
        *EVERYWHERE,
        "full_disk_after_training",
        "finds_a_rate",
        "several_fits",
        "full_state",
        "fabric_fsdp2",
    ),
}


def starts(scenario):
    return pytest.mark.parametrize(
        "start", [start for start, each in SCENARIOS.items() if scenario in each]
    )


class Ran:
    """The results of one scenario's processes.

    Attributes:
        directory: The scenario's own.
        notes: What each rank noted.
        raised: The traceback of each process that the scenario raised in, or "".
        output: What the processes of all scenarios wrote to stderr.
    """

    def __init__(self, directory, output):
        self.directory, self.output = directory, output
        self.notes = {
            int(path.stem.removeprefix("rank")): json.loads(path.read_text())
            for path in sorted(directory.glob("rank*.json"))
        }
        self.raised = "".join(path.read_text() for path in sorted(directory.glob("raised*.txt")))

    def files(self):
        return sorted(path.name for path in (self.directory / "c").iterdir())


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Return `ran(scenario, start)`, which runs all scenarios of a start at its first call."""
    directories = {}

    def run(scenario, start):
        if start not in directories:
            directory = tmp_path_factory.mktemp(start)
            directories[start] = directory, _run(start, directory)
        directory, output = directories[start]
        return Ran(directory / scenario, output)

    return run


def _run(start, directory):
    return run_program(
        HERE / "ranks.py",
        *(start, directory, *SCENARIOS[start]),
        ranks=2 if start == "torchrun" else 0,
        timeout=TIMEOUT_S,
        imported=TORCH if start == "torchrun" else LIGHTNING,
        PYTHONFAULTHANDLER="1",  # a rank that aborts prints its stack
    ).stderr


@starts("trains")
def test_only_the_writing_rank_of_two_has_a_pool(ran, start):
    done = ran("trains", start)
    assert not done.raised, done.output
    assert done.files() == ["last.ckpt", "step=6.ckpt"]
    assert os.readlink(done.directory / "c" / "last.ckpt") == "step=6.ckpt"
    assert load(done.directory / "c" / "last.ckpt")["global_step"] == 6
    assert done.notes[1]["engine"] is False
    assert done.notes[0]["engine"] is True


@pytest.mark.parametrize(
    ("scenario", "start"),
    [
        (scenario, start)
        for scenario in ("full_disk", "full_disk_at_the_end")
        for start, each in SCENARIOS.items()
        if scenario in each
    ],
)
def test_full_disk_of_rank_0_ends_the_run_on_all_ranks(ran, scenario, start):
    done = ran(scenario, start)
    assert "SaveError: [Errno 28] No space left on device" in done.raised
    if start != "torchrun":
        return  # the launcher kills the other rank as soon as one ends
    assert set(done.notes) == {0, 1}
    for note in done.notes.values():
        assert note["raised"] == "SaveError", note
        assert note["errno"] == errno.ENOSPC
    assert done.notes[0]["step"] == done.notes[1]["step"]
    assert done.notes[0]["text"] == done.notes[1]["text"]


def test_full_disk_after_training_leaves_no_rank_in_the_barrier(ran):
    done = ran("full_disk_after_training", "torchrun")
    assert not done.raised, done.output
    assert done.notes == {0: {"raised": errno.ENOSPC}, 1: {"raised": None}}


@starts("resumes")
def test_all_ranks_wait_to_load_what_rank_0_is_writing(ran, start):
    done = ran("resumes", start)
    assert not done.raised, done.output
    assert done.notes == {0: {"loaded": 4}, 1: {"loaded": 4}}


def test_the_learning_rate_finder_restores_on_all_ranks(ran):
    done = ran("finds_a_rate", "torchrun")
    assert not done.raised, done.output
    assert {note["step"] for note in done.notes.values()} == {6}
    assert list(done.directory.glob(".lr_find*")) == []


def test_all_ranks_find_the_newest_checkpoint_of_the_fit_before(ran):
    done = ran("several_fits", "torchrun")
    assert not done.raised, done.output
    assert {note["step"] for note in done.notes.values()} == {8}
    assert load(done.directory / "c" / "last.ckpt")["global_step"] == 8


def test_model_parallel_saves_full_state_dicts(ran):
    done = ran("full_state", "torchrun")
    assert not done.raised, done.output
    assert {rank: note["engine"] for rank, note in done.notes.items()} == {0: True, 1: False}
    state = load(done.directory / "c" / "step=6.ckpt")
    assert state["state_dict"]["layer.0.weight"].shape == (300, 300)
    assert len(state["optimizer_states"][0]["state"]) == 6
    assert done.files() == ["step=6.ckpt"]


@starts("fabric")
def test_fabric_saves_and_loads_under_ddp(ran, start):
    done = ran("fabric", start)
    assert not done.raised, done.output
    assert done.notes == {0: {"engine": True}, 1: {"engine": False}}
    assert sorted(path.name for path in done.directory.glob("*.ckpt")) == [
        f"{nr}.ckpt" for nr in range(6)
    ]


def test_fabric_saves_and_loads_the_full_state_of_fsdp2(ran):
    done = ran("fabric_fsdp2", "torchrun")
    assert not done.raised, done.output
    assert {note["same"] for note in done.notes.values()} == {True}
    assert done.notes[0]["names"] == ["0.bias", "0.weight", "2.bias", "2.weight"]
