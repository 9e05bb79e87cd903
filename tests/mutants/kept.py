"""What came of the edits, as earlier campaigns left it, and the score over the whole list.

An outcome is of the edit, its file and its tests as they were: once one of them has changed, the
edit has to be tried again, and counts as what it came to before. The score is published:
`mutants.py --publish` writes `score.json` beside this file and the table of CONTRIBUTING.md, and
`make test` compares the two.
"""

from __future__ import annotations

import collections
import datetime
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import ground
from mutant_list import Mutant

WELL = ("killed", "explained")
KNOWN = (*WELL, "open")
WRONG = ("error", "does not apply", "does not compile")
# Of the table, and what stands in it.
COLUMNS = ("killed", "explained", "open", "lived", "wrong", "before", "not run")
PAGE, SCORE = "CONTRIBUTING.md", "tests/mutants/score.json"
_TABLE = re.compile(r"(<!-- table mutants -->\n).*?(<!-- end of table -->)", re.DOTALL)


class Kept:
    """The outcomes in `build/mutants/results.json` of a tree."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / "build/mutants/results.json"
        self.results: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            self.results = json.loads(self.path.read_text())

    def outcome(self, mutant: Mutant) -> str:
        """`before` where it was killed or explained and its file or a test was another then;
        `not run` where nothing good is known."""
        kept = self.results.get(mutant.key, {})
        if kept.get("digest") == self.digest(mutant):
            return str(kept["outcome"])
        return "before" if kept.get("outcome") in WELL else "not run"

    def keep(self, mutant: Mutant, digest: str, outcome: str, why: str, seconds: float) -> int:
        """Of the files as they were when `digest` was made. Returns the line of the edit."""
        path = self.root / mutant.file
        line = mutant.line(path.read_text()) if path.is_file() else 0
        self.results[mutant.key] = {
            "file": mutant.file,
            "line": line,
            "edit": mutant.shown(),
            "outcome": outcome,
            "why": why,
            "seconds": round(seconds, 1),
            "digest": digest,
        }
        partial = self.path.with_suffix(".new")
        partial.write_text(json.dumps(self.results, indent=1))
        os.replace(partial, self.path)
        return line

    def digest(self, mutant: Mutant) -> str:
        """Of what decides: the edit, its file, the tests that are named."""
        digest = hashlib.sha256(repr(mutant).encode())
        names = [mutant.file]
        for test in mutant.tests:
            name = test.partition("::")[0]
            names += [name] if ground.is_pytest(test) else self._program(name)
        for name in names:
            path = self.root / name
            digest.update(path.read_bytes() if path.is_file() else b"missing")
        return digest.hexdigest()

    def _program(self, name: str) -> list[str]:
        found = self.root.glob(f"tests/c/**/{name.rpartition('/')[2]}.c")
        return [str(each.relative_to(self.root)) for each in found]


def share(counts: dict[str, int], well: tuple[str, ...] = WELL) -> float:
    """Of all edits those that are killed or explained."""
    return sum(counts.get(each, 0) for each in well) / max(1, sum(counts.values()))


def score(kept: Kept, mutants: list[Mutant]) -> dict[str, Any]:
    """How many edits of each folder came to what."""
    folders: dict[str, collections.Counter[str]] = {}
    timed_out = 0
    for each in mutants:
        outcome = kept.outcome(each)
        folder = "/".join(Path(each.file).parent.parts[:3])
        folders.setdefault(folder, collections.Counter())[
            "wrong" if outcome in WRONG else outcome
        ] += 1
        timed_out += outcome == "killed" and "timed out" in kept.results[each.key]["why"].lower()
    return {
        "date": datetime.date.today().isoformat(),
        "killed_by_a_timeout": timed_out,
        "folders": {name: dict(sorted(counts.items())) for name, counts in sorted(folders.items())},
    }


def table(found: dict[str, Any]) -> str:
    """Of Markdown; columns in which nothing stands are left out."""
    total: collections.Counter[str] = collections.Counter()
    for counts in found["folders"].values():
        total.update(counts)
    columns = [each for each in COLUMNS if total[each]]
    rows = [*found["folders"].items(), ("all", total)]
    lines = [
        f"{found['date']}: {total.total():,} edits, {share(total):.1%} killed or explained as the"
        f" files are, {share(total, (*WELL, 'before')):.1%} as they are or were when it was tried;"
        f" {found['killed_by_a_timeout']} by a time-out.",
        "",
        f"| | edits | {' | '.join(columns)} |",
        "|---|" + "---:|" * (len(columns) + 1),
    ]
    for name, counts in rows:
        cells = [f"{sum(counts.values()):,}", *(f"{counts.get(each, 0):,}" for each in columns)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write(found: dict[str, Any], root: Path) -> None:
    """Puts the score where it is published."""
    (root / SCORE).write_text(json.dumps(found, indent=1) + "\n")
    page = (root / PAGE).read_text()
    (root / PAGE).write_text(_TABLE.sub(lambda at: at[1] + table(found) + at[2], page))


def is_published(root: Path) -> bool:
    """Whether the page says what `score.json` does."""
    at = _TABLE.search((root / PAGE).read_text())
    said = "<!-- table mutants -->\n" + table(json.loads((root / SCORE).read_text()))
    return at is not None and at[0] == said + at[2]
