"""Defines the arguments of the demo and their bounds."""

from __future__ import annotations

import argparse
from pathlib import Path

from stillframe._base import sizes

SAVES = 6  # in a training run
MOST_STEPS = 96
LEAST_STEPS = 4 * SAVES  # stillframe watches a few steps before it copies after the call
LEAST_NBYTES = 1 << 20


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="demo",
        description="Trains a small model on the CPU, saves it with Lightning's AsyncCheckpointIO"
        " and with stillframe's, and shows what a save costs with each.",
        epilog="Exit status: 0 every check passed; 1 one failed; 2 the demo cannot run.",
    )
    made.add_argument(
        "--size",
        type=sizes.argparse_size_type(least=LEAST_NBYTES),
        default=300_000_000,
        metavar="BYTES",
        help="size of a checkpoint, such as 300MB or 2GiB (default: 300MB)",
    )
    made.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="where checkpoints go, and stay (default: a temporary directory)",
    )
    made.add_argument(
        "--steps",
        type=steps,
        metavar="N",
        help=f"steps of each training run, {SAVES} of which end in a save (default: "
        f"{MOST_STEPS}, fewer where they are slow)",
    )
    return made


def steps(text: str) -> int:
    """Parse a number of steps, and round it down to a multiple of SAVES.

    Raises:
        argparse.ArgumentTypeError: The text is not a number, or the number is too small.
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < LEAST_STEPS:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number, {LEAST_STEPS} or more")
    return number - number % SAVES
