"""PEFT's adapters and TRL's Trainers, where these packages are installed."""

import os

import pytest
import torch
from fix_trainer import (
    OurTrainer,
    checkpoints,
    differences,
    files_of,
    model,
    tokenizer,
    trainer,
    transformers,
)
from stillframe.transformers import AsyncCheckpointMixin

peft = pytest.importorskip("peft")


def adapter():
    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn"])


def adapted():
    torch.manual_seed(1)
    net = peft.get_peft_model(model(), adapter())
    net.add_adapter("second", adapter())
    return net


def test_adapters_have_the_files_of_transformers_and_resume():
    for name, cls in (("theirs", transformers.Trainer), ("ours", OurTrainer)):
        os.mkdir(name)
        os.chdir(name)
        torch.manual_seed(2)
        trainer(cls, net=adapted(), processing_class=tokenizer(), save_total_limit=1).train()
        os.chdir("..")
    assert "checkpoint-6/second/adapter_model.safetensors" in files_of("ours/out")
    assert differences("ours/out", "theirs/out") == []
    resumed = trainer(net=adapted(), output_dir="ours/out", max_steps=8, save_total_limit=1)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 8
    assert checkpoints("ours/out") == ["checkpoint-8"]


def test_trainer_of_trl_has_the_same_files():
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")

    class Ours(AsyncCheckpointMixin, trl.SFTTrainer):
        pass

    rows = {"input_ids": [[(first + offset) % 64 for offset in range(8)] for first in range(64)]}
    for name, cls in (("theirs", trl.SFTTrainer), ("ours", Ours)):
        os.mkdir(name)
        os.chdir(name)
        options = trl.SFTConfig(
            output_dir="out",
            max_steps=4,
            save_steps=2,
            max_length=8,
            use_cpu=True,
            bf16=False,
            report_to=[],
            disable_tqdm=True,
        )
        cls(
            model=model(),
            args=options,
            train_dataset=datasets.Dataset.from_dict(rows),
            processing_class=tokenizer(),
            peft_config=adapter(),
        ).train()
        os.chdir("..")
    assert "checkpoint-4/README.md" in files_of("ours/out")
    assert differences("ours/out", "theirs/out") == []
