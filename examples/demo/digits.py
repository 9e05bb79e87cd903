"""Defines the demo's data, and a network whose size is chosen by the wanted checkpoint size.

The data are the 1,797 handwritten digits that scikit-learn ships (8 x 8 pixels each). The network
is an ordinary stack of linear layers. Their width determines the size of a checkpoint: 12 bytes for
each weight, because AdamW keeps two more float32 values for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from sklearn.datasets import load_digits
from torch import Tensor, nn

PIXELS = 64
CLASSES = 10
HIDDEN_LAYERS = 12
BATCH = 128
BYTES_PER_WEIGHT = 12  # the weight and AdamW's two moments, float32
SEED = 20


def width_for(nbytes: int) -> int:
    """Return the width of the hidden layers for which model and AdamW take about `nbytes` bytes."""
    # The positive solution of HIDDEN_LAYERS * width^2 + (PIXELS + CLASSES) * width = weights.
    weights, linear = nbytes / BYTES_PER_WEIGHT, PIXELS + CLASSES
    width = (math.sqrt(linear**2 + 4 * HIDDEN_LAYERS * weights) - linear) / (2 * HIDDEN_LAYERS)
    return max(16, round(width))


class DigitBatches:
    """Endless shuffled batches of digits that can be resumed at any step.

    Each item is `(pixels, labels)`: float32 of shape (BATCH, 64) in 0..1, and int64 of shape
    (BATCH,). Lightning saves the result of `state_dict` in its checkpoints, so a resumed run gets
    the batches that an uninterrupted one would have got.
    """

    def __init__(self) -> None:
        digits = load_digits()
        self._pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
        self._labels = torch.tensor(digits.target, dtype=torch.int64)
        self._epoch = 0
        self._batch = 0

    def __len__(self) -> int:
        return len(self._labels) // BATCH

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        shuffle = torch.Generator().manual_seed(SEED + self._epoch)
        order = torch.randperm(len(self._labels), generator=shuffle)
        while self._batch < len(self):
            chosen = order[self._batch * BATCH : (self._batch + 1) * BATCH]
            self._batch += 1
            yield self._pixels[chosen], self._labels[chosen]
        self._epoch, self._batch = self._epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "batch": self._batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._epoch, self._batch = state["epoch"], state["batch"]


class DigitsModel(LightningModule):
    """Classifies digits; `losses` holds the loss of every step, by the step's number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        layers: list[nn.Module] = [nn.Linear(PIXELS, width), nn.ReLU()]
        for _ in range(HIDDEN_LAYERS):
            layers += [nn.Linear(width, width), nn.ReLU()]
        self.network = nn.Sequential(*layers, nn.Linear(width, CLASSES))
        for layer in self.network:
            if isinstance(layer, nn.Linear):  # keeps the variance from layer to layer
                nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)
        self.losses: dict[int, float] = {}

    def forward(self, pixels: Tensor) -> Tensor:
        """Return scores of shape (batch, 10) for pixels of shape (batch, 64)."""
        scores: Tensor = self.network(pixels)
        return scores

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        pixels, labels = batch
        loss = nn.functional.cross_entropy(self(pixels), labels)
        self.losses[self.global_step] = loss.item()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


@torch.no_grad()
def accuracy(model: DigitsModel) -> float:
    """Return the share of all digits that `model` classifies correctly, 0..1."""
    digits = load_digits()
    scores = model(torch.tensor(digits.data, dtype=torch.float32) / 16)
    right = scores.argmax(dim=1) == torch.tensor(digits.target)
    return float(right.float().mean())
