"""Guesses of what a file or directory is, from its first bytes and its names."""

from __future__ import annotations

import os

import pytest
import stillframe
from stillframe._base import file_kinds


@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_text_is_recognised_with_a_truncated_letter_at_its_end(tmp_path, shift):
    path = tmp_path / "x.pt"
    path.write_text("x" * shift + "\N{GRINNING FACE}" * 3000, encoding="utf-8")
    with path.open("rb") as file:
        assert file_kinds.guess(file.fileno(), str(path)) == "text"


def test_binary_bytes_in_the_middle_are_not_text(tmp_path):
    path = tmp_path / "x.pt"
    path.write_bytes(b"text \xff and more of it" * 9)
    with path.open("rb") as file:
        assert file_kinds.guess(file.fileno(), str(path)) is None


def test_directory_that_cannot_be_listed_exists(tmp_path, monkeypatch):
    def refused(path: object) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refused)
    assert stillframe.exists(tmp_path)
    assert file_kinds.describe_directory(str(tmp_path)) == "a directory: name a file in it"
