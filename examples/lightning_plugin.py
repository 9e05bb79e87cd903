"""Lightning with stillframe's plugin: the only change is the import."""

import pathlib

import stillframe
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from stillframe.lightning import AsyncCheckpointIO


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(256, 256)

    def training_step(self, batch, batch_idx):
        return (self.layer(batch) - batch).square().mean()

    def configure_optimizers(self):
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
trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(320, 256), batch_size=8))

for path in sorted(pathlib.Path("checkpoints").iterdir()):
    print(path.name, "holds step", stillframe.load(path)["global_step"])
