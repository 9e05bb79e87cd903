"""PyTorch's own tests of distributed checkpoints, with stillframe's writer and stager for its own.

    python tests/dcp/theirs_dcp.py CHECKOUT [--only stock ours] [-k ...] [FILE ...]

CHECKOUT is a directory with PyTorch's sources, of about the version that is installed, or only
with its `test/distributed/checkpoint`.

Runs the tests unchanged first. Tests that fail then need a GPU, a package or another version, and
do not count. Then runs them with stillframe's `FileSystemWriter` and `PinnedStager` in place of
PyTorch's `FileSystemWriter` and `DefaultStager`, in every module and process (their_site). Prints
how many pass, and each test that passes with PyTorch's parts and not with ours. The exit status is
1 if EXPECTED does not explain one of these, and 2 for wrong usage. The tests need `expecttest`.

Measured with torch 2.13.0 on a CPU and PyTorch's tests of 2026. There are 19 tests without a GPU in
test_file_system_checkpoint_cpu.py and test_format_utils.py. Of these, 16 pass unchanged (two need
`zstandard`, one a later torch) and 14 with ours: two use a writer extension, which is refused. In
e2e/test_e2e_save_and_load.py, 12 tests save with a writer or stager. Of these, 8 pass unchanged and
12 with ours; tests that need a GPU run on the CPU (their_site).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
FOLDER = Path("test/distributed/checkpoint")
FILES = (
    "e2e/test_e2e_save_and_load.py",
    "fsdp/test_fsdp_dsd.py",
    "test_async_process_executor.py",
    "test_checkpoint.py",
    "test_dedup_tensors.py",
    "test_dtensor_checkpoint.py",
    "test_dtensor_resharding.py",
    "test_file_system_checkpoint.py",
    "test_file_system_checkpoint_cpu.py",
    "test_format_utils.py",
    "test_hsdp_checkpoint.py",
    "test_planner.py",
    "test_save_load_api.py",
    "test_state_dict.py",
    "test_state_dict_stager.py",
    "test_tp_checkpoint.py",
    "test_utils.py",
)
TIMEOUT_S = 120  # of one test

# The reasons why tests pass with PyTorch's classes and fail with ours.
ROT13 = "TestDistributedStateDictSaveLoadRot13.test_read_write_tensor_and_blob_thread_count_"
REFUSED = "extensions of the format are refused, with the name of the writer that has them"
EXPECTED = {f"{ROT13}{threads}": REFUSED for threads in (1, 2)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("files", nargs="*", help=f"below {FOLDER}")
    parser.add_argument("--only", nargs="+", choices=["stock", "ours"], default=["stock", "ours"])
    parser.add_argument("-k", default=None, help="pytest's -k")
    given = parser.parse_args()
    given.checkout = given.checkout.resolve()
    given.files = given.files or [
        each for each in FILES if (given.checkout / FOLDER / each).exists()
    ]
    if not given.files:
        parser.error(f"{given.checkout} has none of PyTorch's tests in {FOLDER}")
    return given


def run(given: argparse.Namespace, kind: str) -> dict[str, str]:
    """Run the tests and return the outcome of each."""
    outcomes: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        results, log = Path(directory) / "results.xml", Path(tempfile.gettempdir())
        log = log / f"dcp-theirs-{kind}.log"
        command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "--tb=short"]
        # The checkout's own options are not used, because they need plugins.
        command += ["-c", os.devnull, f"--rootdir={given.checkout}", "-W", "ignore"]
        command += ["-p", "no:cacheprovider", f"--timeout={TIMEOUT_S}", f"--junitxml={results}"]
        command += [f"--basetemp={directory}/tmp"]
        command += [] if given.k is None else ["-k", given.k]
        command += [str(FOLDER / each) for each in given.files]
        paths = [str(HERE / "their_site"), *filter(None, sys.path[1:])]
        environment = {"PYTHONPATH": os.pathsep.join(paths), "THEIRS_WITH": kind}
        with log.open("w") as file:
            subprocess.run(
                command,
                cwd=given.checkout,
                env={**os.environ, **environment},
                stdout=file,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if not results.exists():
            print(log.read_text()[-4000:], file=sys.stderr)
            raise SystemExit(f"the tests did not run; all they said is in {log}")
        for case in xml.etree.ElementTree.parse(results).iter("testcase"):
            found = {each.tag for each in case} & {"failure", "error", "skipped"}
            name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
            outcomes[name] = "skipped" if "skipped" in found else "failed" if found else "passed"
    return outcomes


def main() -> int:
    given = arguments()
    print(f"torch {torch.__version__}, tests of {given.checkout}")
    print("| with | passed | failed | skipped |\n|---|---|---|---|", flush=True)
    found: dict[str, dict[str, str]] = {}
    for kind in given.only:
        found[kind] = run(given, kind)
        outcomes = list(found[kind].values())
        counts = [outcomes.count(each) for each in ("passed", "failed", "skipped")]
        print(f"| {kind} |", *(f"{count} |" for count in counts), flush=True)
    worse = 0
    for name, outcome in found.get("ours", {}).items():
        if outcome != "passed" and found.get("stock", {}).get(name) == "passed":
            worse += name not in EXPECTED
            print(f"passes with PyTorch's parts, not with ours: {name}: {EXPECTED.get(name, '?')}")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
