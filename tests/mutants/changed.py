"""Makes mutants of the changed lines with two tools, and reports which of them no test detects.

    python tests/mutants/changed.py [--base REVISION] [--most N]     lines changed since REVISION
    python tests/mutants/changed.py --files FILE ...                 whole files

universalmutator mutates C files, and cosmic-ray mutates Python files. Both work in a copy of the
tree, and run the tests that changed.toml names for the file, or those of `--tests`. A mutant that
no test detects may be equivalent, so a person must judge it, and the exit status is always 0.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path

from tree import TreeCopy, is_pytest, together

HERE = Path(__file__).resolve().parent
HUNK = re.compile(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@", re.MULTILINE)
SYNTAX = "-std=c11 -D_GNU_SOURCE -w -fsyntax-only -Icsrc/core -Icsrc/python"
LINES_OF_A_DIFF = 6
# cosmic-ray's replacements of `|`. Nearly all are in annotations, which no test evaluates.
UNIONS = "core/ReplaceBinaryOperator_BitOr_.*"


class Changes:
    """The lines that differ from a revision, of the files that are mutated."""

    def __init__(self, root: Path, base: str) -> None:
        self._root, self._base = root, base

    def lines(self) -> dict[str, set[int]]:
        """Return the numbers of changed and of new lines, by file."""
        names = self._names("diff", "--name-only", self._base)
        found = {file: self._changed(file) for file in names}
        for file in self._names("ls-files", "--others", "--exclude-standard"):
            found[file] = all_lines(self._root / file)
        return {file: numbers for file, numbers in sorted(found.items()) if numbers}

    def _names(self, *arguments: str) -> list[str]:
        names = self._git(*arguments).splitlines()
        return [each for each in names if is_mutated(each) and (self._root / each).is_file()]

    def _changed(self, file: str) -> set[int]:
        hunks = HUNK.findall(self._git("diff", "--unified=0", self._base, "--", file))
        return {int(at) + n for at, nr in hunks for n in range(int(nr or 1))}

    def _git(self, *arguments: str) -> str:
        command = ["git", *arguments]
        done = subprocess.run(command, cwd=self._root, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"make mutants: {shlex.join(command)}: {done.stderr.strip()}")
        return done.stdout


def is_mutated(file: str) -> bool:
    return file.startswith(("csrc/", "python/")) and file.endswith((".c", ".py"))


def all_lines(path: Path) -> set[int]:
    return set(range(1, len(path.read_text().splitlines()) + 1))


def tests_of(file: str) -> list[str]:
    """Return the tests that changed.toml names for a file."""
    table: dict[str, list[str]] = tomllib.loads((HERE / "changed.toml").read_text())
    fitting = [each for each in table if file.startswith((each + "/", each + "."))]
    if not fitting:
        sys.exit(f"make mutants: tests/mutants/changed.toml names no test for {file}")
    return table[max(fitting, key=len)]


class Tool:
    """A mutation tool that works on one file in a copy of the tree."""

    def __init__(self, tree: TreeCopy, file: str, tests: list[str], most: int) -> None:
        self.tree, self.file, self.tests, self.most = tree, file, tests, most
        self.directory = tree.directory / "build/made"
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        self.draw = random.Random(file)

    def seconds_without(self) -> float:
        """Run the tests without a mutant, which they have to pass.

        Returns:
            The seconds that they take.
        """
        start = time.monotonic()
        for tests in together(tuple(self.tests)):
            if why := self.tree.build(None, tests[0]):
                sys.exit(f"make mutants: {tests[0]}: {why}")
            ran = self.tree.run(tests)
            if not ran.passed:
                sys.exit(f"make mutants: {' '.join(tests)} fails without a mutant: {ran.why}")
        return time.monotonic() - start

    def do(self, name: str, *arguments: str) -> str:
        """Run a program of the environment in the copy, and return its output."""
        command = [str(Path(sys.executable).with_name(name)), *arguments]
        done = subprocess.run(
            command, cwd=self.tree.directory, env=self.tree.environment(),
            text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if done.returncode != 0:
            sys.exit(f"make mutants: {shlex.join(command)}: {done.stdout[-2000:]}")
        return done.stdout


class Universalmutator(Tool):
    """universalmutator, on a C file."""

    def mutants(self, lines: set[int]) -> list[str]:
        """Make the mutants that compile, and return their names."""
        wanted = self.directory / "lines"
        wanted.write_text("".join(f"{each}\n" for each in sorted(lines)))
        check = f"cc {SYNTAX} -I{sysconfig.get_path('include')} {self.file}"
        here = str(self.directory.relative_to(self.tree.directory))
        options = ["--cmd", check, "--lines", str(wanted), "--mutantDir", here]
        self.do("mutate", self.file, "c", *options)
        made = sorted(each.name for each in self.directory.glob("*.mutant.*.c"))
        return self.draw.sample(made, min(self.most, len(made)))

    def run(self, mutants: list[str]) -> tuple[int, list[str]]:
        """Run the tests on each mutant.

        Returns:
            The number of mutants that were killed, and the others as they differ.
        """
        limit_s = 20 + 3 * self.seconds_without()
        (self.directory / "chosen").write_text("".join(f"{each}\n" for each in mutants))
        parts = []
        for tests in together(tuple(self.tests)):
            if is_pytest(tests[0]):
                parts.append(f"{shlex.quote(self.tree.python)} setup.py -q build_ext --inplace")
            else:
                parts.append(f"make -s {self.tree.program(tests[0])}")
            parts.append(shlex.join(self.tree.command(tests)))
        here = self.directory.relative_to(self.tree.directory)
        options = ["--mutantDir", str(here), "--fromFile", str(here / "chosen")]
        options += ["--timeout", str(limit_s), "--prefix", str(here / "of")]
        self.do("analyze_mutants", self.file, " && ".join(parts), *options)
        killed = (self.directory / "of.killed.txt").read_text().split()
        lived = (self.directory / "of.notkilled.txt").read_text().split()
        return len(killed), [self._difference(each) for each in sorted(lived)]

    def _difference(self, name: str) -> str:
        before = (self.tree.directory / self.file).read_text().splitlines()
        after = (self.directory / name).read_text().splitlines()
        for number, (old, new) in enumerate(zip(before, after, strict=False), 1):
            if old != new:
                return f"{self.file}:{number}\n-{old.strip()}\n+{new.strip()}"
        return f"{self.file}: {name}"


class CosmicRay(Tool):
    """cosmic-ray, on a Python file."""

    def mutants(self, lines: set[int]) -> list[str]:
        """Make a session of all mutants, choose some of them, and return their numbers."""
        tests = shlex.join(self.tree.command(self.tests))
        config = {
            "module-path": self.file, "timeout": 20 + 3 * self.seconds_without(),
            "test-command": tests, "excluded-modules": [],
        }  # fmt: skip
        text = [f"{key} = {json.dumps(value)}" for key, value in config.items()]
        ranges = json.dumps([str(each) for each in sorted(lines)])
        text += ["[cosmic-ray.distributor]", 'name = "local"']
        text += ["[cosmic-ray.filters.line-filter.lines]", f"{json.dumps(self.file)} = {ranges}"]
        text += ["[cosmic-ray.filters.operators-filter]", f"exclude-operators = [{UNIONS!r}]"]
        self.config, self.session = (
            str(self.directory / "config.toml"),
            str(self.directory / "session"),
        )
        Path(self.config).write_text("\n".join(["[cosmic-ray]", *text]) + "\n")
        self.do("cosmic-ray", "init", self.config, self.session)
        self.do("cr-filter-lines", "--config", self.config, self.session)
        self.do("cr-filter-operators", self.session, self.config)
        return self._choose()

    def _choose(self) -> list[str]:
        from cosmic_ray.work_db import use_db
        from cosmic_ray.work_item import WorkerOutcome, WorkResult

        with use_db(self.session) as sessions:
            pending = sorted(each.job_id for each in sessions.pending_work_items)
            kept = self.draw.sample(pending, min(self.most, len(pending)))
            for each in set(pending) - set(kept):
                sessions.set_result(each, WorkResult(worker_outcome=WorkerOutcome.SKIPPED))
        return kept

    def run(self, mutants: list[str]) -> tuple[int, list[str]]:
        """Run the tests on each mutant.

        Returns:
            The number of mutants that were killed, and the others as they differ.
        """
        from cosmic_ray.work_db import WorkDB, use_db

        self.do("cosmic-ray", "exec", self.config, self.session)
        wanted, lived = set(mutants), []
        with use_db(self.session, mode=WorkDB.Mode.open) as sessions:
            for job, result in sessions.completed_work_items:
                if job.job_id in wanted and not result.is_killed:
                    lines = [x for x in (result.diff or "").splitlines() if x[:1] in "+-"][2:]
                    at = f"{self.file}:{job.mutations[0].start_pos[0]}"
                    lived.append("\n".join([at, *lines[:LINES_OF_A_DIFF]]))
        return len(mutants) - len(lived), sorted(lived)


def mutate(tool: Tool, lines: set[int]) -> str:
    """Make a tool mutate lines of its file; return a line about the result, and the survivors."""
    assert isinstance(tool, Universalmutator | CosmicRay)
    start = time.monotonic()
    mutants = tool.mutants(lines)
    if not mutants:
        return f"{tool.file}: the changed lines give no mutant"
    killed, lived = tool.run(mutants)
    minutes = (time.monotonic() - start) / 60
    head = f"{tool.file}: {len(mutants)} mutants, {killed} killed, {minutes:.1f} minutes"
    return "\n".join([head, *(f"  lived: {each}".replace("\n", "\n    ") for each in lived)])


def wanted(root: Path, options: argparse.Namespace) -> dict[str, set[int]]:
    if options.files:
        return {each: all_lines(root / each) for each in options.files}
    return Changes(root, options.base).lines()


def main(arguments: Iterable[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base", default="HEAD", help="the revision to compare with (HEAD)")
    parser.add_argument("--files", nargs="*", default=[], help="whole files, instead of changes")
    parser.add_argument("--tests", nargs="*", default=[], help="instead of those of changed.toml")
    parser.add_argument("--most", type=int, default=30, help="mutants a file, chosen at random")
    parser.add_argument("--patience", type=float, default=1.0, help="times every limit, under load")
    parser.add_argument("--python", default=sys.executable, help="the Python that runs the tests")
    parser.add_argument("--root", type=Path, default=HERE.parents[1], help=argparse.SUPPRESS)
    options = parser.parse_args([*arguments])
    root = options.root.resolve()
    lines = wanted(root, options)
    if not lines:
        print(f"make mutants: no C or Python file of the package differs from {options.base}")
        return 0
    directory = root / "build/mutants/changed"
    tree = TreeCopy(root, directory, patience=options.patience, python=options.python)
    for file, numbers in lines.items():
        kind = CosmicRay if file.endswith(".py") else Universalmutator
        tool = kind(tree, file, options.tests or tests_of(file), options.most)
        print(mutate(tool, numbers), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
