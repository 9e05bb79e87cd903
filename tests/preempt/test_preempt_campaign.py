"""A short form of `make preempt-campaign`."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_few_signals_at_random_moments_lose_no_boundary(tmp_path):
    command = [sys.executable, HERE / "preempt_campaign.py", "--runs=10", "--grace=60"]
    done = subprocess.run(
        [*command, f"--directory={tmp_path}"],
        env={"PYTHONPATH": ":".join([str(HERE), *sys.path])},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 runs, 0 wrong" in done.stdout
