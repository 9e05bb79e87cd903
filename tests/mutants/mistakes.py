"""Makes each mistake of a short list in a copy of the tree, and says whether its tests notice.

    python tests/mutants/mistakes.py [--only PART ...] [--sample N] [--list]

The list holds mistakes of meaning that a tool does not think of: a dropped fsync, a missing gate,
a wrong lock. `mistakes/*.toml` hold them, by file of the tree:

    [["csrc/core/file/tmp.c"]]
    loses = "what a user loses"
    old = "O_CREAT | O_EXCL"                  # occurs exactly once in the file
    new = "O_CREAT"
    tests = ["test_tmp", "asan/test_file"]    # C programs, with a variant or without, and pytest's
    # (in the variant "still" no wait ends by a time-out, so a lost wake-up hangs)

A mistake is *killed* when one of its tests fails, and *lived* when all of them pass. A mistake that
no longer applies, because the code or its test has changed, gives a warning. The exit status is 1
if a mistake lived.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import random
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tree import Ran, TreeCopy, together

HERE = Path(__file__).resolve().parent
MOST = 150  # nobody reads a longer list
FIELDS = {"loses", "old", "new", "tests"}


class ListError(Exception):
    """The list is incomplete, or has an unknown key."""


class GoneError(Exception):
    """The code or the test that a mistake is about has changed."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """One entry of the list."""

    file: str  # from the root of the tree
    loses: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, text: str) -> str:
        """Return the file's text with the mistake in it.

        Raises:
            GoneError: `old` does not occur exactly once in it.
        """
        if (times := text.count(self.old)) != 1:
            raise GoneError(f"its text stands {times} times in the file, not once")
        return text.replace(self.old, self.new)

    def __str__(self) -> str:
        return f"{self.file}: {self.loses}"


def load(folder: Path) -> list[Mistake]:
    """Read the list.

    Raises:
        ListError: An entry is incomplete, or is listed twice, or there are too many.
    """
    found: list[Mistake] = []
    for path in sorted(folder.glob("*.toml")):
        for file, entries in tomllib.loads(path.read_text()).items():
            for entry in entries:
                if entry.keys() != FIELDS or not entry["loses"] or not entry["tests"]:
                    raise ListError(f"{file}: an entry has {sorted(FIELDS)}, and none is empty")
                each = Mistake(file, **{**entry, "tests": tuple(entry["tests"])})
                if each.old == each.new or each in found:
                    raise ListError(f"{each}: it changes nothing, or is listed twice")
                found.append(each)
    if len(found) > MOST:
        raise ListError(f"{len(found)} entries are more than {MOST}: drop the least harmful")
    return found


class Runner:
    """Tries mistakes one by one, in a copy of the tree."""

    def __init__(self, tree: TreeCopy) -> None:
        self._tree = tree
        self._unchanged: dict[str, Ran] = {}  # test runs -> their end without a mistake

    def outcome(self, mistake: Mistake) -> tuple[str, str]:
        """Try one mistake.

        Returns:
            `killed`, `lived` or `gone`, and why.
        """
        path = self._tree.directory / mistake.file
        try:
            before = path.read_text()
            text = mistake.apply(before)
            for tests in together(mistake.tests):
                if not (ran := self._without(tests)).passed:
                    raise GoneError(f"{' '.join(tests)} fails without the mistake: {ran.why}")
            path.write_text(text)
            try:
                return self._try(mistake)
            finally:
                path.write_text(before)
                if not mistake.file.endswith(".py"):
                    self._tree.restore_extension()
        except (GoneError, OSError) as error:
            return "gone", str(error)

    def _try(self, mistake: Mistake) -> tuple[str, str]:
        for tests in together(mistake.tests):
            if why := self._tree.build(mistake.file, tests[0]):
                raise GoneError(f"it does not compile: {why}")
            ran = self._tree.run(tests, self._without(tests).seconds)
            if not ran.passed:
                return "killed", f"{' '.join(tests)}: {ran.why}"
        return "lived", f"{' '.join(mistake.tests)} passed"

    def _without(self, tests: list[str]) -> Ran:
        name = " ".join(tests)
        if name not in self._unchanged:
            why = self._tree.build(None, tests[0])
            self._unchanged[name] = Ran(False, why, 0.0) if why else self._tree.run(tests)
        return self._unchanged[name]


def chosen(mistakes: list[Mistake], options: argparse.Namespace) -> list[Mistake]:
    """Return the mistakes that the options ask for; a sample differs from day to day."""
    if options.only:
        mistakes = [each for each in mistakes if any(part in each.file for part in options.only)]
    if options.sample:
        draw = random.Random(options.day)
        mistakes = draw.sample(mistakes, min(options.sample, len(mistakes)))
    return mistakes


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", default=[], help="part of a file's name")
    parser.add_argument("--sample", type=int, default=0, help="so many, others every day")
    parser.add_argument("--day", default=datetime.date.today().isoformat(), help="of the sample")
    parser.add_argument("--patience", type=float, default=1.0, help="times every limit, under load")
    parser.add_argument("--list", action="store_true", help="print them, and run nothing")
    parser.add_argument("--root", type=Path, default=HERE.parents[1], help=argparse.SUPPRESS)
    parser.add_argument("--entries", type=Path, default=HERE / "mistakes", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    mistakes = chosen(load(options.entries), options)
    if options.list:
        print("\n".join(map(str, mistakes)))
        return 0
    if not mistakes:
        sys.exit("these options choose no mistake")
    root = options.root.resolve()
    runner = Runner(TreeCopy(root, root / "build/mutants/mistakes", patience=options.patience))
    counts: collections.Counter[str] = collections.Counter()
    for number, mistake in enumerate(mistakes, 1):
        start = time.monotonic()
        outcome, why = runner.outcome(mistake)
        counts[outcome] += 1
        seconds = time.monotonic() - start
        print(f"{number}/{len(mistakes)} {outcome:6} {seconds:5.1f} s  {mistake}", flush=True)
        if outcome != "killed":
            warning = "warning: the entry no longer applies: " if outcome == "gone" else ""
            print(f"    {warning}{why}".replace("\n", "\n    "), flush=True)
    print(f"mistakes: {', '.join(f'{count} {name}' for name, count in counts.most_common())}")
    return 1 if counts["lived"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
