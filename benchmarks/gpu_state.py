"""The training that the GPU benchmark saves: a small transformer language model with AdamW."""

from __future__ import annotations

import itertools
import time
from typing import Any

# name: (width, layers, vocabulary). Parameters: about 12 * width^2 * layers + 2 * width * vocab.
SIZES = {
    "small": (768, 8, 16_384),  # 82 M parameters, 1 GB of state
    "large": (2048, 18, 32_000),  # 1.04 G parameters, 12.5 GB of state
    "rehearsal": (64, 2, 512),
}


class Train:
    """A model and its optimizer on a device."""

    def __init__(self, size: str, device: str) -> None:
        import torch

        self.torch, self.device = torch, device
        width, layers, vocabulary = SIZES[size]
        torch.manual_seed(1)
        with torch.device(device):
            self.embedding = torch.nn.Embedding(vocabulary, width)
            self.body = torch.nn.ModuleList(
                [
                    torch.nn.TransformerEncoderLayer(
                        width,
                        max(width // 64, 1),
                        4 * width,
                        dropout=0.0,
                        batch_first=True,
                        norm_first=True,
                    )
                    for _ in range(layers)
                ]
            )
            self.head = torch.nn.Linear(width, vocabulary)
        self.model = torch.nn.ModuleDict(
            {"embedding": self.embedding, "body": self.body, "head": self.head}
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=device == "cuda")
        length = 512 if device == "cuda" else 16
        self.tokens = torch.randint(vocabulary, (4, length), device=device)

    def forward_backward(self) -> None:
        torch = self.torch
        with torch.autocast(self.device, dtype=torch.bfloat16):
            hidden = self.embedding(self.tokens)
            for layer in self.body:
                hidden = layer(hidden)
            logits = self.head(hidden)
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), self.tokens.flatten()
            )
        loss.backward()

    def step(self) -> None:
        self.forward_backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)  # gradients keep their device memory

    def tree(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def nbytes(self) -> int:
        """Return the bytes of all tensors in the tree; a tensor that is in it twice counts once."""
        torch, seen, total = self.torch, set(), 0
        stack: list[Any] = [self.tree()]
        while stack:
            node = stack.pop()
            if isinstance(node, torch.Tensor) and id(node) not in seen:
                seen.add(id(node))
                total += node.nbytes
            elif isinstance(node, dict):
                stack.extend(node.values())
            elif isinstance(node, (list, tuple)):
                stack.extend(node)
        return total

    # ---- the GPU's figures ----

    def synchronize(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def memory(self) -> tuple[int, int]:
        """Return the highest (allocated, reserved) bytes since `reset_memory`."""
        if self.device != "cuda":
            return 0, 0
        cuda = self.torch.cuda
        return cuda.max_memory_allocated(), cuda.max_memory_reserved()

    def reset_memory(self) -> tuple[int, int]:
        """Return (allocated, reserved) bytes now, and start a new maximum."""
        if self.device != "cuda":
            return 0, 0
        cuda = self.torch.cuda
        cuda.reset_peak_memory_stats()
        return cuda.memory_allocated(), cuda.memory_reserved()

    def mark(self) -> Any:
        """Return the present moment of the device's stream, for `seconds_between`.

        On a CUDA device it is an event, which is complete when the work before it is.
        """
        if self.device != "cuda":
            return time.perf_counter()
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, one: Any, two: Any) -> float:
        """Return the seconds between two marks; the caller has synchronised after the second."""
        if self.device != "cuda":
            return float(two - one)
        return float(one.elapsed_time(two)) / 1e3

    def timed_steps(self, count: int) -> list[float]:
        """Return the seconds of `count` steps by the device's clock, with no wait in between."""
        marks = [self.mark()]
        for _ in range(count):
            self.step()
            marks.append(self.mark())
        self.synchronize()
        return [self.seconds_between(one, two) for one, two in itertools.pairwise(marks)]
