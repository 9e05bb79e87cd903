"""PyTorch's own tests of distributed checkpoints, with stillframe's writer and stager for its own.

    python tests/theirs/theirs_dcp.py CHECKOUT [--only stock ours] [-k ...] [FILE ...]

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
import sys
from pathlib import Path

import torch
from theirs import HERE, counts, lost, run

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


def main() -> int:
    given = arguments()
    print(f"torch {torch.__version__}, tests of {given.checkout}")
    found: dict[str, dict[str, str]] = {}
    for kind in given.only:
        found[kind] = run(
            kind,
            [FOLDER / each for each in given.files],
            root=given.checkout,
            cwd=given.checkout,
            k=given.k,
            first=[HERE / "their_site"],
        )
        print(f"{kind}: {counts(found[kind])}", flush=True)
    unexpected = False
    for name in lost(found.get("stock", {}), found.get("ours", {})):
        why = next((why for end, why in EXPECTED.items() if name.endswith(end)), None)
        if why is None:
            unexpected = True
        print(f"passes with PyTorch's parts, not with ours: {name}: {why or '?'}")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
