"""How much processor time does planning a save take: the pickle and its table of storages?

    python benchmarks/plan.py --tensors 1600

Planning is what `async_save` does before it copies. A training step and a write to 64 MiB of other
memory come before each measurement, so the tensors are in no cache. To compare two builds, run the
script several times, with `PYTHONPATH` set to each of them in turn.
"""

from __future__ import annotations

import argparse
import statistics
import time

import states
import torch
from common import Spec, end_with
from stillframe._tree import skeleton

WIDTH = 28  # of a weight: the time depends on the number of tensors, not on their bytes
EVICTED_BYTES = 64 << 20  # a write of so many bytes evicts the tensors from the caches


def plan_ms(nr_tensors: int, rounds: int) -> list[float]:
    """Return the milliseconds of processor time of planning a save, for each of `rounds`."""
    nr_params = max(1, nr_tensors // 4)  # AdamW keeps three tensors for each weight
    state = states.make(Spec(3 * nr_params * WIDTH * WIDTH * 4, "mlp", nr_params, 1))
    other = torch.zeros(EVICTED_BYTES // 4)
    found = []
    for _ in range(rounds + 1):
        state.step(8)
        other.add_(1)
        tree = state.tree()
        began = time.thread_time_ns()
        skeleton.build(tree)
        found.append((time.thread_time_ns() - began) / 1e6)
    return found[1:]  # not the first: only later ones prefetch the tensors of the save before


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tensors", type=int, default=1600)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = plan_ms(args.tensors, args.rounds)
    print(f"min {min(found):.2f} ms, median {statistics.median(found):.2f} ms")
    return 0


if __name__ == "__main__":
    end_with(main)
