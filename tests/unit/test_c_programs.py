"""What the runner of the C tests says of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / "c/run.py"


@pytest.mark.parametrize(
    ("said", "status", "end", "expected"),
    [
        ("  one\n  two (no disk): skipped", 0, 0, ["  two (no disk): skipped"]),
        ("  one\n  two", 0, 0, []),
        ("  one (no disk): skipped", 77, 1, ["  one (no disk): skipped"]),
        ("a.c:3: failed: x", 1, 1, ["a.c:3: failed: x"]),
    ],
)
def test_what_was_skipped_or_failed_is_printed(
    tmp_path: Path, said: str, status: int, end: int, expected: list[str]
) -> None:
    program = tmp_path / "test_it"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\nexit {status}\n")
    program.chmod(0o755)
    done = subprocess.run(
        [sys.executable, str(RUN), "asan", str(program)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == end
    lines = done.stdout.splitlines()
    assert all(line in lines for line in expected)
    assert any("skipped" in line for line in lines[1:-1]) == ("skipped" in said)
