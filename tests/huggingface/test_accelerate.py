"""`save_state` and `load_state`: the files are Accelerate's, and appear together."""

from __future__ import annotations

import errno
import json
import os
import random

import pytest
import stillframe
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from fix_accelerate import WIDTH, Counter, content, files, forgotten, same, training  # noqa: F401
from stillframe.accelerate import load_state, save_state
from stillframe.testing import fault, held

CHECKPOINT = [
    "custom_checkpoint_0.pkl",
    "model.safetensors",
    "optimizer.bin",
    "random_states_0.pkl",
    "scheduler.bin",
]


def equal_directories(ours, stock):
    assert files(ours) == files(stock)
    return all(same(content(ours / name), content(stock / name)) for name in files(ours))


@pytest.mark.parametrize("safe_serialization", [True, False])
@pytest.mark.parametrize("nr_models", [1, 3])
def test_files_and_contents_are_those_of_accelerate(tmp_path, safe_serialization, nr_models):
    run = training(nr_models=nr_models)
    run.accelerator.register_for_checkpointing(Counter())
    run.accelerator.scaler = torch.amp.GradScaler("cpu")
    for _ in range(4):
        run.step()
    run.accelerator.save_state(str(tmp_path / "stock"), safe_serialization)
    handle = save_state(run.accelerator, tmp_path / "ours", safe_serialization)
    assert handle.result().path == str(tmp_path / "ours")
    assert equal_directories(tmp_path / "ours", tmp_path / "stock")
    assert "scaler.pt" in files(tmp_path / "ours")
    assert run.accelerator.save_iteration == 2


def test_samplers_of_iterable_datasets_are_saved(tmp_path):
    run = training(iterable=True)
    run.accelerator.save_state(str(tmp_path / "stock"))
    save_state(run.accelerator, tmp_path / "ours").result()
    assert equal_directories(tmp_path / "ours", tmp_path / "stock")


def test_accelerate_resumes_from_our_directory(tmp_path):
    run = training()
    for _ in range(4):
        run.step()
    handle = save_state(run.accelerator, tmp_path / "c")
    expected = [run.step() for _ in range(5)], random.random()
    handle.result()
    again = training()
    again.accelerator.load_state(str(tmp_path / "c"))
    assert again.counter.count == again.accelerator.step == 4
    assert ([again.step() for _ in range(5)], random.random()) == expected


def test_our_loader_resumes_from_a_directory_of_accelerate(tmp_path):
    run = training()
    for _ in range(4):
        run.step()
    run.accelerator.save_state(str(tmp_path / "c"))
    expected = [run.step() for _ in range(5)]
    again = training()
    load_state(again.accelerator, tmp_path / "c")
    assert [again.step() for _ in range(5)] == expected


def test_training_goes_on_and_the_directory_appears_whole(tmp_path):
    run = training()
    for _ in range(4):
        run.step()
    run.accelerator.save_state(str(tmp_path / "stock"))
    with held("fdatasync"):
        handle = save_state(run.accelerator, tmp_path / "ours")
        for _ in range(3):
            run.step()
        assert not handle.done()
        assert not (tmp_path / "ours").exists()
    # The optimizer owns these bytes, so they were copied while training went on.
    assert handle.result().deferred_nbytes > 2 * WIDTH * WIDTH * 4
    assert equal_directories(tmp_path / "ours", tmp_path / "stock")


def test_files_that_a_hook_writes_are_in_the_checkpoint(tmp_path):
    run = training()

    def hook(models, weights, output_dir):
        assert len(models) == len(weights) == 1
        (model,) = weights
        os.mkdir(os.path.join(output_dir, "part"))
        with open(os.path.join(output_dir, "config.json"), "w") as file:
            json.dump({"width": 3}, file)
        torch.save(model, os.path.join(output_dir, "part", "weights.pt"))
        weights.clear()  # saved by the hook itself

    run.accelerator.register_save_state_pre_hook(hook)
    run.accelerator.save_state(str(tmp_path / "stock"))
    save_state(run.accelerator, tmp_path / "ours").result()
    assert equal_directories(tmp_path / "ours", tmp_path / "stock")
    assert "part/weights.pt" in files(tmp_path / "ours")


