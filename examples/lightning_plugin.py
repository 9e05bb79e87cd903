"""Saves with stillframe's plugin for Lightning: the only change is the import."""

import pathlib

import stillframe
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from stillframe.lightning import AsyncCheckpointIO
from torch.utils.data import DataLoader, TensorDataset


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
    max_steps=40,
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    plugins=[AsyncCheckpointIO()],
    callbacks=[ModelCheckpoint("checkpoints", "{step}", every_n_train_steps=10, save_last=True)],
)
data = TensorDataset(torch.randn(320, 256))
trainer.fit(Model(), DataLoader(data, batch_size=8))

for path in sorted(pathlib.Path("checkpoints").iterdir()):
    print(path.name, "holds step", stillframe.load(path)["global_step"])
