"""What a load must not leave behind."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from stillframe.testing import FakeDriver


def living(fake: FakeDriver) -> dict[str, int]:
    """What there is of the driver's things, of readers and of open files."""
    kinds = ("streams", "events", "allocated", "contexts")
    return {
        **{kind: fake.live(kind) for kind in kinds},
        "readers": _nr_readers(),
        "files": len(os.listdir("/proc/self/fd")),
    }


def _nr_readers() -> int:
    """Threads of loads that have not ended. One that was joined may be listed for a moment."""
    for _ in range(1000):
        found = 0
        for each in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it has just gone
                found += (each / "comm").read_text().startswith("sfr-restore")
        if not found:
            break
        time.sleep(0.001)
    return found
