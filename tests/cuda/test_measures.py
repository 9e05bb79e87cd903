"""The measurements of `benchmarks/gpu_measures.py`, on a device whose memory the test counts."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import gpu_measures

AT_REST, ACTIVATIONS = 100, 50


class Device:
    """A training that takes device memory, with the methods that `one_round` calls."""

    def __init__(self) -> None:
        self.now = self.highest = AT_REST
        self.optimizer: Any = self

    def take(self, nbytes: int) -> None:
        self.now += nbytes
        self.highest = max(self.highest, self.now)

    def forward_backward(self) -> None:
        self.take(ACTIVATIONS)
        self.take(-ACTIVATIONS)

    def timed_steps(self, count: int) -> list[float]:
        for _ in range(count):
            self.forward_backward()
        return [0.0] * count

    def reset_memory(self) -> tuple[int, int]:
        self.highest = self.now
        return self.now, self.now

    def memory(self) -> tuple[int, int]:
        return self.highest, self.highest

    def nothing(self, *_: Any, **__: Any) -> float:
        return 0.0

    synchronize = tree = mark = seconds_between = step = zero_grad = nothing


class Way:
    """Clones some bytes in the call, and frees them at the gate or at the end."""

    def __init__(self, device: Device, nbytes: int, until: str) -> None:
        self.device, self.nbytes, self.until = device, nbytes, until

    def start(self, tree: Any, path: Path) -> None:
        self.device.take(self.nbytes)
        self._free("call")

    def gate(self) -> None:
        self._free("gate")

    def finish(self) -> dict[str, float]:
        self._free("end")
        return {}

    def _free(self, when: str) -> None:
        if when == self.until:
            self.device.take(-self.nbytes)


@pytest.mark.parametrize("until", ["call", "gate", "end"])
@pytest.mark.parametrize("nbytes", [0, 30, 80])
def test_measured_memory_of_a_save_excludes_activations(nbytes, until, tmp_path):
    device: Any = Device()
    alone = gpu_measures.peak_without_save(device, 2)
    found = gpu_measures.one_round(device, Way(device, nbytes, until), tmp_path, 2, alone)
    assert found["allocated"] == nbytes
