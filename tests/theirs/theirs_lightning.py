"""Lightning's own checkpoint tests, with our plugin as every Trainer's default.

    python tests/theirs/theirs_lightning.py CHECKOUT [--delay 0 0.3] [--only ours ...] [-k ...]

CHECKOUT is a directory with Lightning's sources, of the version that is installed:

    git clone --depth 1 --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning CHECKOUT

The tests run with Lightning's synchronous saving, with its AsyncCheckpointIO and with ours. The
last two run once for each --delay, which makes the disk slower by so many seconds for each file.
The script prints the outcomes, and each test that passes with synchronous saving and fails with
ours. The exit status is 1 if there is such a test, and 2 for wrong usage.

Some of the tests need `jsonargparse[signatures]` and `tensorboard`. A test that fails with
synchronous saving, for example because a package is missing, is not counted.

With Lightning 2.6.6 (sources of 2026-07-20) there are 373 tests, of which 24 are skipped, mostly
for lack of a GPU. 339 pass with synchronous saving, and 10 need tensorboard. With ours and a flush
slower by 0.3 s 337 pass. `test_none_monitor_not_alternating` fails because it lists the directory
at the start of the next epoch and expects one complete file, which no asynchronous save can
guarantee. `test_trainer_save_checkpoint_storage_options` fails because it asserts that a mock of
`TorchCheckpointIO.save_checkpoint` was called.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.metadata import version
from pathlib import Path

from theirs import HERE, counts, lost, run

TESTS = (
    "checkpointing",
    "callbacks/test_model_checkpoint_additional_cases.py",
    "callbacks/test_model_checkpoint_edge_cases.py",
    "callbacks/test_model_checkpoint_manual_opt.py",
    "callbacks/test_model_checkpoint_step_interval_val_metric.py",
    "callbacks/test_stochastic_weight_avg.py",
    "callbacks/test_weight_averaging.py",
    "models/test_restore.py",
    "plugins/test_checkpoint_io_plugin.py",
    "trainer/connectors/test_checkpoint_connector.py",
    "trainer/connectors/test_signal_connector.py",
    "tuner",
)
# It needs checkpoints of old versions, which it downloads.
IGNORED = ("checkpointing/test_legacy_checkpoints.py",)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("checkout", type=Path, nargs="?", default=os.environ.get("LIGHTNING"))
    parser.add_argument("--delay", type=float, nargs="+", default=[0.0, 0.3], metavar="SECONDS")
    parser.add_argument(
        "--only", nargs="+", choices=["sync", "stock", "ours"], default=["sync", "stock", "ours"]
    )
    parser.add_argument("--tests", nargs="+", default=None, help="files below tests_pytorch")
    parser.add_argument("-k", default=None, help="pytest's -k")
    given = parser.parse_args()
    if given.checkout is None:
        parser.error(
            "a checkout of Lightning's sources is needed, for its tests are not in its wheel:\n"
            "  git clone --depth 1 --branch TAG https://github.com/Lightning-AI/pytorch-lightning"
            f" DIRECTORY\n  (the tag next to the installed version, {version('lightning')})"
        )
    given.checkout = Path(given.checkout).resolve()
    if not (given.checkout / "tests" / "tests_pytorch").is_dir():
        parser.error(
            f"{given.checkout} is no checkout of Lightning: tests/tests_pytorch is missing"
        )
    return given


def run_all(given: argparse.Namespace, kind: str, delay: float) -> dict[str, str]:
    """Run the tests and return the outcome of each."""
    tests = given.checkout / "tests"
    wanted = given.tests or [each for each in TESTS if (tests / "tests_pytorch" / each).exists()]
    return run(
        kind,
        [Path("tests_pytorch", each) for each in wanted],
        root=tests,
        cwd=tests,
        k=given.k,
        options=["-p", "their_lightning", *(f"--ignore=tests_pytorch/{each}" for each in IGNORED)],
        first=[HERE, tests],
        THEIRS_DELAY=str(delay),
    )


def main() -> int:
    given = arguments()
    plan = [("sync", 0.0)] if "sync" in given.only else []
    plan += [
        (kind, delay) for kind in ("stock", "ours") if kind in given.only for delay in given.delay
    ]
    print(f"Lightning {version('lightning')}, tests of {given.checkout}")
    found = {}
    for kind, delay in plan:
        found[kind, delay] = run_all(given, kind, delay)
        print(f"{kind}, disk slower by {delay:g} s: {counts(found[kind, delay])}", flush=True)
    worse = 0
    for (kind, delay), outcomes in found.items():
        names = lost(found.get(("sync", 0.0), {}), outcomes)
        worse += len(names) if kind == "ours" else 0
        for name in names:
            print(f"passes synchronously, not with {kind} and {delay:g} s: {name}")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
