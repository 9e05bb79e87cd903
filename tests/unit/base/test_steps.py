"""Changes of directories as lists of steps."""

from __future__ import annotations

import errno

import pytest
from stillframe._base import steps


def test_take_stops_at_the_first_step_that_fails_and_names_it(tmp_path):
    missing, new = str(tmp_path / "missing"), str(tmp_path / "new")
    with pytest.raises(FileNotFoundError) as caught:
        steps.take(
            [
                steps.write(str(tmp_path / "first"), b"1", durable=True),
                steps.rename(missing, new),
                steps.write(str(tmp_path / "last"), b"3", durable=True),
            ]
        )
    assert caught.value.filename == missing
    assert steps.names(str(tmp_path)) == ["first"]


def test_take_each_reports_every_error(tmp_path):
    for name in "abc":
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "full").mkdir()
    wanted = ["a", "full", "b", "gone", "full", "c"]
    errors = steps.carry_out_all_steps([steps.unlink(str(tmp_path / name)) for name in wanted])
    assert [error.filename for error in errors] == [str(tmp_path / "full")] * 2
    assert {error.errno for error in errors} <= {errno.EISDIR, errno.EPERM}
    assert steps.names(str(tmp_path)) == ["full"]


def test_listing_a_missing_directory_raises_an_error_that_names_it(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        steps.names(str(tmp_path / "missing"))
    assert caught.value.filename == str(tmp_path / "missing")
