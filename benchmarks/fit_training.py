"""The training of `lightning_fit.py`, in the process that runs it."""

from __future__ import annotations

import gc
import itertools
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from machine import reset_peak_rss, status_bytes
from torch import nn
from torch.utils.data import DataLoader, Dataset

SKIPPED = 3  # steps that are not counted, because Lightning fills caches; as in lightning_fit.py
LAYERS = 8


class Model(LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(LAYERS):
            layers += [nn.Linear(width, width, bias=False), nn.ReLU()]
        self.net = nn.Sequential(*layers)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Rows(Dataset):  # type: ignore[type-arg]
    """A data set for `steps` batches, which all have the same rows."""

    def __init__(self, width: int, batch: int, steps: int) -> None:
        self.rows = torch.randn(batch, width)
        self.length = batch * steps

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.rows[index % len(self.rows)]


class Times(Callback):
    """The time at which each step began, and then the time at which the last one ended."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.at.append(time.perf_counter())

    def on_train_epoch_end(self, *args: Any) -> None:
        self.at.append(time.perf_counter())


class Training:
    """A model to fit, whose checkpoints are saved in one way of lightning_fit.py's WAYS.

    The model and its optimizer's state take about `nbytes`.
    """

    def __init__(self, way: str, nbytes: int, directory: Path) -> None:
        self.way = way
        # Three values of 4 bytes for each weight: itself and AdamW's two moments.
        self.width = int((nbytes / 4 / 3 / LAYERS) ** 0.5)
        self.directory = directory

    def _plugin(self) -> Any:
        if self.way == "stillframe":
            from stillframe.lightning import AsyncCheckpointIO as Ours

            return Ours()
        return AsyncCheckpointIO() if self.way == "lightning" else TorchCheckpointIO()

    def fit(self, batch: int, steps: int, every: int) -> dict[str, float]:
        """Fit once, with a checkpoint every `every` steps (0: none).

        batch: Rows of a batch. steps: Steps of the fit.

        Returns:
            Figures of the steps after SKIPPED: their number a second, median and longest time. Also
            the time from the end of the last step to the end of the fit, and the peak of memory.
        """
        torch.manual_seed(1)
        times = Times()
        callbacks: list[Any] = [times]
        target = self.directory / self.way
        if every and self.way != "none":
            callbacks.append(
                ModelCheckpoint(target, filename="{step}", every_n_train_steps=every, save_top_k=1)
            )
        run = Trainer(
            accelerator="cpu",
            max_steps=steps,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=len(callbacks) > 1,  # whether there is a ModelCheckpoint
            default_root_dir=self.directory,
            plugins=[self._plugin()],
            callbacks=callbacks,
        )
        model = Model(self.width)
        loader = DataLoader(Rows(self.width, batch, steps), batch_size=batch)
        gc.collect()
        reset_peak_rss()
        run.fit(model, loader)
        ended = time.perf_counter()
        shutil.rmtree(target, ignore_errors=True)
        step_times = [end - begin for begin, end in itertools.pairwise(times.at)]
        counted = step_times[SKIPPED:]
        return {
            "steps_per_s": len(counted) / sum(counted),
            "step_s": statistics.median(counted),
            "longest_s": max(counted),
            "end_s": ended - times.at[-1],
            "peak_rss": float(status_bytes("VmHWM")),
        }
