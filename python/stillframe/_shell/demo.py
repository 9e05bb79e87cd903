"""`python -m stillframe demo`: the same training, saved by Lightning's plugin and by ours.

It trains a small Lightning model on the handwritten digits that ship with scikit-learn: without
saving, saving with Lightning's own AsyncCheckpointIO, saving with ours, and all of that once more.
Then it goes on from a checkpoint in the middle and reads one with plain torch.load. It prints what
a save cost in each, and exits with 0 if all that was promised held, 1 if something did not, 2 if
it could not run here.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from stillframe._base.sizes import decimal
from stillframe._shell import bench_raw as raw
from stillframe._shell.console import Console
from stillframe._shell.usage import SAVES

if TYPE_CHECKING:
    from stillframe._shell.demo_story import Story

# Measured with Lightning 2.6: its clone, its writer's buffer and a copy of that, beside weights,
# gradients, AdamW's moments and what the step itself needs.
MEMORY_FACTOR = 6
MEMORY_BASE = 700 << 20  # torch, Lightning and scikit-learn


class CannotRun(Exception):
    """The demo cannot run here; the message says why and what to do."""


def run(options: argparse.Namespace) -> int:
    """The command; returns the exit status (see the module)."""
    console = Console(highlight=False)
    try:
        with _directory(options.dir) as directory, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _check_room(options.size, directory)
            with console.status("Importing Lightning and scikit-learn ..."):
                story_of = _import_story()
            with _quiet():
                return story_of(
                    console,
                    nbytes=options.size,
                    steps=options.steps,
                    directory=directory / "checkpoints",
                    place=f"{directory}, {_file_system(directory)}",
                    kept=options.dir is not None,
                ).tell()
    except CannotRun as reason:
        print(f"stillframe demo: {reason}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, SystemExit):  # Lightning turns the first into the second
        print("stillframe demo: interrupted", file=sys.stderr)
        return 130


def _import_story() -> type[Story]:
    try:
        from stillframe._shell.demo_story import Story
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        package = {"sklearn": "scikit-learn"}.get(module, module)
        raise CannotRun(
            f"it needs {package}, which is not installed: pip install lightning scikit-learn"
        ) from error
    return Story


# ---- where it runs -------------------------------------------------------------------------------


@contextmanager
def _directory(wanted: Path | None) -> Iterator[Path]:
    """The directory for checkpoints: the user's, which stays, or one that is removed at the end."""
    if wanted is not None:
        try:
            wanted.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CannotRun(f"cannot use --dir {wanted}: {error.strerror}") from error
        if (wanted / "checkpoints").exists():
            raise CannotRun(f"{wanted / 'checkpoints'} is there already: give another --dir")
        yield wanted.resolve()
        return
    for parent in (Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd()):
        if os.access(parent, os.W_OK | os.X_OK) and raw.file_system_of(parent) != "tmpfs":
            break
    else:
        parent = Path(tempfile.gettempdir())
    with tempfile.TemporaryDirectory(prefix="stillframe-demo-", dir=parent) as name:
        yield Path(name).resolve()


def _file_system(path: Path) -> str:
    kind = raw.file_system_of(path)
    return "unknown file system" if kind == "unknown" else kind


def _check_room(nbytes: int, directory: Path) -> None:
    """Raises CannotRun if disk or memory are too small for checkpoints of `nbytes`."""
    need = int(nbytes * (SAVES + 0.5))  # one run's files at a time, and the one being written
    free = shutil.disk_usage(directory).free
    if free < need:
        raise CannotRun(
            f"{directory} has {decimal(free)} free, and checkpoints of {decimal(nbytes)} need "
            f"{decimal(need)}: give a smaller --size, or a --dir with more room"
        )
    need = MEMORY_BASE + MEMORY_FACTOR * nbytes
    memory = raw.free_memory()
    if memory < need:
        raise CannotRun(
            f"{decimal(memory)} of memory are free, and checkpoints of {decimal(nbytes)} need "
            f"{decimal(need)} here, most of it for Lightning's copies: give a smaller --size"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Lightning's notices would only cut through the display: they are about other uses."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
