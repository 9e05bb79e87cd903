"""The language check of `make lint`: openings and lengths of sentences in docs and comments.

It helps to notice a sentence that a reader has to decode; it does not replace reading aloud.
`CHECKED` lists what is rewritten already and grows. A sentence in `ACCEPTED` is right as it is.
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
CHECKED = [
    *("*.md", "docs/*.md"),
    *(f"csrc/core/{name}/*.[ch]" for name in ("sfr", "base", "trace", "cuda", "memory", "file")),
    *(
        f"csrc/core/{name}/*.[ch]"
        for name in ("commit", "device", "engine", "offload", "save", "check")
    ),
    *(f"csrc/core/{name}/*.[ch]" for name in ("archive", "snapshot", "stage", "restore")),
    "csrc/python/core/*.[ch]",
    *("csrc/python/skeleton/*.[ch]", "csrc/python/torch/*.[ch]", "csrc/python/*.[ch]"),
    "csrc/python/observer/*.[ch]",
    *("python/stillframe/*.py", "python/stillframe/_base/*.py", "python/stillframe/_tree/*.py"),
    *("python/stillframe/_offload/*.py", "examples/*.py", "examples/demo/*.py"),
    "benchmarks/*.py",
    *("python/stillframe/_lightning/*.py", "python/stillframe/_watch/*.py"),
    *(f"python/stillframe/{name}/*.py" for name in ("_save", "_snapshot", "_load", "_shell")),
]
NOT_YET = {
    "docs/gpu.md",
}
ACCEPTED = {
    "What other tools do, according to their code and documentation",
}
# A question may begin so, and so may a heading or a list's introduction: they end otherwise.
OPENING = re.compile(r"(Who|Whoever|Whose|Of what|Of which|What|Where what)\b(?!.*[?:]$)", re.S)


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


def complaints(path: Path) -> Iterator[str]:
    kind = {".md": prose_of_page, ".py": prose_of_python}.get(path.suffix, prose_of_c)
    for line, sentence in sentences(kind(path.read_text())):
        where = f"{path.relative_to(ROOT)}:{line}: "
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


def main() -> int:
    files = sorted({file for pattern in CHECKED for file in ROOT.glob(pattern)})
    files = [file for file in files if str(file.relative_to(ROOT)) not in NOT_YET]
    found = [complaint for file in files for complaint in complaints(file)]
    print(*found, f"prose: {len(files)} files, {len(found)} to look at", sep="\n")
    return min(len(found), 1)


if __name__ == "__main__":
    sys.exit(main())
