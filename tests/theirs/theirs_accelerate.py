"""Accelerate's own checkpoint tests, with our `save_state` and `load_state` in its class.

    python tests/theirs/theirs_accelerate.py SOURCES [--tests ...] [-k ...]

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
import sys
from importlib.metadata import version
from pathlib import Path

from theirs import counts, lost, run

TESTS = ("test_state_checkpointing.py", "test_accelerator.py")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("sources", type=Path)
    parser.add_argument("--tests", nargs="+", default=TESTS, help="files below tests")
    parser.add_argument("-k", default=None, help="pytest's -k")
    given = parser.parse_args()
    root = given.sources.resolve()
    print(f"Accelerate {version('accelerate')}, tests of {root}", flush=True)
    found = {}
    for kind in ("stock", "ours"):
        found[kind] = run(
            kind,
            [root / "tests" / each for each in given.tests],
            root=root,
            k=given.k,
            options=["-p", "their_accelerate"],
            timeout_s=240,
            HF_HUB_OFFLINE="1",
        )
        print(f"{kind}: {counts(found[kind])}", flush=True)
    names = lost(found["stock"], found["ours"])
    for name in names:
        print(f"passes with stock, not with ours: {name}")
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
