"""Offloading on a real device, where autograd runs on the device's own thread."""

from __future__ import annotations

import random
import subprocess
import sys
import time

import pytest
import torch
from stillframe.offload import offload_layers
from torch import nn

WIDTH, DEPTH = 64, 6


class Bang(torch.autograd.Function):
    """Its backward fails."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("in the middle")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.one(x))
        return torch.tanh(self.two(Bang.apply(y) if self.fails else y))


@pytest.mark.parametrize("accumulated", [False, True])
def test_failed_backward_adds_no_gradient_afterwards(accumulated: bool) -> None:
    torch.manual_seed(3)
    chance = random.Random(3)
    model = nn.Sequential(*(Block() for _ in range(DEPTH)))
    parameters = list(model.parameters())
    x = torch.randn(8, WIDTH, device="cuda")
    with offload_layers(model, device="cuda") as handle:
        for _ in range(100):
            if accumulated:
                model(x).square().mean().backward()
            block = model[chance.randrange(DEPTH)]
            block.fails = True
            with pytest.raises(ArithmeticError):
                model(x).square().mean().backward()
            block.fails = False
            for parameter in parameters:
                parameter.grad = None
            if chance.random() < 0.5:
                time.sleep(0.003)
            with torch.no_grad():
                model(x)
            assert all(p.device.type == "cpu" for p in model.parameters())
            assert all(p.grad is None for p in parameters)
        handle._gradients.close()
        assert all(p.grad is None for p in parameters)
        assert handle.resident() == []


FIRST = {
    "offloader": """
with Offloader(device) as offloader:
    (here,) = offloader.onload([torch.arange(9)])
    assert offloader.offload([here]).tensors()[0].tolist() == list(range(9))
""",
    "layers": """
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
with offload_layers(model, device=device):
    model(torch.ones(2, 4, device=device)).sum().backward()
assert model[0].weight.grad.device.type == "cpu"
""",
    "load": """
torch.save({"a": torch.arange(9)}, path)
assert stillframe.load(path, map_location=device)["a"].tolist() == list(range(9))
""",
    "save": """
stillframe.save({"a": torch.arange(9)}, path)
stillframe.async_save({"a": torch.arange(9, device=device)}, path).result()
assert torch.load(path)["a"].tolist() == list(range(9))
""",
}


@pytest.mark.parametrize("use", FIRST)
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "last"])
def test_it_may_be_the_first_use_of_a_device(use: str, device: str, tmp_path) -> None:
    if device == "last":
        device = f"cuda:{torch.cuda.device_count() - 1}"
    program = (
        "import sys, torch, stillframe\n"
        "from stillframe.offload import Offloader, offload_layers\n"
        "device, path = sys.argv[1:]\n" + FIRST[use]
    )
    done = subprocess.run(
        [sys.executable, "-c", program, device, str(tmp_path / "a.pt")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
