"""A short form of `make trainer-kills`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.leaves_temporaries
def test_killed_training_resumes_from_one_step(disk_path):
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", HERE / "trainer_kills.py"),
            *(disk_path / "kills", "--kills", "5", "--only", "stillframe"),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stillframe: 5 kills, 0 failures" in done.stdout
