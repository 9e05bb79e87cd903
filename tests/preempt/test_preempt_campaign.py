"""A short form of `make preempt-campaign`."""

from pathlib import Path

from fix_processes import run_program

HERE = Path(__file__).parent


def test_signals_at_random_moments_lose_no_step_boundary(tmp_path):
    program = HERE / "preempt_campaign.py"
    done = run_program(program, "--runs=10", "--grace=60", f"--directory={tmp_path}")
    assert "10 runs, 0 wrong" in done.stdout
