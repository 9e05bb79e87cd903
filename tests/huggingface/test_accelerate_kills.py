"""A training with Accelerate that is killed at random moments resumes from one step."""

from __future__ import annotations

from pathlib import Path

from fix_processes import run_program

HERE = Path(__file__).parent


def test_a_killed_training_resumes_from_a_complete_checkpoint(disk_path):
    program = HERE / "accelerate_kills.py"
    done = run_program(program, disk_path / "kills", "--kills", "12", "--with", "ours")
    assert done.stdout == "ours: 12 resumed\n"
