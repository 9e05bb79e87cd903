"""A training on the device, and the comparison of states."""

import copy
from typing import Any

import torch


class Training:
    """A model of about 20 MB and its optimizer, on a GPU."""

    def __init__(self, make: Any = None, device: str = "cuda", width: int = 768) -> None:
        torch.manual_seed(3)
        layers = [torch.nn.Linear(width, width) for _ in range(4)]
        self.model = torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(width)).to(device)
        self.optimizer = (make or torch.optim.AdamW)(self.model.parameters())
        self.input = torch.randn(64, width, device=device)
        for _ in range(8):
            self.step()
            # Storages are decided after step 4, or later if the host runs ahead.
            torch.cuda.synchronize(device)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self.input).square().mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def now(self) -> Any:
        """Return a copy of the current state on the CPU."""
        return to_cpu(copy.deepcopy(self.state()))


def to_cpu(node: Any) -> Any:
    if isinstance(node, torch.Tensor):
        return node.detach().cpu()
    if isinstance(node, dict):
        return {key: to_cpu(value) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return type(node)(map(to_cpu, node))
    return node


def same(got: Any, wanted: Any, where: str = "") -> None:
    """Return whether two trees are equal bit for bit, on whatever devices."""
    if isinstance(wanted, torch.Tensor):
        one, two = (each.detach().cpu().reshape(-1).view(torch.uint8) for each in (got, wanted))
        assert torch.equal(one, two), where
    elif isinstance(wanted, dict):
        assert got.keys() == wanted.keys(), where
        for key, value in wanted.items():
            same(got[key], value, f"{where}.{key}")
    elif isinstance(wanted, (list, tuple)):
        assert len(got) == len(wanted), where
        for number, value in enumerate(wanted):
            same(got[number], value, f"{where}.{number}")
    else:
        assert got == wanted, where
