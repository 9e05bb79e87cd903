"""How many driver calls and bytes does a save from a device need? Counts over the tests' driver.

    python benchmarks/gpu_counts.py [--dir DIR]

It needs no GPU and measures no time. A model of 400 parameters with AdamW's state, 1,200 tensors
and 576 MiB, trains on the CPU and is shown to stillframe as a device's. It counts the steps until
its bytes are deferred, the driver calls inside `async_save` and inside the gate of the next step,
and the calls that take samples. Only calls of the calling thread count.

Exit status 1 when a figure is beyond its bound.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NR_PARAMETERS, TENSOR_BYTES, BLOCK_BYTES = 400, 492 << 10, 16 << 20
SAMPLES = ("cuMemcpy3DBatchAsync_v2", "cuMemcpy2DAsync_v2")
COPIES = ("cuMemcpyBatchAsync_v2", "cuMemcpyDtoHAsync_v2")


class Counted:
    """The driver calls of this thread since the last `take`.

    Calls of the lane, which copies when it can, are not counted.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._before = self._now()

    def _now(self) -> dict[str, int]:
        names = ("*", "cuEventQuery", *SAMPLES, *COPIES)
        return {name: self._driver.calls_here(name) for name in names}

    def take(self) -> dict[str, int]:
        now, before = self._now(), self._before
        self._before = now
        found = {name: now[name] - before[name] for name in now}
        asked = found.pop("cuEventQuery")
        return {
            "calls": found.pop("*") - asked,
            "samples": sum(found[name] for name in SAMPLES),
            "copies": sum(found[name] for name in COPIES),
        }


@contextmanager
def stream_of_its_own(driver: Any) -> Iterator[None]:
    """Give calls a current stream that is not the calling thread, as on a real device."""
    from stillframe._base import device

    was, handle = device.current_stream, driver.stream()
    device.current_stream = lambda index: handle  # type: ignore[assignment]
    try:
        yield
    finally:
        device.current_stream = was


def training(nr: int, nbytes: int) -> tuple[Any, Any, Any]:
    """Return parameters, their AdamW, and a step."""
    import torch

    parameters = [torch.nn.Parameter(torch.zeros(nbytes // 4)) for _ in range(nr)]
    optimizer = torch.optim.AdamW(parameters)

    def step() -> None:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()

    return parameters, optimizer, step


def count(
    directory: Path,
    *,
    nbytes: int = TENSOR_BYTES,
    block_bytes: int = BLOCK_BYTES,
) -> dict[str, Any]:
    """Return the figures of one training, inside `stillframe.testing.host_as_device()`."""
    import stillframe
    from stillframe import testing
    from stillframe._watch import gate

    driver = testing.FakeDriver()
    parameters, optimizer, step = training(NR_PARAMETERS, nbytes)
    total = 3 * NR_PARAMETERS * nbytes
    with stillframe.Engine(pool_bytes=2 * total, block_bytes=block_bytes) as engine:
        engine.warm_up(2 * total)

        def tree() -> Any:
            return {"model": parameters, "optimizer": optimizer.state_dict()}

        def save(**options: Any) -> Any:
            return stillframe.async_save(tree(), directory / "a", engine=engine, **options)

        counted, counts, shares = Counted(driver), [], []
        for _ in range(4):
            step()
            counts.append(counted.take())
            report = save().result()
            shares.append(report.deferred_nbytes / total)
            counted.take()
        with stream_of_its_own(driver):
            counted.take()
            handle = save()
            call = counted.take()
            gate.wait()
            at_gate = counted.take()
            handle.wait_staged()
            report = handle.result()
            counted.take()
            handle = save(overlap=False)
            captured = counted.take()
            blocks = -(-handle.result().captured_nbytes // block_bytes)
    return {
        "tensors": 3 * NR_PARAMETERS,
        "nbytes": total,
        "deferred_after_step": shares,
        "calls_of_steps": [each["calls"] for each in counts],
        "call": call,
        "call_blocks": -(-report.captured_nbytes // block_bytes) + 1,
        "gate": at_gate,
        "captured": captured,
        "captured_blocks": blocks + 1,
    }


def bounds(found: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Return (description, figure, upper bound) for each bound."""
    return [
        ("bytes not deferred after the third step", 1 - found["deferred_after_step"][2], 0.05),
        ("calls in async_save", found["call"]["calls"], 40 + found["call_blocks"]),
        ("calls that sample, a storage", found["call"]["samples"] / found["tensors"], 1),
        ("calls in the gate", found["gate"]["calls"], 10),
        (
            "calls in async_save(overlap=False)",
            found["captured"]["calls"],
            40 + found["captured_blocks"],
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path("."), help="where the files go")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "gpu_counts.json")
    options = parser.parse_args()
    os.environ["STILLFRAME_LIBCUDA"] = str(ROOT / "build" / "libfake_cuda.so")
    from stillframe import testing

    with tempfile.TemporaryDirectory(dir=options.dir) as directory, testing.host_as_device():
        found = count(Path(directory))
    options.json.write_text(json.dumps(found, indent=1))
    print(f"{found['tensors']} tensors, {found['nbytes'] >> 20} MiB, blocks of 16 MiB")
    shares = ", ".join(f"{share:.1%}" for share in found["deferred_after_step"])
    print(f"  deferred after step 1, 2, ..: {shares}")
    print(f"  calls of steps and their gates: {found['calls_of_steps']}")
    missed = False
    for what, figure, most in bounds(found):
        if figure > most:
            missed = True
        print(f"  {what}: {figure:g}, at most {most:g}{'' if figure <= most else ': MISSED'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
