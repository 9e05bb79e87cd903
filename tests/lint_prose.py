"""The language check of `make lint`, for pages, docstrings and comments.

It finds sentences that begin with a relative clause or are too long, and words that have a plainer
one. It also finds functions' docstrings that do not begin with a verb, and comment lines that are
too wide. It does not replace reading aloud. A sentence in `ACCEPTED` is right as it is.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_WORDS = 30  # of a sentence, or of its part up to a colon or semicolon; aim for 20
MOST_COLUMNS = 100  # of a line with a comment; a tab is 8 columns
CHECKED = [
    *("*.md", "docs/**/*.md", "benchmarks/*.md", "tests/*.md", "*.py", "tests/*.py"),
    *("csrc/**/*.[ch]", "tests/**/*.[ch]"),
    *(f"{folder}/**/*.py" for folder in ("python", "examples", "benchmarks", "tests")),
]
ACCEPTED = {
    "What other tools do, according to their code and documentation",
}
# A question may begin so, and so may a heading or a list's introduction: they end otherwise.
OPENING = re.compile(r"(Who|Whoever|Whose|Of what|Of which|What|Where what)\b(?!.*[?:]$)", re.S)
# The first word of a function's docstring, which should be a verb.
NO_VERB = re.compile(r"(Whether|Those|Its|Also|And|As|Of|Only|Not|Then|How)\b")
PLAINER = {
    "whoever": "a subject, such as a thread or a caller",
    "anew": "again",
    "for ever": "forever",
    "behind the call": "after the call",
    "beside training": "during training",
    "as ever": "as before, as usual",
    "goes round": "is sent to all ranks",
}
WORDS = re.compile(rf"\b({'|'.join(PLAINER)})\b", re.I)


def prose_of_page(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, paragraph), without code, headings and generated tables."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    text = re.sub(
        r"^```.*?^```|<!-- table .*?<!-- end of table -->", blank, text, flags=re.M | re.S
    )
    for number, line in enumerate(text.split("\n"), 1):
        if not line.lstrip().startswith(("#", "!", "<", "[", "|--")):
            for cell in line.split(" | ") if line.startswith("|") else [line]:
                yield number, cell.strip(" |")
            if line.startswith(("|", "- ")):
                yield number, ""


def prose_of_python(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for number, line in enumerate((ast.get_docstring(node) or "").split("\n")):
                yield getattr(node, "lineno", 1) + number, "" if line[:4] == "    " else line
            yield 0, ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")
            if not token.line.lstrip().startswith("#"):
                yield 0, ""
        elif token.type not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            yield 0, ""


def prose_of_c(text: str) -> Iterator[tuple[int, str]]:
    for match in re.finditer(r"/\*(.*?)\*/", text, re.S):
        first = text.count("\n", 0, match.start()) + 1
        for number, line in enumerate(match[1].split("\n")):
            line = re.sub(r"^\s*\*? ?", "", line)
            yield first + number, "" if line[:2] == "  " else line.strip()
        yield 0, ""


def sentences(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield (line, sentence); an empty line or a list item ends a paragraph."""
    start, words = 0, ""
    for number, line in [*lines, (0, "")]:
        if not line or re.match(r"[-*] |\d+\. |\w+: [A-Z]", line):
            yield from (
                (start, each)
                for each in re.split(r"(?<=[.!?])(?:\*\*)?\s+(?=[A-Z`*(-])", words)
                if each
            )
            start, words = number, ""
        start, words = start if words else number, f"{words} {line}".strip()


def functions(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, docstring) of each function of a module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            is_value = any(
                "property" in ast.unparse(each) or "fixture" in ast.unparse(each)
                for each in node.decorator_list
            )
            if not is_value and not node.name.startswith("test_"):
                yield node.lineno, ast.get_docstring(node) or ""


def complaints(path: Path) -> Iterator[str]:
    text = path.read_text()
    kind = {".md": prose_of_page, ".py": prose_of_python}.get(path.suffix, prose_of_c)
    name = path.relative_to(ROOT)
    for line, sentence in sentences(kind(text)):
        where = f"{name}:{line}: "
        if any(sentence.startswith(accepted) for accepted in ACCEPTED):
            continue
        if OPENING.match(sentence.lstrip("-*0123456789. ")) and sentence.endswith("."):
            yield f"{where}begins with a relative clause: {sentence[:70]}"
        count = max(
            len(re.findall(r"`[^`]+`|\"[^\"]+\"|\w\S*", part))
            for part in re.split(r"[;:]\s", sentence)
        )
        if count > MOST_WORDS:
            yield f"{where}{count} words: {sentence[:70]}"
        for word in WORDS.findall(re.sub(r"`[^`]*`|\"[^\"]*\"", "", sentence)):
            yield f'{where}"{word}": write {PLAINER[word.lower()]}'
    if path.suffix == ".md":
        return
    if path.suffix == ".py":
        for line, docstring in functions(text):
            if NO_VERB.match(docstring):
                yield f"{name}:{line}: does not begin with a verb: {docstring[:70]}"
    for line in sorted({line for line, _ in kind(text)}):
        whole = text.split("\n")[line - 1].expandtabs(8) if line else ""
        width = len(re.sub(r"\s+# (noqa|type: ignore).*", "", whole))
        if width > MOST_COLUMNS and not whole.endswith("\\") and "──" not in whole:
            yield f"{name}:{line}: {width} columns"


def main() -> int:
    files = sorted({file for pattern in CHECKED for file in ROOT.glob(pattern)})
    found = [complaint for file in files for complaint in complaints(file)]
    print(*found, f"prose: {len(files)} files, {len(found)} to look at", sep="\n")
    return min(len(found), 1)


if __name__ == "__main__":
    sys.exit(main())
