"""Lightning on a real device: the plugin, the callback, and teardown while copies run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

lightning = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.demos.boring_classes import BoringModel  # noqa: E402
from stillframe.lightning import AsyncCheckpointIO, CPUOffloadCallback  # noqa: E402


class Model(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.large = torch.nn.Linear(32, 1_000_000)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), fused=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.large(batch).square().mean()


def fit(tmp_path: Path, **options: Any) -> Any:
    checkpoints = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    trainer = lightning.Trainer(
        max_steps=6,
        accelerator="gpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **{**options, "callbacks": [checkpoints, *options.get("callbacks", [])]},
    )
    model = Model()
    trainer.fit(model)
    return model


def test_the_plugin_saves_and_the_last_file_is_the_trained_model(tmp_path):
    model = fit(tmp_path, plugins=[AsyncCheckpointIO()])
    files = sorted(tmp_path.glob("*.ckpt"))
    assert len(files) == 3
    last = torch.load(max(files, key=lambda p: p.stat().st_mtime), map_location="cpu")
    for name, value in model.state_dict().items():
        assert torch.equal(last["state_dict"][name], value.cpu()), name


def test_callback_offloads_from_a_gpu(tmp_path):
    model = fit(tmp_path, callbacks=[CPUOffloadCallback()])
    last = torch.load(
        max(tmp_path.glob("*.ckpt"), key=lambda p: p.stat().st_mtime), map_location="cpu"
    )
    for name, value in model.state_dict().items():
        assert torch.equal(last["state_dict"][name], value.cpu()), name
