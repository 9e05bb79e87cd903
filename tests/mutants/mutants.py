"""Makes each edit of the list in a copy of the tree, and says whether its tests notice.

    python tests/mutants/mutants.py [-j N] [--only GLOB ...] [--sample N] [--seconds S]
    python tests/mutants/mutants.py --score | --publish     what is known of the whole list

An edit is *killed* when one of its tests fails, and *lived* when all pass. One that no longer
applies, or no longer compiles, is an error: the list follows the code. So is one that is said to
change nothing, or to be open, and is killed, and a test that fails without any edit. What was
killed, and whose file and tests are as they were then, is not run again (`--again` does):
build/mutants/results.json keeps it (`kept.py`), so a campaign can be interrupted. Exit status 0:
every edit is killed, explained, or known to be open; those that are open count against the score.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import fnmatch
import json
import queue
import random
import sys
import threading
import time
from pathlib import Path

import ground
import kept
import mutant_list
from kept import KNOWN, WELL
from mutant_list import Mutant

HERE = Path(__file__).resolve().parent


class Campaign:
    """A number of mutants, some grounds, and what came out."""

    def __init__(self, root: Path, mutants: list[Mutant], options: argparse.Namespace) -> None:
        self.root, self.mutants, self.options = root, mutants, options
        self.build = root / "build/mutants"
        self.kept = kept.Kept(root)
        # Before the tree is copied: what changes while it is tried counts as not tried.
        self.digests = {each.key: self.kept.digest(each) for each in mutants}
        self.lock = threading.Lock()
        self.untouched: dict[str, ground.Ran] = {}  # tests -> what came of them without an edit
        self.done: list[str] = []
        self.stop_at = time.monotonic() + options.seconds if options.seconds else None

    def run(self) -> int:
        self.build.mkdir(parents=True, exist_ok=True)
        waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
        # What was killed before is likely to be killed again.
        for mutant in sorted(self.mutants, key=lambda each: self.kept.outcome(each) == "before"):
            if self._known(mutant):
                self.done.append(mutant.key)
            else:
                waiting.put(mutant)
        if self.done:
            print(f"{len(self.done)} are known from an earlier run", flush=True)
        self.left = waiting.qsize()
        workers = [
            threading.Thread(target=self._work, args=(number, waiting))
            for number in range(min(self.options.jobs, self.left))
        ]
        for each in workers:
            each.start()
        try:
            for each in workers:
                each.join()
        except KeyboardInterrupt:
            self.stop_at = 0.0
            raise
        return self._report()

    def _known(self, mutant: Mutant) -> bool:
        return not self.options.again and self.kept.outcome(mutant) in WELL

    # ---- a worker ---------------------------------------------------------------------------

    def _work(self, number: int, waiting: queue.SimpleQueue[Mutant]) -> None:
        there = self.build / f"ground{number}"
        place = ground.Ground(self.root, there, self.options.variant, self.options.patience)
        with contextlib.closing(place):
            self._try_all(place, waiting)

    def _try_all(self, place: ground.Ground, waiting: queue.SimpleQueue[Mutant]) -> None:
        while self.stop_at is None or time.monotonic() < self.stop_at:
            try:
                mutant = waiting.get_nowait()
            except queue.Empty:
                return
            start = time.monotonic()
            try:
                outcome, why = self._try(place, mutant)
            except Exception as error:
                outcome, why = "error", repr(error)
            self._keep(mutant, outcome, why, time.monotonic() - start)

    def _try(self, place: ground.Ground, mutant: Mutant) -> tuple[str, str]:
        took = {}
        for tests in _together(mutant.tests):
            ran = self._untouched(place, tests)
            if not ran.passed:
                return "error", f"{' '.join(tests)} fails without the edit:\n{ran.why}"
            took[tests[0]] = ran.seconds
        try:
            place.edit(mutant)
        except mutant_list.ListError as error:
            return "does not apply", str(error)
        try:
            for tests in _together(mutant.tests):
                if why := place.compile(mutant, tests[0]):
                    return "does not compile", why
                ran = place.run(tests, took[tests[0]])
                if not ran.passed:
                    if said := mutant.same or mutant.open:
                        return "error", f"said to live ({said}):\n{ran.why}"
                    return "killed", f"{' '.join(tests)}: {ran.why}"
        finally:
            place.undo(mutant)
        if mutant.same:
            return "explained", mutant.same
        return ("open", mutant.open) if mutant.open else ("lived", mutant.loses)

    def _untouched(self, place: ground.Ground, tests: list[str]) -> ground.Ran:
        """Each test is run once without an edit, by whoever needs it first."""
        name = " ".join(tests)
        with self.lock:
            known = self.untouched.get(name)
        if known is not None:
            return known
        why = place.compile(None, tests[0])
        ran = ground.Ran(False, why, 0.0) if why else place.run(tests)
        with self.lock:
            self.untouched[name] = ran
        return ran

    def _keep(self, mutant: Mutant, outcome: str, why: str, seconds: float) -> None:
        with self.lock:
            self.done.append(mutant.key)
            line = self.kept.keep(mutant, self.digests[mutant.key], outcome, why, seconds)
            self.left -= 1
            print(
                f"{outcome:17}{seconds:6.1f} s {self.left:4} left  {mutant.file}:{line} "
                f"{mutant.shown()}",
                flush=True,
            )

    def _report(self) -> int:
        """Prints the survivors and the score, and keeps the score; the exit status."""
        results = [self.kept.results[key] for key in self.done]
        counts = collections.Counter(each["outcome"] for each in results)
        for each in sorted(results, key=lambda each: (each["file"], each["line"])):
            if each["outcome"] not in KNOWN:
                print(f"\n{each['file']}:{each['line']}: {each['outcome']}: {each['edit']}")
                print(f"  {each['why']}".replace("\n", "\n    "))
        if not_begun := len(self.mutants) - len(results):
            print(f"\n{not_begun} were not begun in {self.options.seconds:.0f} s")
        print("\n" + ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
        score = {
            "of": len(results),
            **counts,
            "score": round(kept.share(counts), 4),
        }
        (self.build / "score.json").write_text(json.dumps(score, indent=1) + "\n")
        print(f"mutants: {score['score']:.1%} of {len(results)} killed or explained")
        return 0 if results and counts.keys() <= set(KNOWN) else 1


def _together(tests: tuple[str, ...]) -> list[list[str]]:
    """C programs one by one, in their order; all of pytest in one process, behind them."""
    python = [each for each in tests if ground.is_pytest(each)]
    return [*([each] for each in tests if each not in python), *([python] if python else [])]


def chosen(mutants: list[Mutant], options: argparse.Namespace) -> list[Mutant]:
    """Those that the options ask for; of a sample, others every day."""
    if options.only:
        mutants = [each for each in mutants if any(_is_asked_for(each, x) for x in options.only)]
    if options.sample:
        mutants = [each for each in mutants if _is_for_samples(each)]
        rng = random.Random(options.day)
        mutants = rng.sample(mutants, min(options.sample, len(mutants)))
    return mutants


def _is_asked_for(mutant: Mutant, only: str) -> bool:
    return only == mutant.key or fnmatch.fnmatch(mutant.file, f"*{only}*")


def _is_for_samples(mutant: Mutant) -> bool:
    """Whether it needs no compiled extension, and no other variant: there is no time for those."""
    python = mutant.file.endswith(".py")
    extension = not python and any(map(ground.is_pytest, mutant.tests))
    variant = any("/" in test for test in mutant.tests if not ground.is_pytest(test))
    return not (extension or variant or mutant.same or mutant.open)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-j", dest="jobs", type=int, default=1, help="edits tried at a time")
    parser.add_argument("--only", action="append", default=[], help="part of a file's name")
    parser.add_argument("--sample", type=int, default=0, help="so many, others every day")
    parser.add_argument("--seconds", type=float, default=0.0, help="begin none after that time")
    parser.add_argument("--day", default=datetime.date.today().isoformat(), help="of the sample")
    parser.add_argument("--variant", default="plain", help="of C programs (plain, asan, tsan)")
    parser.add_argument("--patience", type=float, default=1.0, help="times every limit, under load")
    parser.add_argument("--again", action="store_true", help="what is known already too")
    parser.add_argument("--list", action="store_true", help="print them, and run nothing")
    parser.add_argument("--score", action="store_true", help="print what is known of all of them")
    parser.add_argument("--publish", action="store_true", help="and write it into CONTRIBUTING.md")
    parser.add_argument("--root", type=Path, default=HERE.parents[1], help=argparse.SUPPRESS)
    parser.add_argument("--edits", type=Path, default=HERE / "edits", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    mutants = chosen(mutant_list.load(options.edits), options)
    if options.list:
        for each in mutants:
            print(f"{each.key} {each.file}: {each.shown()}")
        return 0
    if options.score or options.publish:
        found = kept.score(kept.Kept(options.root), mutants)
        print(kept.table(found), end="")
        if options.publish:
            kept.write(found, options.root)
        return 0
    if not mutants:
        sys.exit("no mutant is chosen by these options")
    day = f", chosen for {options.day}" if options.sample else ""
    print(f"{len(mutants)} mutants{day}", flush=True)
    return Campaign(options.root.resolve(), mutants, options).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
