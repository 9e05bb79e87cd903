"""The language check of `make lint` finds what it should, and accepts good sentences."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

LINT = runpy.run_path(str(Path(__file__).parents[1] / "lint_prose.py"))
LONG = "The gate waits " + "and waits " * 15 + "until every byte is copied."


def _findings(tmp_path: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    file = tmp_path / name
    file.write_text(text)
    complaints = LINT["complaints"]
    monkeypatch.setitem(complaints.__globals__, "ROOT", tmp_path)
    return list(complaints(file))


@pytest.mark.parametrize(
    ("name", "frame"),
    [
        ("page.md", "# A page\n\n{}\n"),
        ("module.py", '"""{}"""\n'),
        ("module.py", "# {}\nx = 1\n"),
        ("file.c", "/* {} */\n"),
    ],
)
def test_relative_openings_and_long_sentences_are_found(tmp_path, monkeypatch, name, frame):
    def found(sentence: str) -> list[str]:
        text = frame.format(sentence)
        return [
            each for each in _findings(tmp_path, name, text, monkeypatch) if "columns" not in each
        ]

    assert len(found("Who waits for a run holds nothing.")) == 1
    assert len(found("A run is a row. What it holds comes back.")) == 1
    assert len(found(LONG)) == 1
    assert not found("A snapshot that waits for blocks holds none.")
    assert not found("What is copied?")


def test_unusual_words_are_found_outside_quotes(tmp_path, monkeypatch):
    def found(sentence: str) -> list[str]:
        return _findings(tmp_path, "page.md", f"{sentence}\n", monkeypatch)

    assert found("The link is made anew.") == ['page.md:1: "anew": write again']
    assert len(found("Copies go on behind the call, whoever made it.")) == 2
    assert not found('The message says "is made anew", and `anew` is a name.')


def test_docstring_of_a_function_begins_with_a_verb(tmp_path, monkeypatch):
    def found(head: str, docstring: str) -> list[str]:
        text = f'{head}\n    """{docstring}"""\n'
        return _findings(tmp_path, "module.py", text, monkeypatch)

    assert len(found("def is_open() -> bool:", "Whether it is open.")) == 1
    assert not found("def is_open() -> bool:", "Tell whether it is open.")
    assert not found("@property\ndef size(self) -> int:", "Its size in bytes.")


def test_wide_comment_lines_are_found_with_tabs_of_8(tmp_path, monkeypatch):
    def found(name: str, text: str) -> list[str]:
        return _findings(tmp_path, name, text, monkeypatch)

    assert len(found("file.c", f"\t/* {'x' * 90} */\n")) == 1
    assert not found("file.c", f"\t/* {'x' * 80} */\n")
    assert len(found("module.py", f"x = 1  # {'x' * 95}\n")) == 1
    assert not found("module.py", f"x = {'1' * 85}  # type: ignore[assignment]\n")


def test_code_and_generated_tables_are_not_prose(tmp_path, monkeypatch):
    page = f"```sh\n{LONG}\n```\n\n<!-- table x -->\n{LONG}\n<!-- end of table -->\n"
    assert not _findings(tmp_path, "page.md", page, monkeypatch)


def test_accepted_sentences_still_exist():
    pages = " ".join((Path(LINT["ROOT"]) / "docs").joinpath("comparison.md").read_text().split())
    assert all(accepted in pages for accepted in LINT["ACCEPTED"])
