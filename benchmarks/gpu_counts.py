"""How many driver calls does a save from a device need? Counts over the tests' fake driver.

    python benchmarks/gpu_counts.py [--dir DIR]

It needs no GPU and measures no time. A model of 400 parameters with AdamW's state, 1,200 tensors
and 576 MiB, trains on the CPU, but stillframe treats its tensors like those of a CUDA device. The
script counts the steps until the tensors are deferred, the driver calls inside `async_save` and
inside the gate of the next step, and the calls that take samples. Only calls of the training thread
count.

The exit status is 1 if a figure exceeds its bound.
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
NR_PARAMETERS, TENSOR_BYTES = 400, 492 << 10  # each parameter has two moments of that size
BLOCK_BYTES = 16 << 20  # of the pool
SAMPLES = ("cuMemcpy3DBatchAsync_v2", "cuMemcpy2DAsync_v2")  # the calls that take samples
COPIES = ("cuMemcpyBatchAsync_v2", "cuMemcpyDtoHAsync_v2")  # the calls that copy


class CallCounter:
    """A count of the driver calls that this thread has made since the last `take`.

    Calls of the lane's thread are not counted, since their number depends on the timing.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._before = self._now()

    def _now(self) -> dict[str, int]:
        names = ("*", "cuEventQuery", *SAMPLES, *COPIES)  # "*": all calls
        return {name: self._driver.calls_here(name) for name in names}

    def take(self) -> dict[str, int]:
        """Return three numbers of calls since the last `take`.

        "calls" are all calls except event queries. "samples" and "copies" are those among them.
        """
        now, before = self._now(), self._before
        self._before = now
        new_calls = {name: now[name] - before[name] for name in now}
        return {
            "calls": new_calls["*"] - new_calls["cuEventQuery"],
            "samples": sum(new_calls[name] for name in SAMPLES),
            "copies": sum(new_calls[name] for name in COPIES),
        }


@contextmanager
def stream_of_its_own(driver: Any) -> Iterator[None]:
    """Make a new stream of the fake driver the current one, as on a real device.

    The fake driver's default stream is the calling thread, whose work is always done at once.
    """
    from stillframe._base import device

    original, stream = device.current_stream, driver.stream()
    device.current_stream = lambda index: stream  # type: ignore[assignment]
    try:
        yield
    finally:
        device.current_stream = original


def training(nr: int, nbytes: int) -> tuple[Any, Any, Any]:
    """Return `nr` parameters of `nbytes`, their AdamW, and a function that makes one step."""
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
    """Train and save; return the counts.

    Call it inside `stillframe.testing.host_as_device()`.

    Args:
        nbytes: The bytes of each tensor.

    Returns:
        The counts of `CallCounter.take` for the steps, a call, its gate, and a call that captures
        everything; "call_blocks" and "captured_blocks": the most blocks that the captured bytes
        fill, one of them in part.
    """
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

        counter, counts, shares = CallCounter(driver), [], []
        for _ in range(4):
            step()
            counts.append(counter.take())
            report = save().result()
            shares.append(report.deferred_nbytes / total)
            counter.take()  # the calls of the save are not counted
        with stream_of_its_own(driver):
            counter.take()  # forget the calls that made the stream
            handle = save()
            call = counter.take()
            gate.wait()
            at_gate = counter.take()
            handle.wait_staged()
            report = handle.result()
            counter.take()  # forget the calls since the gate
            handle = save(overlap=False)
            captured = counter.take()
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
    """Return (description, figure, upper bound) of each figure that has a bound."""
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
