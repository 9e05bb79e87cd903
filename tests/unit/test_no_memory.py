"""The binding without memory: each call raises MemoryError, and nothing is damaged or leaked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fix_processes import run_python

SCRIPT = Path(__file__).with_name("no_memory.py")


@pytest.mark.parametrize("mode", ["once", "from-then-on"])
def test_a_failed_allocation_is_a_memory_error_and_nothing_is_broken(mode, tmp_path):
    pytest.importorskip("_testcapi")
    done = run_python("-X", "faulthandler", SCRIPT, mode, tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert {name: wrong for name, (_, wrong) in found.items() if wrong} == {}
    assert sum(failed for name, (failed, _) in found.items() if name != "notice") > 100
