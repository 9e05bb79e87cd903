"""Trains a tiny GPT-2 with transformers' Trainer: the only change is the import."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # the model is built from a config, so nothing is fetched

import stillframe
import torch
from stillframe.transformers import Trainer
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)


class Printer(TrainerCallback):
    """Prints that a checkpoint is durable. A program could copy it elsewhere here."""

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        files = os.listdir(f"{args.output_dir}/checkpoint-{state.global_step}")
        print(f"checkpoint-{state.global_step} is durable, {len(files)} files")


def trainer(max_steps: int) -> Trainer:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=16, n_embd=64, n_layer=2, n_head=2)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 256, (400, 16))]
    return Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir="out",
            max_steps=max_steps,
            save_steps=10,
            save_total_limit=1,
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=rows,
        callbacks=[Printer()],
    )


trainer(20).train()
weights = stillframe.load("out/checkpoint-20/model.safetensors")
print(len(weights), "tensors; there is", *os.listdir("out"))
trainer(30).train(resume_from_checkpoint=True)
print("there is", *os.listdir("out"))
