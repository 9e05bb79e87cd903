"""A short form of `make trainer-kills`."""

from pathlib import Path

import pytest
from fix_processes import run_program

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.leaves_temporaries
def test_killed_training_resumes_from_one_step(disk_path):
    program = HERE / "trainer_kills.py"
    done = run_program(program, disk_path / "kills", "--kills", "5", "--only", "stillframe")
    assert "stillframe: 5 kills, 0 failures" in done.stdout
