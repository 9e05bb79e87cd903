"""A Trainer trains a module whose layers live on the CPU, and saves it."""

import copy
import re
from pathlib import Path

import lightning
import pytest
import torch
from fix_driver import fake as fake
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
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(4)
        )
        self.seen = []

    def forward(self, batch):
        x = self.first(batch[0])
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x**2).mean()

    def training_step(self, batch, _):
        return self(batch)

    def validation_step(self, batch, _):
        self.seen.append(self(batch).clone())

    def on_before_optimizer_step(self, optimizer):
        self.seen += [parameter.grad.clone() for parameter in self.parameters()]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Offloaded(Plain):
    def setup(self, stage):
        self.offloaded = offload_layers(self.layers, device=self.trainer.strategy.root_device)

    def teardown(self, stage):
        self.offloaded.remove()


def fit(model, path, epochs, resumed=None):
    """Fit, and return its checkpoints in order."""
    torch.manual_seed(2)
    samples = torch.randn(24, 16)
    data = DataLoader(TensorDataset(samples), batch_size=4)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[AsyncCheckpointIO()],
        callbacks=[ModelCheckpoint(path, every_n_train_steps=2, save_top_k=-1)],
        gradient_clip_val=0.1,
        accumulate_grad_batches=2,
        val_check_interval=4,
    )
    validation = DataLoader(TensorDataset(samples[:8]), batch_size=4)
    trainer.fit(model, data, validation, ckpt_path=resumed)
    return sorted(path.glob("*.ckpt"), key=lambda each: int(each.stem.rpartition("=")[2]))


def runs(kind, weights, path):
    """Compare everything that the test sees of two runs; the second one resumes from a
    checkpoint."""
    seen = []
    model, resumed, saved = kind(), None, []
    model.load_state_dict(copy.deepcopy(weights))
    for epochs in (1, 2):
        saved = fit(model, path / str(epochs), epochs, resumed)
        seen += [*model.seen, *model.state_dict().values()]
        seen += [torch.load(each)["state_dict"] for each in saved]
        model, resumed = kind(), saved[0]
    return seen


@pytest.fixture(params=["cpu", "fake"])
def either(request):
    if request.param == "fake":
        request.getfixturevalue("fake")


def test_a_trainer_trains_layers_that_live_on_the_cpu(either, tmp_path):
    """The runs have clipped gradients, accumulation, validation and checkpoints; one run
    resumes."""
    weights = Plain().state_dict()
    plain = runs(Plain, weights, tmp_path / "plain")
    offloaded = runs(Offloaded, weights, tmp_path / "offloaded")
    assert len(plain) > 150
    torch.testing.assert_close(plain, offloaded, rtol=0, atol=0)


def test_documentation_shows_the_tested_lines():
    code = Path(__file__).read_text()
    shown = re.search(r"```py\n(class Offloaded.*?)```", PAGE, re.S)
    assert shown and shown[1].split("...\n\n")[-1].strip() in code
