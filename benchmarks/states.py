"""The states that are saved: a model in training, and the tree that a training would save.

Each state is made in the measured process. Peers save what `tree()` returns. `nbytes` and
`num_tensors` are the size and the number of the tensors in the tree.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from common import Spec
from torch import Tensor


class State(Protocol):
    """The methods and attributes that all states have."""

    nbytes: int
    num_tensors: int

    def step(self, batch: int) -> None:
        """Train one step on `batch` rows."""

    def update(self) -> None:
        """Make the optimizer's step alone, with the gradients of the last step."""

    def tree(self) -> Any:
        """Return what a training would save now."""


class Mlp:
    """A residual MLP under AdamW; its parameters, exp_avg and exp_avg_sq have `nbytes` together.

    Each of the `nr_params` layers has one float32 weight of shape (width, width). AdamW's step
    counters, 4 bytes for each weight, come on top of `nbytes`.
    """

    def __init__(self, spec: Spec) -> None:
        torch.manual_seed(1)
        width = max(8, round((spec.nbytes / (3 * spec.nr_params * 4)) ** 0.5))
        self.model = torch.nn.Sequential(
            *(_Residual(width, 1 / spec.nr_params) for _ in range(spec.nr_params))
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.nbytes = 3 * spec.nr_params * width * width * 4
        self.num_tensors = 4 * spec.nr_params
        self._width = width
        self._data: dict[int, tuple[Tensor, Tensor]] = {}

    def step(self, batch: int) -> None:
        if batch not in self._data:
            shape = (batch, self._width)
            self._data[batch] = (torch.randn(shape), torch.randn(shape))
        x, y = self._data[batch]
        self.optimizer.zero_grad()
        torch.nn.functional.mse_loss(self.model(x), y).backward()
        self.optimizer.step()

    def update(self) -> None:
        self.optimizer.step()

    def tree(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}


class _Residual(torch.nn.Module):
    """A residual layer. Thousands in a row stay finite if `scale` is 1 / (number of layers)."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width, bias=False)
        self._scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self._scale * torch.relu(self.linear(x))


class Few:
    """`nr_params` weights under plain SGD; the first has 0.55 of `nbytes` (2.2 of 4 GB).

    The state should have a tensor of more than 2 GB and still fit into the machine's memory.
    Therefore the optimizer keeps no moments, and a step has no forward. Each gradient is one number
    in memory, expanded to the weight's shape.
    """

    def __init__(self, spec: Spec) -> None:
        large = int(0.55 * spec.nbytes) // 4
        small = (spec.nbytes // 4 - large) // max(1, spec.nr_params - 1)
        sizes = [large] + [small] * (spec.nr_params - 1)
        self.weights = [torch.nn.Parameter(torch.full((size,), 0.5)) for size in sizes]
        for weight in self.weights:
            weight.grad = torch.full((1,), 1e-3).expand_as(weight)
        self.optimizer = torch.optim.SGD(self.weights, lr=1e-3)
        self.nbytes = sum(weight.nbytes for weight in self.weights)
        self.num_tensors = len(self.weights)

    def step(self, batch: int) -> None:
        self.optimizer.step()

    def update(self) -> None:
        self.optimizer.step()

    def tree(self) -> dict[str, Any]:
        model = {f"weight{i}": weight.detach() for i, weight in enumerate(self.weights)}
        return {"model": model, "optim": self.optimizer.state_dict()}


class Plain:
    """A dict of float32 tensors that no optimizer owns, so a save copies all of it in the call."""

    def __init__(self, spec: Spec) -> None:
        numel = max(1, spec.nbytes // (4 * spec.nr_params))
        self._tensors = {f"tensor{i}": torch.randn(numel) for i in range(spec.nr_params)}
        self.nbytes = 4 * numel * spec.nr_params
        self.num_tensors = spec.nr_params

    def step(self, batch: int) -> None:
        pass

    def update(self) -> None:
        pass

    def tree(self) -> dict[str, Any]:
        return self._tensors


class LightningTransformer:
    """A transformer with AdamW that a Trainer has fitted; the tree is the Trainer's checkpoint.

    The tree is what `trainer.save_checkpoint` would save, with loops, callbacks, hyperparameters
    and the scheduler. `nr_params` is the number of encoder layers; `nbytes` determines their width.
    """

    LENGTH = 32  # tokens a row
    VOCABULARY = 1024

    def __init__(self, spec: Spec) -> None:
        torch.manual_seed(1)
        # A layer of width w has 12 w² weights; each has two moments; four bytes each.
        width = round((spec.nbytes / (3 * 4 * 12 * spec.nr_params)) ** 0.5 / 64) * 64
        with _quiet():
            import lightning.pytorch as pl

            self._module = _make_transformer(pl, max(64, width), spec.nr_params)
            self._trainer = pl.Trainer(
                accelerator="cpu",
                max_steps=2,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            tokens = torch.randint(self.VOCABULARY, (4, self.LENGTH))
            self._trainer.fit(self._module, torch.utils.data.DataLoader(list(tokens), 2))
        self._optimizer = self._trainer.optimizers[0]
        self._module.train()
        tensors = tensors_of(self.tree())
        self.nbytes = sum(t.nbytes for t in tensors)
        self.num_tensors = len(tensors)

    def step(self, batch: int) -> None:
        tokens = torch.randint(self.VOCABULARY, (batch, self.LENGTH))
        self._optimizer.zero_grad()
        self._module.loss(tokens).backward()
        self._optimizer.step()

    def update(self) -> None:
        self._optimizer.step()

    def tree(self) -> dict[str, Any]:
        return dict(self._trainer._checkpoint_connector.dump_checkpoint())


def _make_transformer(pl: Any, width: int, layers: int) -> Any:
    class Transformer(pl.LightningModule):  # type: ignore[misc]
        def __init__(self, width: int, layers: int) -> None:
            super().__init__()
            self.save_hyperparameters()
            layer = torch.nn.TransformerEncoderLayer(
                width, width // 64, 4 * width, dropout=0.0, batch_first=True
            )
            self.embedding = torch.nn.Embedding(LightningTransformer.VOCABULARY, width)
            self.encoder = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
            self.head = torch.nn.Linear(width, LightningTransformer.VOCABULARY)

        def loss(self, tokens: Tensor) -> Tensor:
            logits = self.head(self.encoder(self.embedding(tokens)))
            return torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
            )

        def training_step(self, batch: Tensor) -> Tensor:
            return self.loss(batch)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-4)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 100)]

    return Transformer(width, layers)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Lightning's messages about devices and workers, which would disturb the progress
    line."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in dicts and lists, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for each in value.values() for tensor in tensors_of(each)]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in tensors_of(each)]
    return []


KINDS: dict[str, type[Mlp] | type[Few] | type[Plain] | type[LightningTransformer]] = {
    "mlp": Mlp,
    "few": Few,
    "plain": Plain,
    "lightning": LightningTransformer,
}


def make(spec: Spec) -> State:
    """Make the state that `spec` describes, and set this process's threads and pool for it."""
    if spec.pool_bytes:
        os.environ["STILLFRAME_POOL_BYTES"] = str(spec.pool_bytes)
    torch.set_num_threads(spec.threads)
    return KINDS[spec.kind](spec)
