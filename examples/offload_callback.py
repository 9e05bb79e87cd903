"""Copies tensors off the device before Lightning's own AsyncCheckpointIO writes them."""

import logging
import pathlib

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from stillframe.lightning import CPUOffloadCallback
from torch.utils.data import DataLoader, TensorDataset

logging.basicConfig(format="%(message)s")
logging.getLogger("stillframe").setLevel(logging.INFO)


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(256, 256)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        (inputs,) = batch
        return torch.nn.functional.mse_loss(self.layer(inputs), inputs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


trainer = Trainer(
    max_steps=20,
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    plugins=[AsyncCheckpointIO()],
    callbacks=[
        CPUOffloadCallback(),
        ModelCheckpoint("checkpoints", "{step}", every_n_train_steps=10, save_top_k=-1),
    ],
)
data = TensorDataset(torch.randn(160, 256))
trainer.fit(Model(), DataLoader(data, batch_size=8))

for path in sorted(pathlib.Path("checkpoints").iterdir()):
    print(path.name, "holds step", torch.load(path, weights_only=False)["global_step"])
