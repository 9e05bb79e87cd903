"""Saves, loads, snapshots, failures and forks leak nothing. leaks.py does the work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROUNDS = int(os.environ.get("STILLFRAME_SOAK", "200"))
# Malloc's and the interpreter's free lists keep some memory, which does not grow. Mappings depend
# on which neighbouring blocks of the pool have memory. Committed memory includes the block of 64
# KiB that is made for the next save while a snapshot has the only one. A real leak adds much more,
# once for each round.
NOISE = {"malloc": 16384, "mappings": 20, "committed": 1 << 16}


def test_repeated_operations_leak_nothing(tmp_path):
    script = Path(__file__).with_name("leaks.py")
    done = subprocess.run(
        [sys.executable, str(script), str(ROUNDS), str(tmp_path)],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert len(found) >= 10
    left = {
        kind: {name: more for name, more in counts.items() if more > NOISE.get(name, 0)}
        for kind, counts in found.items()
    }
    assert not {kind: counts for kind, counts in left.items() if counts}
