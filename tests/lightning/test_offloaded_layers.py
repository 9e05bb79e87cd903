"""A Trainer trains a module whose layers live on the CPU, and saves it."""

import copy
import re
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from stillframe.lightning import AsyncCheckpointIO
from stillframe.offload import offload_layers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PAGE = (Path(__file__).parents[2] / "docs/offload.md").read_text()


class Plain(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def training_step(self, batch, _):
        x = self.first(batch[0])
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x**2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Offloaded(Plain):
    def setup(self, stage):
        self.offloaded = offload_layers(self.layers, device=self.trainer.strategy.root_device)

    def teardown(self, stage):
        self.offloaded.remove()


def fit(model, path):
    torch.manual_seed(2)
    data = DataLoader(TensorDataset(torch.randn(24, 16)), batch_size=4)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[AsyncCheckpointIO()],
        callbacks=[ModelCheckpoint(path, every_n_train_steps=3, save_top_k=-1)],
        gradient_clip_val=0.1,
        accumulate_grad_batches=2,
    )
    trainer.fit(model, data)
    saved = sorted(path.glob("*.ckpt"))
    return [torch.load(each)["state_dict"] for each in saved]


def test_a_trainer_trains_layers_that_live_on_the_cpu(tmp_path):
    model = Plain()
    other = Offloaded()
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    plain, offloaded = fit(model, tmp_path / "plain"), fit(other, tmp_path / "offloaded")
    assert len(plain) == 2
    torch.testing.assert_close(plain, offloaded, rtol=0, atol=0)
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_the_page_shows_these_lines():
    code = Path(__file__).read_text()
    shown = re.search(r"```py\n(class Offloaded.*?)```", PAGE, re.S)
    assert shown and shown[1].split("...\n\n")[-1].strip() in code
