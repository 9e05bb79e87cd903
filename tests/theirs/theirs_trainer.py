"""transformers' own tests of its Trainer, with ours in place of it.

    python tests/theirs/theirs_trainer.py SOURCES [--tests ...] [-k ...]

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
import sys
from importlib.metadata import version
from pathlib import Path

from theirs import counts, lost, run

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("sources", type=Path)
    parser.add_argument("--tests", nargs="+", default=TESTS, help="files below tests/trainer")
    parser.add_argument("-k", default=None, help="pytest's -k")
    given = parser.parse_args()
    root = given.sources.resolve()
    print(f"transformers {version('transformers')}, tests of {root}", flush=True)
    options = ["-p", "their_trainer", "--noconftest", "--continue-on-collection-errors"]
    found = {}
    for kind in ("stock", "ours"):
        found[kind] = run(
            kind,
            [root / "tests" / "trainer" / each for each in given.tests],
            root=root,
            k=given.k,
            options=options,
            HF_HUB_OFFLINE="1",
            CUDA_VISIBLE_DEVICES="",
        )
        print(f"{kind}: {counts(found[kind])}", flush=True)
    names = lost(found["stock"], found["ours"])
    for name in names:
        print(f"passes with stock, not with ours: {name}")
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
