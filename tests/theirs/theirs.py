"""Runs the tests of another library with its own parts and with ours, and compares the outcomes.

Each script of this folder names a library's tests. A pytest plugin (`their_*.py`) or a module that
each interpreter imports (`their_site`) puts our parts into place, if the environment says
THEIRS_WITH=ours. Tests that fail with the library's own parts want a GPU, a package or another
version, and do not count.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent


def run(
    kind: str,
    tests: Iterable[Path],
    *,
    root: Path,
    cwd: Path | None = None,
    k: str | None,
    options: Iterable[str] = (),
    first: Iterable[Path] = (HERE,),
    timeout_s: int = 120,
    **environment: str,
) -> dict[str, str]:
    """Run the tests and return the outcome of each: passed, failed or skipped.

    Args:
        kind: Whose parts they use, as THEIRS_WITH.
        tests: Files and folders below `root`.
        root: The directory of the library's sources.
        cwd: Where the tests run, a temporary directory by default.
        k: The argument of pytest's option -k.
        first: Folders that come first on PYTHONPATH.
        timeout_s: The longest that one test may take.
    """
    with tempfile.TemporaryDirectory() as directory:
        results = Path(directory) / "results.xml"
        command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "--tb=short"]
        # The sources' own options are not used, because they need plugins.
        command += ["-c", os.devnull, f"--rootdir={root}", "-W", "ignore", "-p", "no:cacheprovider"]
        command += [f"--timeout={timeout_s}", f"--junitxml={results}"]
        command += [f"--basetemp={directory}/tmp", *options]
        command += [] if k is None else ["-k", k]
        command += map(str, tests)
        paths = [*map(str, first), *filter(None, sys.path[1:])]
        log = Path(tempfile.gettempdir()) / f"{Path(sys.argv[0]).stem}-{kind}.log"
        with log.open("w") as file:
            subprocess.run(
                command,
                cwd=cwd or directory,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(paths),
                    "THEIRS_WITH": kind,
                    **environment,
                },
                stdout=file,
                stderr=subprocess.STDOUT,
                check=False,
            )
        outcomes = _outcomes(results) if results.exists() else {}
        if not outcomes:
            print(log.read_text()[-4000:], file=sys.stderr)
            raise SystemExit(f"the tests did not run; their output is in {log}")
        return outcomes


def _outcomes(results: Path) -> dict[str, str]:
    outcomes: dict[str, str] = {}
    for case in xml.etree.ElementTree.parse(results).iter("testcase"):
        found = {each.tag for each in case} & {"failure", "error", "skipped"}
        name = f"{case.get('classname', '')}.{case.get('name')}"
        outcomes[name] = "skipped" if "skipped" in found else "failed" if found else "passed"
    return outcomes


def counts(outcomes: dict[str, str]) -> str:
    """Return a line with the number of each outcome."""
    values = list(outcomes.values())
    return ", ".join(f"{values.count(each)} {each}" for each in ("passed", "failed", "skipped"))


def lost(stock: dict[str, str], ours: dict[str, str]) -> list[str]:
    """Return the tests that pass with the library's own parts and not with ours."""
    return sorted(
        name
        for name, outcome in stock.items()
        if outcome == "passed" and ours.get(name) != "passed"
    )
