"""What the binding does where there is no memory: it says so, and nothing is broken or kept."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("no_memory.py")


@pytest.mark.parametrize("mode", ["once", "from-then-on"])
def test_a_failed_allocation_is_a_memory_error_and_nothing_is_broken(
    mode: str, tmp_path: Path
) -> None:
    pytest.importorskip("_testcapi")
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", SCRIPT, mode, tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert {name: wrong for name, (_, wrong) in found.items() if wrong} == {}
    assert sum(failed for name, (failed, _) in found.items() if name != "notice") > 100
