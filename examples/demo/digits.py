"""The demo's model and data: handwritten digits, and a network as large as the state is to be.

The data are the 1,797 handwritten digits that scikit-learn ships (8 x 8 pixels each). The network
is an ordinary stack of linear layers; how wide they are decides how many bytes a checkpoint holds:
twelve for each weight, because AdamW keeps two values of its own beside it.
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
    """The width of the hidden layers with which model and AdamW hold about `nbytes` bytes."""
    # HIDDEN_LAYERS * width^2 + (PIXELS + CLASSES) * width = weights, solved for width.
    weights, linear = nbytes / BYTES_PER_WEIGHT, PIXELS + CLASSES
    width = (math.sqrt(linear**2 + 4 * HIDDEN_LAYERS * weights) - linear) / (2 * HIDDEN_LAYERS)
    return max(16, round(width))


class DigitBatches:
    """Endless shuffled batches of digits that can be gone on with from any step.

    Each item is `(pixels, labels)`: float32 of shape (BATCH, 64) in 0..1, and int64 of shape
    (BATCH,). Lightning keeps what `state_dict` returns in its checkpoints, so a resumed run sees
    the batches that the first one would have seen.
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
    """Classifies digits; `losses` keeps the loss of every step, by number of the step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        layers: list[nn.Module] = [nn.Linear(PIXELS, width), nn.ReLU()]
        for _ in range(HIDDEN_LAYERS):
            layers += [nn.Linear(width, width), nn.ReLU()]
        self.network = nn.Sequential(*layers, nn.Linear(width, CLASSES))
        for layer in self.network:
            if isinstance(layer, nn.Linear):  # keeps the signal's size from layer to layer
                nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)
        self.losses: dict[int, float] = {}

    def forward(self, pixels: Tensor) -> Tensor:
        """Scores of shape (batch, 10) for pixels of shape (batch, 64)."""
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
    """The share of all digits that `model` names rightly, 0..1."""
    digits = load_digits()
    scores = model(torch.tensor(digits.data, dtype=torch.float32) / 16)
    right = scores.argmax(dim=1) == torch.tensor(digits.target)
    return float(right.float().mean())
