"""Accelerate's own checkpoint tests, with our `save_state` and `load_state` in its class.

    python tests/huggingface/theirs_accelerate.py SOURCES [--tests ...] [-k ...]

SOURCES is a directory with Accelerate's sources, of the version that is installed:

    pip download --no-deps --no-binary :all: accelerate==1.15.0 && tar xzf accelerate-1.15.0.tar.gz

The tests want the package `parameterized`. Each save is waited for, since they look at the
directory as soon as the call has returned. Exit status 1 if a test passes with stock and not with
ours.

With Accelerate 1.15.0, 42 of 73 tests pass with stock and the same 42 with ours. The others want a
GPU or packages that are not installed.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = ("test_state_checkpointing.py", "test_accelerator.py")
TIMEOUT_S = 240  # of one test


def run(given: argparse.Namespace, kind: str) -> dict[str, str]:
    """Run the tests and return the outcome of each."""
    with tempfile.TemporaryDirectory() as directory:
        outcomes = Path(directory) / "outcomes.json"
        command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "--tb=short"]
        command += ["-c", os.devnull, f"--rootdir={given.sources}", "-W", "ignore"]
        command += ["-p", "their_accelerate", "-p", "no:cacheprovider", f"--timeout={TIMEOUT_S}"]
        command += [] if given.k is None else ["-k", given.k]
        command += [str(given.sources / "tests" / each) for each in given.tests]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path[1:]]),
            "HF_HUB_OFFLINE": "1",
            "THEIRS_WITH": kind,
            "THEIRS_OUTCOMES": str(outcomes),
        }
        log = Path(tempfile.gettempdir()) / f"theirs-accelerate-{kind}.log"
        with log.open("w") as file:
            subprocess.run(
                command, cwd=directory, env=environment, stdout=file, stderr=file, check=False
            )
        if not outcomes.exists() or not json.loads(outcomes.read_text()):
            print(log.read_text()[-4000:], file=sys.stderr)
            raise SystemExit(f"the tests did not run; all they said is in {log}")
        return json.loads(outcomes.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("sources", type=Path)
    parser.add_argument("--tests", nargs="+", default=TESTS, help="files below tests")
    parser.add_argument("-k", default=None, help="pytest's -k")
    given = parser.parse_args()
    given.sources = given.sources.resolve()
    print(f"Accelerate {version('accelerate')}, tests of {given.sources}", flush=True)
    found = {}
    for kind in ("stock", "ours"):
        found[kind] = run(given, kind)
        counts = collections.Counter(found[kind].values())
        print(f"{kind}: {dict(counts)}", flush=True)
    lost = sorted(
        name
        for name, each in found["stock"].items()
        if each == "passed" and found["ours"].get(name) != "passed"
    )
    for name in lost:
        print(f"passes with stock, not with ours: {name}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
