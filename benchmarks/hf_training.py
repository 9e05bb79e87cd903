"""The training of `huggingface.py`, in the process that runs it."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from machine import reset_peak_rss, status_bytes
from torch.utils.data import Dataset

SKIPPED = 3  # steps at the start of each training that are not counted
LAYERS, HEADS = 12, 8
WORDS, LENGTH = 512, 32  # of the vocabulary; tokens of a row


class Rows(Dataset):  # type: ignore[type-arg]
    """A data set of `rows` random rows of LENGTH tokens."""

    def __init__(self, rows: int) -> None:
        self.rows = torch.randint(0, WORDS, (rows, LENGTH))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Times(transformers.TrainerCallback):
    """A callback that records when steps begin, when the last ends, and stillframe's handles."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.ended = 0.0
        self.handles: list[Any] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.at.append(time.perf_counter())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ended = time.perf_counter()  # taken before this step's checkpoint

    def on_save_submitted(self, *args: Any, handle: Any = None, **kwargs: Any) -> None:
        self.handles.append(handle)


class SaveByHand(transformers.TrainerCallback):
    """A callback that saves model and optimizer with one `async_save`, as a plain loop would."""

    def __init__(self, every: int, directory: Path, times: Times) -> None:
        self.every, self.directory, self.times = every, directory, times
        self.blocked: list[float] = []

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        import stillframe

        if state.global_step % self.every:
            return
        start = time.perf_counter()
        tree = {"model": model.state_dict(), "optim": kwargs["optimizer"].state_dict()}
        new = self.directory / f"{state.global_step}.pt"
        previous = self.directory / f"{state.global_step - self.every}.pt"
        self.times.handles.append(stillframe.async_save(tree, new))
        stillframe.remove(previous)
        self.blocked.append(time.perf_counter() - start)


class Training:
    """A training that saves in one way; its model and optimizer state take `nbytes`."""

    def __init__(self, way: str, nbytes: int, directory: Path) -> None:
        self.way = way
        # A layer of width w has 12 w² weights; each has two moments; four bytes each.
        width = int((nbytes / 4 / 3 / LAYERS / 12) ** 0.5)
        self.width = width - width % HEADS
        self.directory = directory / way
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()

    def fit(self, batch: int, steps: int, every: int) -> dict[str, float]:
        """Train once, with a checkpoint every `every` steps (0: none).

        batch: Rows of a batch. steps: Steps of the training.

        Returns:
            "counted_s" and "step_s": total and median time of the steps after SKIPPED, checkpoints
            included. "saves": the checkpoints within that time. "blocked_s": median time that a
            checkpoint blocked. "end_s": from the last step to the end of all saves. "peak_rss".
        """
        self.directory.mkdir(exist_ok=True)
        times = Times()
        by_hand = SaveByHand(every, self.directory, times)
        saves_by_hand = self.way == "async_save"
        trainer = self._trainer(batch, steps, every=0 if saves_by_hand else every)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.add_callback(times)
        if every and saves_by_hand:
            trainer.add_callback(by_hand)
        blocked = by_hand.blocked
        save = trainer._save_checkpoint

        def timed(*args: Any, **kwargs: Any) -> None:  # replaces the Trainer's method that saves
            start = time.perf_counter()
            save(*args, **kwargs)
            blocked.append(time.perf_counter() - start)

        trainer._save_checkpoint = timed
        gc.collect()
        reset_peak_rss()
        trainer.train()
        for handle in times.handles:
            handle.result()
        ended = time.perf_counter()
        shutil.rmtree(self.directory)
        marks = [*times.at, times.ended]
        step_times = [end - begin for begin, end in itertools.pairwise(marks)][SKIPPED:]
        waits = [handle.result().gate_wait_s for handle in times.handles]
        if not waits:  # transformers' own saves do not make a step wait
            waits = [0.0] * len(blocked)
        blocked_s = [call_s + wait_s for call_s, wait_s in zip(blocked, waits, strict=True)]
        # The first save fills the pool, and the last one is not followed by a step.
        counted = blocked_s[1:-1]
        return {
            "counted_s": sum(step_times),
            "step_s": statistics.median(step_times),
            # The Trainer's own save after the last step is not in the step times.
            "saves": float(steps // every) if every else 0.0,
            "blocked_s": statistics.median(counted) if counted else 0.0,
            "end_s": ended - times.ended,
            "peak_rss": float(status_bytes("VmHWM")),
        }

    def _trainer(self, batch: int, steps: int, every: int) -> Any:
        """Return a Trainer that saves every `every` steps (0: never): ours, or transformers'."""
        from stillframe.transformers import Trainer

        torch.manual_seed(1)
        config = transformers.GPT2Config(
            vocab_size=WORDS,
            n_positions=LENGTH,
            n_embd=self.width,
            n_layer=LAYERS,
            n_head=HEADS,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            attn_pdrop=0.0,
        )
        arguments = transformers.TrainingArguments(
            output_dir=str(self.directory),
            max_steps=steps,
            save_strategy="steps" if every else "no",
            save_steps=every or 1,
            save_total_limit=1,
            per_device_train_batch_size=batch,
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        trainer_class = Trainer if self.way == "stillframe" else transformers.Trainer
        return trainer_class(
            model=transformers.GPT2LMHeadModel(config),
            args=arguments,
            train_dataset=Rows(batch * steps),
        )
