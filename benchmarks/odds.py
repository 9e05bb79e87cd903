"""How likely is it that samples notice a write after the call? `python benchmarks/odds.py`.

A deferred storage is cut into strata of equal length, as many as it has samples. In each stratum
one cache line, chosen at random, is compared with the copy. A contiguous write whose length is x
strata covers parts of one to three neighbouring strata, whose lines are chosen independently. The
probability that the write contains no chosen line is 1 - x + x³/6 if x <= 1, and (2 - x)³/6 if
1 < x <= 2. A longer write is always noticed. `tests/c/stage/test_samples.c` compares these formulas
with what the core's samples notice.
"""

from __future__ import annotations

import re
from pathlib import Path

HEADER = Path(__file__).parents[1] / "csrc/core/stage/samples.h"
LINE = 64  # bytes of a sample
KIB, MB, GB = 1 << 10, 10**6, 10**9
STATES = ((100 * MB, 1), (GB, 1), (GB, 1200), (10 * GB, 1200))  # (bytes, number of equal tensors)
WRITES = ((1, 256), (1, 4 * KIB), (1, 16 * KIB), (1, 100_000), (1, 300_000), (100, 4 * KIB))


def most_samples() -> int:
    """Return how many samples a save takes of host memory, as the core's header defines it."""
    found = re.search(r"#define SFR__MAX_SAMPLES (\d+)", HEADER.read_text())
    assert found is not None
    return int(found[1])


def samples_of(nbytes: float, tensors: int, total: float) -> int:
    """Return how many samples one storage of `nbytes` gets, as `sfr__samples_share` computes it.

    tensors, total: The number of storages of the save, and their bytes.
    """
    half = most_samples() // 2  # one half is divided equally, the other by bytes
    by_bytes = int(half * nbytes / total) if tensors < half else 0
    return max(1, half // tensors + by_bytes)


def miss_probability(written: float, stratum: float) -> float:
    """Return the probability that no sample notices a contiguous write.

    Args:
        written: Bytes of the write.
        stratum: Bytes for each sample.
    """
    # A line is noticed if one byte of it differs, so the write counts as up to LINE - 1 longer.
    x = (written + LINE - 1) / stratum
    if x <= 1:
        return 1 - x + x**3 / 6
    return max(0.0, 2 - x) ** 3 / 6


def noticed_text(miss: float) -> str:
    """Return the text "3.2 %" for a write that is missed with the probability `miss`."""
    if miss < 0.0001:
        return "> 99.99 %" if miss > 0 else "always"
    return f"{100 * (1 - miss):.2g} %"


def table() -> list[str]:
    """Return the lines of the table in docs/guarantees.md."""
    heads = []
    for nbytes, nr in STATES:
        size = f"{nbytes // MB:,} MB" if nbytes < GB else f"{nbytes // GB} GB"
        heads.append(f"{size}, one tensor" if nr == 1 else f"{size}, {nr:,} tensors")
    lines = [f"| written after the call | {' | '.join(heads)} |", "|---" * (1 + len(STATES)) + "|"]
    for times, written in WRITES:
        size = f"{written // KIB} KiB" if written % KIB == 0 else f"{written:,} bytes"
        name = size if times == 1 else f"{times} rows of {size}, scattered"
        cells = []
        for nbytes, nr in STATES:
            tensor_bytes = nbytes / nr
            stratum = tensor_bytes / samples_of(tensor_bytes, nr, nbytes)
            miss = miss_probability(written, stratum) ** times  # no row is noticed
            cells.append(noticed_text(miss))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
