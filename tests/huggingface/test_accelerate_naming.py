"""Automatic names: `total_limit`, and which checkpoint is loaded without a name."""

from __future__ import annotations

import os

import pytest
import stillframe
import torch
from fix_accelerate import files, forgotten, training  # noqa: F401
from stillframe.accelerate import load_state, save_state
from stillframe.testing import fault, held


def names(tmp_path):
    found = os.listdir(tmp_path / "checkpoints")
    return sorted(name for name in found if not name.startswith("."))


def test_names_and_iterations_are_those_of_accelerate(tmp_path):
    run = training(tmp_path, iteration=7)
    for _ in range(2):
        handle = save_state(run.accelerator, "ignored")
    stillframe.wait_all()
    assert handle.path == str(tmp_path / "checkpoints" / "checkpoint_8")
    assert names(tmp_path) == ["checkpoint_7", "checkpoint_8"]
    assert run.accelerator.save_iteration == 9
    assert run.accelerator.project_configuration.automatic_checkpoint_naming


def test_automatic_name_that_is_taken_is_refused(tmp_path):
    run = training(tmp_path)
    with held("fdatasync"):
        save_state(run.accelerator)  # in flight only
        run.accelerator.project_configuration.iteration = 0
        with pytest.raises(ValueError, match=r"checkpoint_0.*iteration"):
            save_state(run.accelerator)
    stillframe.wait_all()
    assert names(tmp_path) == ["checkpoint_0"]
    assert run.accelerator.project_configuration.automatic_checkpoint_naming


@pytest.mark.parametrize("limit", [1, 2])
def test_total_limit_keeps_the_newest(tmp_path, limit):
    run = training(tmp_path, total_limit=limit)
    for _ in range(11):
        save_state(run.accelerator)
    stillframe.wait_all()
    assert names(tmp_path) == sorted(f"checkpoint_{10 - each}" for each in range(limit))


def test_total_limit_counts_saves_in_flight(tmp_path):
    run = training(tmp_path, total_limit=1)
    save_state(run.accelerator).result()
    with held("fdatasync"):
        save_state(run.accelerator)
        assert names(tmp_path) == ["checkpoint_0"]
        save_state(run.accelerator)
        assert names(tmp_path) == ["checkpoint_0"]
    stillframe.wait_all()
    assert names(tmp_path) == ["checkpoint_2"]


def test_an_old_checkpoint_stays_if_the_new_one_fails(tmp_path):
    run = training(tmp_path, total_limit=1)
    save_state(run.accelerator).result()
    with fault("fdatasync", sticky=True):
        handle = save_state(run.accelerator)
        assert isinstance(handle.exception(), stillframe.SaveError)
    stillframe.wait_all()
    assert names(tmp_path) == ["checkpoint_0"]
    save_state(run.accelerator).result()
    stillframe.wait_all()
    assert names(tmp_path) == ["checkpoint_2"]


def test_other_files_next_to_the_checkpoints_stay(tmp_path):
    run = training(tmp_path, total_limit=1)
    (tmp_path / "checkpoints" / "notes_3").mkdir(parents=True)
    for _ in range(2):
        save_state(run.accelerator)
    stillframe.wait_all()
    assert names(tmp_path) == ["checkpoint_1", "notes_3"]


def test_load_waits_for_the_save_in_flight(tmp_path):
    run = training(tmp_path)
    save_state(run.accelerator)
    run.step()
    save_state(run.accelerator)
    run.step()
    load_state(run.accelerator)
    assert run.counter.count == 1


def test_load_of_a_given_directory_waits_for_its_save(tmp_path):
    run = training()
    save_state(run.accelerator, tmp_path / "c")
    run.step()
    load_state(run.accelerator, tmp_path / "c")
    assert run.counter.count == 0


@pytest.mark.parametrize("lost", ["optimizer.bin", "model.safetensors", "random_states_0.pkl"])
def test_load_skips_an_incomplete_checkpoint(tmp_path, lost):
    run = training(tmp_path)
    save_state(run.accelerator)
    run.step()
    save_state(run.accelerator).result()
    os.unlink(tmp_path / "checkpoints" / "checkpoint_1" / lost)
    again = training(tmp_path)
    load_state(again.accelerator)
    assert again.counter.count == 0


def test_load_skips_a_checkpoint_that_lacks_the_state_of_a_scheduler(tmp_path):
    run = training(tmp_path)
    save_state(run.accelerator)
    run.step()
    save_state(run.accelerator).result()
    os.unlink(tmp_path / "checkpoints" / "checkpoint_1" / "scheduler.bin")
    again = training(tmp_path)
    load_state(again.accelerator)
    assert again.counter.count == 0


def test_load_finds_the_checkpoint_of_a_model_without_optimizer(tmp_path):
    run = training(tmp_path, nr_models=0)
    model = run.accelerator.prepare(torch.nn.Linear(2, 2))
    save_state(run.accelerator)
    before = model.weight.detach().clone()
    torch.nn.init.zeros_(model.weight)
    load_state(run.accelerator)
    assert torch.equal(model.weight, before)


def test_a_skipped_save_removes_no_old_checkpoint(tmp_path):
    run = training(tmp_path, total_limit=1)
    save_state(run.accelerator).result()
    with stillframe.Engine(max_in_flight=1, when_busy="skip") as engine:
        with held("fdatasync"):
            busy = stillframe.async_save(torch.zeros(9), tmp_path / "other.pt", engine=engine)
            handle = save_state(run.accelerator, engine=engine)
            assert handle.state == "skipped"
        busy.result()
    stillframe.wait_all()
    assert names(tmp_path) == ["checkpoint_0"]


def test_load_skips_a_truncated_file(tmp_path):
    run = training(tmp_path)
    save_state(run.accelerator)
    run.step()
    save_state(run.accelerator).result()
    path = tmp_path / "checkpoints" / "checkpoint_1" / "optimizer.bin"
    os.truncate(path, path.stat().st_size // 2)
    again = training(tmp_path)
    load_state(again.accelerator)
    assert again.counter.count == 0


def test_load_without_a_complete_checkpoint_says_so(tmp_path):
    run = training(tmp_path)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        load_state(run.accelerator)
    (tmp_path / "checkpoints" / "checkpoint_3").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        load_state(run.accelerator)


def test_load_without_a_name_is_refused_as_accelerate_does():
    run = training()
    with pytest.raises(ValueError, match="No input_dir provided"):
        load_state(run.accelerator)
