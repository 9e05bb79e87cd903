"""The files of the Trainer: those of transformers' own, with the same contents."""

import json
import os
import shutil
from pathlib import Path

import pytest
import stillframe
import torch
from fix_trainer import (
    OurTrainer,
    Rows,
    arguments,
    checkpoints,
    differences,
    files_of,
    is_whole,
    model,
    tokenizer,
    trainer,
    transformers,
)
from stillframe._save import api
from stillframe.transformers import AsyncCheckpointMixin
from torch import nn

# The losses fall, so the last checkpoint is the best, or the first with `greater_is_better`.
BEST = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
OPTIONS = {
    "plain": {},
    "keep_one": {"save_total_limit": 1},
    "keep_two": {"save_total_limit": 2, "max_steps": 8},
    "model_alone": {"save_only_model": True},
    "each_epoch": {"save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2},
    "best": BEST,
    "best_is_first": {**BEST, "greater_is_better": True},
    "best_is_first_keep_one": {**BEST, "greater_is_better": True, "save_total_limit": 1},
    "only_best": {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "best",
        "metric_for_best_model": "loss",
    },
    "accumulate": {"gradient_accumulation_steps": 2, "bf16": True},
    "sgd": {"optim": "sgd"},
}


def both(run, **options):
    """Run transformers' Trainer in one directory and ours in another; return the two."""
    ran = []
    for name, cls in (("theirs", transformers.Trainer), ("ours", OurTrainer)):
        os.mkdir(name)
        os.chdir(name)
        ran.append(run(cls, **options))
        os.chdir("..")
    return ran


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_files_and_contents_are_those_of_transformers(options):
    def run(cls):
        made = trainer(cls, processing_class=tokenizer(), **options)
        made.train()
        return made

    theirs, ours = both(run)
    assert files_of("theirs/out")
    assert differences("ours/out", "theirs/out") == []
    assert ours.state.best_model_checkpoint == theirs.state.best_model_checkpoint
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_model_of_another_library_has_the_same_files():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.layer = nn.Embedding(64, 64)

        def forward(self, input_ids, labels):
            logits = self.layer(input_ids)
            return {"loss": nn.functional.cross_entropy(logits.view(-1, 64), labels.view(-1))}

    both(lambda cls: trainer(cls, net=Net()).train())
    assert "checkpoint-6/model.safetensors" in files_of("ours/out")
    assert differences("ours/out", "theirs/out") == []


def test_model_in_shards_has_the_same_files(monkeypatch):
    save = transformers.PreTrainedModel.save_pretrained

    def in_shards(self, *args, **kwargs):
        return save(self, *args, max_shard_size="20KB", **kwargs)

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", in_shards)
    both(lambda cls: trainer(cls).train())
    assert "checkpoint-6/model.safetensors.index.json" in files_of("ours/out")
    assert differences("ours/out", "theirs/out") == []


def test_resumed_training_ends_like_one_that_was_not_interrupted():
    whole = trainer(output_dir="whole")
    whole.train()
    trainer(output_dir="cut", max_steps=6, callbacks=[Stop(4)]).train()
    assert checkpoints("cut") == ["checkpoint-2", "checkpoint-4"]
    resumed = trainer(output_dir="cut")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6
    for mine, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    # The arguments have the name of the output directory.
    assert differences("cut/checkpoint-6", "whole/checkpoint-6") == ["training_args.bin differs"]


def test_either_trainer_resumes_from_the_other_ones_checkpoint():
    for first, second in ((OurTrainer, transformers.Trainer), (transformers.Trainer, OurTrainer)):
        name = f"by-{first.__module__.partition('.')[0]}"
        trainer(first, name, callbacks=[Stop(4)]).train()
        resumed = trainer(second, name)
        resumed.train(resume_from_checkpoint=True)
        assert resumed.state.global_step == 6


def test_resume_skips_checkpoints_that_are_not_whole():
    trainer().train()
    os.truncate("out/checkpoint-6/optimizer.pt", 1000)
    os.remove("out/checkpoint-4/rng_state.pth")
    began = Began()
    trainer(max_steps=7, save_strategy="no", callbacks=[began]).train(resume_from_checkpoint=True)
    assert began.step == 2


def test_resume_without_a_checkpoint_raises_as_transformers_does():
    os.mkdir("out")
    with pytest.raises(ValueError, match="No valid checkpoint found in output directory"):
        trainer().train(resume_from_checkpoint=True)


def test_files_that_a_subclass_adds_are_in_the_same_directory():
    class Before(transformers.Trainer):
        def _save_checkpoint(self, model, trial):
            super()._save_checkpoint(model, trial)
            self.note(trial, "base.txt")

        def note(self, trial, name):
            step = f"checkpoint-{self.state.global_step}"
            Path(self._get_output_dir(trial=trial), step, name).write_text(name)

    class WithOurs(AsyncCheckpointMixin, Before):
        pass

    class Subclass(WithOurs):
        def _save_checkpoint(self, model, trial):
            self.saved = getattr(self, "saved", 0) + 1
            super()._save_checkpoint(model, trial)
            self.note(trial, "subclass.txt")

    made = trainer(Subclass)
    made.train()
    assert made.saved == 3
    for step in (2, 4, 6):
        assert is_whole(f"out/checkpoint-{step}")
        assert {"base.txt", "subclass.txt"} <= set(os.listdir(f"out/checkpoint-{step}"))


def test_final_model_is_written_as_by_transformers():
    made = trainer(save_strategy="no")
    made.train()
    made.save_model("final")
    assert {"config.json", "model.safetensors"} <= set(files_of("final"))


def test_second_trainer_of_a_process_saves_its_checkpoints():
    for name in ("one", "two"):
        trainer(output_dir=name, save_total_limit=1).train()
    assert checkpoints("one") == checkpoints("two") == ["checkpoint-6"]
    again = trainer(output_dir="one", max_steps=8, save_total_limit=1)
    again.train(resume_from_checkpoint=True)
    assert checkpoints("one") == ["checkpoint-8"]
    assert is_whole("one/checkpoint-8")


def test_rotation_leaves_the_checkpoints_of_another_output_directory():
    made = trainer(output_dir="one", save_total_limit=1)
    made.train()
    made.args.output_dir = "two"
    made.train()
    assert checkpoints("one") == checkpoints("two") == ["checkpoint-6"]


def older_checkpoint(step, written):
    path = Path(f"out/checkpoint-{step}")
    path.mkdir(parents=True)
    (path / "trainer_state.json").write_text("{}")
    os.utime(path, (written, written))
    return path


def test_rotation_removes_the_checkpoint_that_was_written_first():
    older_checkpoint(100, written=2000)
    older_checkpoint(101, written=1000)
    trainer(save_steps=2, max_steps=2, save_total_limit=2).train()
    assert checkpoints() == ["checkpoint-100", "checkpoint-2"]


def test_rotation_does_not_count_a_checkpoint_whose_remove_is_pending(monkeypatch):
    older_checkpoint(100, written=1000)
    removed = older_checkpoint(101, written=2000)
    exists = stillframe.exists
    monkeypatch.setattr(api, "exists", lambda path: Path(path) != removed and exists(path))
    trainer(save_steps=2, max_steps=2, save_total_limit=2).train()
    assert checkpoints() == ["checkpoint-100", "checkpoint-101", "checkpoint-2"]


def test_checkpoint_that_disappears_during_rotation_is_ignored(monkeypatch):
    older = [Path(f"out/checkpoint-{step}") for step in (100, 101)]
    for path in older:
        path.mkdir(parents=True)
        (path / "trainer_state.json").write_text("{}")
    getmtime = os.path.getmtime

    def too_late(path):
        if Path(path) == older[0] and older[0].exists():
            shutil.rmtree(path)
        return getmtime(path)

    monkeypatch.setattr(os.path, "getmtime", too_late)
    trainer(save_steps=1, max_steps=3, save_total_limit=2).train()
    assert checkpoints() == ["checkpoint-2", "checkpoint-3"]


def test_workers_of_the_data_loader_fork_while_checkpoints_are_written():
    trainer(save_steps=1, max_steps=40, save_total_limit=2, dataloader_num_workers=1).train()
    assert checkpoints() == ["checkpoint-39", "checkpoint-40"]
    assert is_whole("out/checkpoint-40")


def test_trainer_has_the_signature_of_transformers():
    import inspect

    assert inspect.signature(OurTrainer) == inspect.signature(transformers.Trainer)


@pytest.mark.parametrize("what", ["deepspeed", "fsdp"])
def test_unsupported_options_are_refused_by_name_at_construction(what):
    class Uses(transformers.Trainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            setattr(self, f"is_{what}_enabled", True)

    class Mixed(AsyncCheckpointMixin, Uses):
        pass

    with pytest.raises(ValueError, match=f"(?i)does not write checkpoints of {what}"):
        Mixed(model=model(), args=arguments(), train_dataset=Rows())


class Stop(transformers.TrainerCallback):
    """Stops the training after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


class Began(transformers.TrainerCallback):
    """Notes the step at which the training began."""

    step = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.step = state.global_step


def test_state_in_the_file_names_the_best_checkpoint_by_its_final_path():
    trainer(**BEST).train()
    for step in (2, 4, 6):
        state = json.loads(Path(f"out/checkpoint-{step}/trainer_state.json").read_text())
        assert state["best_model_checkpoint"] == f"out/checkpoint-{state['best_global_step']}"
