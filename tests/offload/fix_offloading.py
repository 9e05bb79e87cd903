"""Small trainings that run plain and offloaded and must agree bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from stillframe.offload import offload_layers
from torch import Tensor, nn

WIDTH = 16

Loss = Callable[[nn.Module, Tensor], Tensor]


class Block(nn.Module):
    """One transformer block: attention, a feed-forward network, norms, dropout."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.1) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, dropout=dropout, batch_first=True)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.network = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.network(self.norms[1](x))


class Transformer(nn.Module):
    """A transformer whose token embeddings are tied to the output weights."""

    def __init__(self, nr_blocks: int = 3, tokens: int = 11) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(nr_blocks))
        self.head = nn.Linear(WIDTH, tokens, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def layers(self) -> list[nn.Module]:
        return [self.embedding, *self.blocks, self.head]


class Bang(torch.autograd.Function):
    """An operation whose backward fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("in the middle")


def mlp(*extra: nn.Module, depth: int = 4) -> nn.Sequential:
    layers = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), *copy.deepcopy(extra), nn.Tanh())
        for _ in range(depth)
    ]
    return nn.Sequential(*layers)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.rnn = nn.Linear(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH, num_layers=2)

    def forward(self, x):
        return self.rnn(self.first(x))[0]


def numbers(seed: int) -> Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed))


def tokens(seed: int) -> Tensor:
    return torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(seed))


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) ** 2).mean()


def next_token(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in nested dicts and lists, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list):
        return [tensor for part in tree for tensor in tensors_of(part)]
    return []


def state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[Tensor]:
    """Return all tensors of a training: weights, buffers, gradients and optimizer state."""
    seen = [
        *model.state_dict().values(),
        *(p.grad for p in model.parameters() if p.grad is not None),
    ]
    if optimizer is not None:
        seen += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return [tensor.detach().clone() for tensor in seen]


def group(seed: int, numel: int = 5000) -> list[Tensor]:
    """Return tensors of several types and sizes."""
    made = torch.Generator().manual_seed(seed)
    return [
        torch.randn(numel, generator=made),
        torch.randn(7, 11, generator=made).to(torch.bfloat16),
        torch.arange(13, dtype=torch.int64) + seed,
    ]


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a, b))
        for a, b in zip(one, other, strict=True)
    )


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def train(
    model: nn.Module,
    *,
    loss: Loss = squares,
    batch: Callable[[int], Tensor] = numbers,
    steps: int = 3,
    parts: int = 1,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adam,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    before_step: Callable[[nn.Module], object] = lambda model: None,
) -> list[list[Tensor]]:
    """Train, and return losses, gradients, weights and optimizer state after every step."""
    torch.manual_seed(7)
    opt = optimizer(model)
    seen = []
    for step in range(steps):
        opt.zero_grad()
        losses = []
        for part in range(parts):
            with around():
                value = loss(model, batch(10 * step + part))
                value.backward()
            losses.append(value.detach())
        before_step(model)
        opt.step()
        seen.append([*losses, *state(model, opt)])
    return seen


def agree(one: list[list[Tensor]], other: list[list[Tensor]]) -> bool:
    return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))


def twice(
    model: nn.Module,
    layers: Callable[[Any], Any] = list,
    *,
    offloaded: dict[str, Any] | None = None,
    **how: Any,
) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Train the model plain and with its layers offloaded; return both results."""
    other = copy.deepcopy(model)
    plain = train(model, **how)
    with offload_layers(layers(other), device="cpu", **(offloaded or {})):
        return plain, train(other, **how)
