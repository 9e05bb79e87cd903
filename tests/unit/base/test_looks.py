"""What a file or directory is taken for, by its first bytes and its names."""

from __future__ import annotations

import os

import pytest
import stillframe
from stillframe._base import looks


@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_text_is_text_wherever_a_letter_is_cut(tmp_path, shift):
    path = tmp_path / "x.pt"
    path.write_text("x" * shift + "\N{GRINNING FACE}" * 3000, encoding="utf-8")
    with path.open("rb") as file:
        assert looks.like(file.fileno(), str(path)) == "text"


def test_bytes_that_are_no_text_in_the_middle_are_no_text(tmp_path):
    path = tmp_path / "x.pt"
    path.write_bytes(b"text \xff and more of it" * 9)
    with path.open("rb") as file:
        assert looks.like(file.fileno(), str(path)) is None


def test_a_directory_that_cannot_be_listed_is_there(tmp_path, monkeypatch):
    def refused(path: object) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refused)
    assert stillframe.exists(tmp_path)
    assert looks.directory(str(tmp_path)) == "a directory: name a file in it"