def test_an_error_in_a_hook_leaves_the_old_checkpoint(tmp_path):
    run = training()
    save_state(run.accelerator, tmp_path / "c").result()
    before = {name: content(tmp_path / "c" / name) for name in files(tmp_path / "c")}

    def fails(models, weights, output_dir):
        raise RuntimeError("no")

    hook = run.accelerator.register_save_state_pre_hook(fails)
    run.step()
    with pytest.raises(RuntimeError, match="no"):
        save_state(run.accelerator, tmp_path / "c")
    assert same({name: content(tmp_path / "c" / name) for name in files(tmp_path / "c")}, before)
    stillframe.wait_all()
    assert os.listdir(tmp_path) == ["c"]
    hook.remove()
    save_state(run.accelerator, tmp_path / "c").result()
    assert content(tmp_path / "c" / CHECKPOINT[0])["count"] == 1


def test_missing_parents_are_made_and_on_durable_is_called(tmp_path):
    run, told = training(), []
    path = tmp_path / "a" / "b" / "c"
    handle = save_state(
        run.accelerator, path, on_durable=lambda path, report: told.append((str(path), report))
    )
    report = handle.result()
    stillframe.wait_all()
    while not told:  # called on a thread of its own
        pass
    assert told == [(str(path), report)]
    assert files(path) == CHECKPOINT


def test_save_without_a_directory_or_automatic_naming_is_refused():
    run = training()
    with pytest.raises(ValueError, match="needs output_dir"):
        save_state(run.accelerator)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (DistributedType.FSDP, "FSDP"),
        (DistributedType.DEEPSPEED, "DeepSpeed"),
        (DistributedType.MEGATRON_LM, "Megatron-LM"),
        (DistributedType.XLA, "XLA"),
    ],
)
def test_unsupported_training_is_refused_by_name(tmp_path, monkeypatch, kind, name):
    run = training()
    monkeypatch.setattr(Accelerator, "distributed_type", kind)
    with pytest.raises(ValueError, match=name):
        save_state(run.accelerator, tmp_path / "c")
    assert os.listdir(tmp_path) == []


def test_directory_with_foreign_files_is_not_replaced(tmp_path):
    run = training()
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "events.log").write_text("hours of it")
    with pytest.raises(stillframe.StillframeError, match=r"events\.log"):
        save_state(run.accelerator, tmp_path / "c")
    assert files(tmp_path) == ["c/events.log"]


def test_a_checkpoint_is_replaced_as_a_whole(tmp_path):
    run = training(nr_models=2)
    save_state(run.accelerator, tmp_path / "c").result()
    assert "model_1.safetensors" in files(tmp_path / "c")
    run = training()
    save_state(run.accelerator, tmp_path / "c", safe_serialization=False).result()
    names = ["pytorch_model.bin" if "model" in name else name for name in CHECKPOINT]
    assert files(tmp_path / "c") == sorted(names)


def test_subclass_of_accelerator_that_calls_our_functions_saves_the_same_files(tmp_path):
    class Ours(Accelerator):
        def save_state(self, *args, **kwargs):
            return save_state(self, *args, **kwargs)

    run = training()
    run.accelerator.__class__ = Ours
    run.accelerator.save_state(tmp_path / "c").result()
    assert files(tmp_path / "c") == CHECKPOINT


def test_full_disk_keeps_the_old_checkpoint(tmp_path):
    run = training()
    save_state(run.accelerator, tmp_path / "c").result()
    run.step()
    with fault("fdatasync", err=errno.ENOSPC, sticky=True):
        handle = save_state(run.accelerator, tmp_path / "c")
        error = handle.exception()
    assert isinstance(error, stillframe.SaveError)
    assert error.errno == errno.ENOSPC
    stillframe.wait_all()
    assert os.listdir(tmp_path) == ["c"]
    again = training()
    again.accelerator.load_state(str(tmp_path / "c"))
    assert again.counter.count == 0


@pytest.mark.parametrize("err", [errno.EROFS, errno.EACCES])
def test_read_only_directory_is_refused_by_the_call(tmp_path, err):
    run = training()
    save_state(run.accelerator, tmp_path / "c").result()
    with fault("mkdir", err=err), pytest.raises(stillframe.SaveError) as caught:
        save_state(run.accelerator, tmp_path / "c")
    assert caught.value.errno == err
    assert caught.value.phase == "open"
    stillframe.wait_all()
    assert os.listdir(tmp_path) == ["c"]
    again = training()
    again.accelerator.load_state(str(tmp_path / "c"))


def test_parent_that_cannot_be_made_is_refused_by_the_call(tmp_path):
    run = training()
    (tmp_path / "file").touch()
    with pytest.raises(stillframe.SaveError) as caught:
        save_state(run.accelerator, tmp_path / "file" / "c")
    assert (caught.value.errno, caught.value.phase) == (errno.ENOTDIR, "open")
