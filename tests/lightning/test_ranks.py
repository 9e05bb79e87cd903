"""Two ranks on gloo, real processes: spawned and forked by Lightning, and started by torchrun."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fix_lightning import load

TIMEOUT_S = 240
HERE = Path(__file__).parent


def run(scenario, start, directory):
    """Runs a scenario of ranks.py; the process, and what each rank noted."""
    command = [sys.executable, "-W", "ignore"]
    if start == "torchrun":
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, HERE / "ranks.py", scenario, start, directory],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    notes = {}
    for rank in (0, 1):
        path = directory / f"rank{rank}.json"
        if path.exists():
            notes[rank] = json.loads(path.read_text())
    return done, notes


def files(directory):
    return sorted(path.name for path in (directory / "c").iterdir())


STARTS = ["spawn", "fork", "torchrun"]


@pytest.mark.parametrize("start", STARTS)
def test_two_ranks_train_and_only_the_writing_one_has_a_pool(tmp_path, start):
    done, notes = run("trains", start, tmp_path)
    assert done.returncode == 0, done.stderr
    assert files(tmp_path) == ["last.ckpt", "step=6.ckpt"]
    assert os.readlink(tmp_path / "c" / "last.ckpt") == "step=6.ckpt"
    assert load(tmp_path / "c" / "last.ckpt")["global_step"] == 6
    assert {rank: note["engine"] for rank, note in notes.items()} == {0: True, 1: False}


@pytest.mark.leaves_temporaries  # the launcher kills a rank that may be saving
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("scenario", ["full_disk", "full_disk_at_the_end"])
def test_all_ranks_raise_what_rank_0s_full_disk_says(tmp_path, start, scenario):
    done, notes = run(scenario, start, tmp_path)
    assert done.returncode != 0
    # A launcher that sees one rank end with an error kills the other, which may not have got to
    # its notes by then. torchrun looks every 0.1 s, and both have.
    assert notes, done.stderr
    if start == "torchrun":
        assert set(notes) == {0, 1}, done.stderr
    for note in notes.values():
        assert note["raised"] == "SaveError", note
        assert note["errno"] == errno.ENOSPC
    assert len({note["step"] for note in notes.values()}) == 1
    assert len({note["text"] for note in notes.values()}) == 1


def test_all_ranks_load_what_rank_0_is_still_writing(tmp_path):
    done, notes = run("resumes", "spawn", tmp_path)
    assert done.returncode == 0, done.stderr
    assert notes == {0: {"loaded": 4}, 1: {"loaded": 4}}


def test_the_learning_rate_finder_restores_on_all_ranks(tmp_path):
    done, notes = run("finds_a_rate", "torchrun", tmp_path)
    assert done.returncode == 0, done.stderr
    assert {note["step"] for note in notes.values()} == {6}
    assert list(tmp_path.glob(".lr_find*")) == []


def test_all_ranks_find_the_newest_checkpoint_of_the_fit_before(tmp_path):
    done, notes = run("several_fits", "torchrun", tmp_path)
    assert done.returncode == 0, done.stderr
    assert {note["step"] for note in notes.values()} == {8}
    assert load(tmp_path / "c" / "last.ckpt")["global_step"] == 8


def test_model_parallel_with_full_state_dicts_saves_all_of_it(tmp_path):
    done, notes = run("full_state", "torchrun", tmp_path)
    assert done.returncode == 0, done.stderr
    assert {rank: note["engine"] for rank, note in notes.items()} == {0: True, 1: False}
    state = load(tmp_path / "c" / "step=6.ckpt")
    assert state["state_dict"]["layer.0.weight"].shape == (300, 300)
    assert len(state["optimizer_states"][0]["state"]) == 6
    assert files(tmp_path) == ["step=6.ckpt"]


def test_a_strategy_that_writes_for_itself_brings_one_warning(tmp_path):
    done, notes = run("sharded", "torchrun", tmp_path)
    assert done.returncode == 0, done.stderr
    (warning,) = notes[0]["warnings"]
    assert "save_distributed_checkpoint=False" in warning
    assert notes[1]["warnings"] == []


@pytest.mark.parametrize("start", STARTS)
def test_fabric_saves_and_loads_under_ddp(tmp_path, start):
    done, notes = run("fabric", start, tmp_path)
    assert done.returncode == 0, done.stderr
    assert notes == {0: {"engine": True}, 1: {"engine": False}}
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == [
        f"{nr}.ckpt" for nr in range(6)
    ]


def test_fabric_saves_and_loads_the_full_state_of_fsdp2(tmp_path):
    done, notes = run("fabric_fsdp2", "torchrun", tmp_path)
    assert done.returncode == 0, done.stderr
    assert {note["same"] for note in notes.values()} == {True}
    assert notes[0]["names"] == ["0.bias", "0.weight", "2.bias", "2.weight"]
