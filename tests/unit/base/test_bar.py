"""The progress bar of slow work."""

from __future__ import annotations

import threading

import pytest
from stillframe._base import bar


def test_progress_bar_ends_with_its_work_even_after_an_error(monkeypatch):
    monkeypatch.setattr(bar, "is_stderr_terminal", lambda: True)
    monkeypatch.setattr(bar, "_QUIET_S", 60.0)
    with pytest.raises(ZeroDivisionError), bar.watched(lambda: 0, "a.pt", 10):
        assert "sf-progress" in [thread.name for thread in threading.enumerate()]
        raise ZeroDivisionError
    assert "sf-progress" not in [thread.name for thread in threading.enumerate()]


def test_file_name_is_not_taken_for_markup_by_the_bar(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with bar.bar("runs/[red]last.pt", 10) as update:
        update(5, 10)
    assert "[red]last.pt" in capsys.readouterr().err
