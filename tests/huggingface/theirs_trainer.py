"""transformers' own tests of its Trainer, with ours in place of it.

    python tests/huggingface/theirs_trainer.py SOURCES [--tests ...] [-k ...]

SOURCES is a directory with transformers' sources, as near as can be to the installed version:

    git clone --depth 1 --branch v5.23.0 https://github.com/huggingface/transformers SOURCES

The tests want the package `parameterized`. Exit status 1 if a test passes with stock, and not with
ours.

With transformers 5.23.0 and the tests of 5.16.0.dev0 (2026-08-19), 156 pass with stock and 155 of
them with ours. `test_event_flow` wants `on_save` before the next step begins; ours calls it when
the checkpoint is durable. The others want downloads, a GPU, or packages that are not installed.
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
TESTS = (
    "test_trainer.py",
    "test_trainer_callback.py",
    "test_trainer_checkpointing.py",
    "test_trainer_data.py",
    "test_trainer_evaluation.py",
    "test_trainer_hyperparameter.py",
    "test_trainer_optimizers.py",
    "test_trainer_seq2seq.py",
)
TIMEOUT_S = 120  # of one test


def run(given: argparse.Namespace, kind: str) -> dict[str, str]:
    """Run the tests and return the outcome of each."""
    with tempfile.TemporaryDirectory() as directory:
        outcomes = Path(directory) / "outcomes.json"
        command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "--tb=short"]
        command += ["--noconftest", "-c", os.devnull, f"--rootdir={given.sources}", "-W", "ignore"]
        command += ["-p", "their_trainer", "-p", "no:cacheprovider"]
        command += [f"--timeout={TIMEOUT_S}", "--continue-on-collection-errors"]
        command += [] if given.k is None else ["-k", given.k]
        command += [str(given.sources / "tests" / "trainer" / each) for each in given.tests]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path[1:]]),
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "THEIRS_WITH": kind,
            "THEIRS_OUTCOMES": str(outcomes),
        }
        log = Path(tempfile.gettempdir()) / f"theirs-trainer-{kind}.log"
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
    parser.add_argument("--tests", nargs="+", default=TESTS, help="files below tests/trainer")
    parser.add_argument("-k", default=None, help="pytest's -k")
    given = parser.parse_args()
    given.sources = given.sources.resolve()
    print(f"transformers {version('transformers')}, tests of {given.sources}", flush=True)
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
