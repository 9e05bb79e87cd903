"""A training with Accelerate that is killed at random moments resumes from one step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_a_killed_training_resumes_from_a_complete_checkpoint(disk_path):
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", HERE / "accelerate_kills.py"),
            *(disk_path / "kills", "--kills", "12", "--with", "ours"),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "ours: 12 resumed\n"
