"""`_core.LogLoad`: a load's entry in the log, and the descriptor that it opens."""

from __future__ import annotations

import os

import pytest
from stillframe import _core


def test_load_that_was_never_opened_closes_nothing(tmp_path):
    load = _core.LogLoad(bytes(tmp_path / "a"))
    assert load.fileno() == -1
    before = os.fstat(0)
    load.close()
    del load
    assert os.fstat(0).st_ino == before.st_ino


def test_a_descriptor_is_closed_once(tmp_path):
    (tmp_path / "a").write_bytes(b"a")
    load = _core.LogLoad(bytes(tmp_path / "a"))
    load.open()
    number = load.fileno()
    load.close()
    assert load.fileno() == -1
    other = os.open(tmp_path / "a", os.O_RDONLY)
    try:
        assert other == number  # the system gives the lowest free number
        load.close()
        del load
        assert os.read(other, 1) == b"a"
    finally:
        os.close(other)


def test_missing_file_has_the_systems_error(tmp_path):
    load = _core.LogLoad(bytes(tmp_path / "a"))
    with pytest.raises(FileNotFoundError):
        load.open()
