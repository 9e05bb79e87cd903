"""Offloading on a real device, where autograd runs backward on its own threads."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from stillframe.offload import offload_layers
from torch import nn

WIDTH = 64
PASSES = 200


class Bang(torch.autograd.Function):
    """An operation whose backward fails."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("in the middle")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(Bang.apply(x) if self.fails else x)


def test_failed_backward_adds_no_gradient_after_its_error():
    """The training catches an out-of-memory error, clears the gradients and tries again."""
    torch.manual_seed(0)
    layers = [Layer() for _ in range(4)]
    model = nn.Sequential(*layers)
    batch = torch.randn(8, WIDTH, device="cuda")
    with offload_layers(layers, device="cuda"):
        parameters = list(model.parameters())
        model(batch).square().mean().backward()
        wanted = [p.grad.clone() for p in parameters if p.grad is not None]
        for number in range(PASSES):
            failing = layers[number % len(layers)]
            failing.fails = True
            with pytest.raises(torch.OutOfMemoryError):
                model(batch).square().mean().backward()
            failing.fails = False
            assert all(p.device.type == "cpu" for p in model.parameters())
            model.zero_grad()
            model(batch).square().mean().backward()
            for parameter, grad in zip(parameters, wanted, strict=True):
                torch.testing.assert_close(parameter.grad, grad)


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
def test_offloading_may_be_the_first_use_of_a_device(use, device, tmp_path):
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
