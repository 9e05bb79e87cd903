"""The list of mutants: single edits, each a plausible mistake, and the tests that have to notice.

`edits/*.toml` hold them, by file of the tree:

    [tests]                                   # of every edit of the file that names none itself
    "csrc/core/file/tmp.c" = ["test_tmp"]

    [["csrc/core/file/tmp.c"]]
    old = "O_CREAT | O_EXCL"                  # stands exactly once in the file
    new = "O_CREAT"
    loses = "another writer's temporary"      # what a user would lose
    tests = ["test_tmp", "asan/test_file"]    # C programs, of a variant or not, and ids of pytest
    # ("still": nobody looks again by himself, so that a lost wake-up hangs)
    same = "..."                              # instead of being killed: why nothing changes
    open = "..."                              # known to live: the test that is still wanted
"""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KNOWN = {"old", "new", "loses", "tests", "same", "open"}


class ListError(Exception):
    """The list is wrong, or no longer fits the code."""


@dataclass(frozen=True, slots=True)
class Mutant:
    file: str  # from the root of the tree
    old: str
    new: str
    loses: str
    tests: tuple[str, ...]
    same: str = ""
    open: str = ""

    @property
    def key(self) -> str:
        text = "\0".join((self.file, self.old, self.new))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def apply(self, text: str) -> str:
        """The file's text with the edit in it.

        Raises:
            ListError: `old` does not stand in it, or stands in it twice.
        """
        times = text.count(self.old)
        if times != 1:
            raise ListError(f"{self.file}: found {times} times, not once:\n{self.old}")
        return text.replace(self.old, self.new)

    def line(self, text: str) -> int:
        """The line of the file in which the edit begins."""
        return text.count("\n", 0, text.find(self.old)) + 1

    def shown(self) -> str:
        """The edit in one line, without what both sides have in common."""
        old, new = " ".join(self.old.split()), " ".join(self.new.split())
        start = 0
        while start < min(len(old), len(new)) and old[start] == new[start]:
            start += 1
        start = old.rfind(" ", 0, start) + 1
        return f"{old[start:][:50]!r} -> {new[start:][:50]!r}"


def load(folder: Path) -> list[Mutant]:
    """Every mutant of the list.

    Raises:
        ListError: An entry says too little or too much, or stands there twice.
    """
    found: dict[str, Mutant] = {}
    for path in sorted(folder.glob("*.toml")):
        tables = tomllib.loads(path.read_text())
        tests = tables.pop("tests", {})
        for file, edits in tables.items():
            for edit in edits:
                mutant = _mutant(file, edit, tests.get(file, ()))
                if found.setdefault(mutant.key, mutant) is not mutant:
                    raise ListError(f"{path.name}: stands there twice: {file}: {mutant.old}")
    return list(found.values())


def _mutant(file: str, edit: dict[str, Any], tests: list[str]) -> Mutant:
    if unknown := edit.keys() - KNOWN:
        raise ListError(f"{file}: unknown: {', '.join(sorted(unknown))}")
    mutant = Mutant(
        file,
        edit.get("old", ""),
        edit.get("new", ""),
        edit.get("loses", ""),
        tuple(edit.get("tests", tests)),
        edit.get("same", ""),
        edit.get("open", ""),
    )
    if not mutant.old or mutant.old == mutant.new:
        raise ListError(f"{file}: an edit that changes no text: {mutant.old!r}")
    if mutant.same and mutant.open:
        raise ListError(f"{file}: changes nothing, and is open: {mutant.old!r}")
    if not mutant.same and not (mutant.loses and mutant.tests):
        raise ListError(f"{file}: no tests, or nothing that a user would lose: {mutant.old!r}")
    return mutant
