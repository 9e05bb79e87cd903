"""The output of the C tests' runner."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from fix_processes import run_python

RUN = Path(__file__).parents[1] / "c/run.py"


@pytest.mark.parametrize(
    ("output", "status", "end", "expected"),
    [
        ("  one\n  two (no disk): skipped", 0, 0, ["  two (no disk): skipped"]),
        ("  one\n  two", 0, 0, []),
        ("  one (no disk): skipped", 77, 1, ["  one (no disk): skipped"]),
        ("a.c:3: failed: x", 1, 1, ["a.c:3: failed: x"]),
    ],
)
def test_skipped_and_failed_programs_are_printed(tmp_path, output, status, end, expected):
    program = tmp_path / "test_it"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\nexit {status}\n")
    program.chmod(0o755)
    done = run_python(RUN, "asan", program)
    assert done.returncode == end
    lines = done.stdout.splitlines()
    assert all(line in lines for line in expected)
    assert any("skipped" in line for line in lines[1:-1]) == ("skipped" in output)


def test_report_of_failed_program_is_repeated_at_the_end(tmp_path):
    programs = []
    for name, status in (("test_failed", 1), ("test_slow", 0)):
        programs.append(tmp_path / name)
        programs[-1].write_text(
            f"#!/bin/sh\necho {name} printed this\nsleep 0.{1 - status}\nexit {status}\n"
        )
        programs[-1].chmod(0o755)
    done = run_python(RUN, "asan", *programs)
    first, *output, counts = done.stdout.splitlines()[-4:]
    assert done.returncode == 1
    assert first.split()[:2] == ["failed", "test_failed"]
    assert output == ["test_failed printed this", "[exit status 1]"]
    assert counts == "asan: 1 passed, 1 failed, 0 skipped"


def test_daily_choices_of_programs_differ_and_together_cover_nearly_all():
    daily = runpy.run_path(str(RUN))["daily"]
    programs = [f"test_{number}" for number in range(40)]
    days = [daily(5, programs, f"2026-11-{day:02}") for day in range(1, 31)]
    assert all(len(set(each)) == 5 for each in days)
    assert days[0] == daily(5, programs[::-1], "2026-11-01") != days[1]
    assert len({name for each in days for name in each}) > 35
    assert daily(5, programs[:3], "2026-11-01") == programs[:3]
