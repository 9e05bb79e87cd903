"""The page of messages has every message of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import stillframe

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/messages.md"
ERRORS = {
    name
    for name, each in vars(stillframe).items()
    if isinstance(each, type) and issubclass(each, stillframe.StillframeError)
}
LOGGED = {"warning", "error"}


def _text(node: ast.expr) -> str:
    """Return a message as the page writes it: … for the variable parts."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%(\.\d+)?[a-z]", "…", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            _text(part) if isinstance(part, ast.Constant) else "…" for part in node.values
        )
    return "…"


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def _python_messages() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "python/stillframe").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = _called(node)
            if name in ERRORS - {"SaveError"} or (
                name in LOGGED and isinstance(node.func, ast.Attribute)
            ):
                yield f"{path.name}:{node.lineno}", _text(node.args[0])


def _core_messages() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "csrc/core").rglob("*.c")):
        for words in re.findall(r'notice_text\(\s*((?:"[^"]*"\s*)+)', path.read_text()):
            text = "".join(re.findall(r'"([^"]*)"', words))
            yield path.name, re.sub(r"%(\.\d+)?[a-z]", "…", text)


def _listed() -> set[str]:
    """Return the quotations at the beginning of the page's table rows."""
    return set(re.findall(r'^\| "([^"]+)" \|', PAGE.read_text(), re.M))


def _is_of(quoted: str, text: str) -> bool:
    return re.search(".*?".join(map(re.escape, quoted.strip("…").split("…"))), text) is not None


def test_every_message_of_an_error_or_warning_is_on_the_page():
    messages = [
        (where, text)
        for where, text in [*_python_messages(), *_core_messages()]
        if re.search(r"[A-Za-z]{2,} [A-Za-z]{2,}", text)  # shorter texts are not sentences of ours
    ]
    assert len(messages) > 70
    listed = _listed()
    missing = [each for each in messages if not any(_is_of(quoted, each[1]) for quoted in listed)]
    assert not missing


def test_the_page_quotes_no_message_that_is_not_in_the_code():
    python = "".join(path.read_text() for path in sorted(ROOT.glob("python/**/*.py")))
    core = "".join(path.read_text() for path in sorted(ROOT.glob("csrc/core/**/*.c")))
    code = re.sub(r"\{[^{}]*\}", "…", python) + re.sub(r"%(\.\d+)?[a-z]", "…", core)
    code = re.sub(r'"\s*f?"', "", code)  # between the literals of one string
    assert not [quoted for quoted in _listed() if not _is_of(quoted, code)]
