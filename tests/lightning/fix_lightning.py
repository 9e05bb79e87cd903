"""A tiny model, a recorder and a package switch for the Lightning tests.

A module of its own, so that a spawned worker can import the classes.
"""

import importlib
import os
from importlib.metadata import version
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PACKAGES = ("lightning", "pytorch_lightning")
# `make lightning-suite` uses slower disks, and interrupts at every line instead of at some.
FULL = os.environ.get("STILLFRAME_TEST_LIGHTNING") == "full"
# The seconds that a flush is delayed by. Even 0.1 s is many steps of these tests.
DISKS = [0.0, 0.3, 3.0] if FULL else [0.0, 0.1]
VERSION = tuple(int(each) for each in version("lightning").split(".")[:2])
# The environment of a job's only process.
SLURM = {
    "SLURM_JOB_ID": "1",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_NAME": "job",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "localhost",
}
WIDTH = 300  # larger than storages that are always captured


def package(name):
    """Return the names that the tests use, from `lightning` or `pytorch_lightning`."""
    if name == "lightning":
        pl = importlib.import_module("lightning.pytorch")
        fabric = importlib.import_module("lightning.fabric")
    else:
        pl = importlib.import_module("pytorch_lightning")
        fabric = importlib.import_module("lightning_fabric")
    ours = importlib.import_module(f"stillframe.{name}")
    return SimpleNamespace(
        name=name,
        Trainer=pl.Trainer,
        Callback=pl.Callback,
        ModelCheckpoint=pl.callbacks.ModelCheckpoint,
        LightningModule=pl.LightningModule,
        Fabric=fabric.Fabric,
        TorchCheckpointIO=fabric.plugins.TorchCheckpointIO,
        CheckpointIO=fabric.plugins.CheckpointIO,
        AsyncCheckpointIO=ours.AsyncCheckpointIO,
        Companion=ours.StillframeCompanion,
        Model={"lightning": LightningModel, "pytorch_lightning": PytorchLightningModel}[name],
    )


def loader(nr_samples=32, batch_size=4):
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(nr_samples, WIDTH, generator=generator)
    targets = torch.randn(nr_samples, 1, generator=generator)
    return DataLoader(TensorDataset(inputs, targets), batch_size=batch_size)


class ModelMixin:
    """A regression that records its losses. Lightning's manual optimization saves `layer`."""

    def __init__(self, lr=0.01):
        super().__init__()
        torch.manual_seed(3)
        self.lr = lr
        self.layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
        self.head = nn.Linear(WIDTH, 1)
        self.losses = []

    def forward(self, inputs):
        return self.head(self.layer(inputs))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self(inputs), targets)
        self.losses.append(loss.item())
        self.log("loss", loss)
        # The score falls from step to step, so the newest checkpoints are the best.
        self.log("clock", -float(len(self.losses)))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class ManualMixin:
    """The same with manual optimization, and the weights before each step for ModelCheckpoint."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.saved_models = {}

    def training_step(self, batch, batch_idx):
        self.saved_models = {
            batch_idx: {name: value.clone() for name, value in self.layer.state_dict().items()}
        }
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss


def _models(module_class):
    class Model(ModelMixin, module_class):
        pass

    class ManualModel(ManualMixin, ModelMixin, module_class):
        pass

    return Model, ManualModel


def _named(classes, prefix):
    # A spawned worker finds a class by module and qualified name.
    for cls in classes:
        cls.__qualname__ = cls.__name__ = prefix + cls.__name__
    return classes


LightningModel, LightningManualModel = _named(
    _models(importlib.import_module("lightning.pytorch").LightningModule), "Lightning"
)
PytorchLightningModel, PytorchLightningManualModel = _named(
    _models(importlib.import_module("pytorch_lightning").LightningModule), "PytorchLightning"
)


def trainer(pkg, tmp_path, **options):
    """Make a quiet CPU Trainer; `plugin=` is its CheckpointIO."""
    plugin = options.pop("plugin", None)
    options.setdefault("max_steps", 8)
    options.setdefault("limit_val_batches", 0)
    options.setdefault("enable_checkpointing", "callbacks" in options and _saves(options))
    return pkg.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        plugins=[] if plugin is None else [plugin],
        **options,
    )


def _saves(options):
    names = {cls.__name__ for each in options["callbacks"] for cls in type(each).__mro__}
    return bool(names & {"Checkpoint", "ModelCheckpoint"})


def every_steps(pkg, directory, steps, **options):
    options.setdefault("save_top_k", 1)
    if options["save_top_k"] > 1:
        options.setdefault("monitor", "clock")
    options.setdefault("filename", "{step}")
    return pkg.ModelCheckpoint(directory, every_n_train_steps=steps, **options)


def copied(tree):
    """Return a deep copy that shares no memory with the original."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(copied(value) for value in tree)
    return tree


def assert_same(left, right, where="checkpoint"):
    """Assert that two trees are equal bit for bit."""
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right), where
    elif isinstance(left, dict):
        assert list(left) == list(right), where
        for key in left:
            assert_same(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), where
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same(one, other, f"{where}.{index}")
    else:
        assert left == right, where


def load(path):
    return torch.load(path, weights_only=False)


def at(pkg, actions):
    """Make a callback that runs `actions[step](trainer)` at the end of that global step's batch."""

    class At(pkg.Callback):
        def on_train_batch_end(self, trainer, module, *args):
            if trainer.global_step in actions:
                actions[trainer.global_step](trainer)

    return At()
