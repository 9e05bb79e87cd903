"""Runs `make demo`: one training, saved by Lightning's plugin and by stillframe's.

    python examples/demo/demo.py [--size 300MB] [--dir DIR] [--steps N]

The demo trains a small Lightning model on the handwritten digits that ship with scikit-learn: twice
without saves, twice with Lightning's own AsyncCheckpointIO, and twice with stillframe's. Then it
resumes from a checkpoint in the middle, and reads the last one with plain torch.load. It prints
what a save costs with each plugin.

Exit status: 0 every check passed; 1 one failed; 2 the demo cannot run here; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import options
from rich.console import Console
from stillframe._base.sizes import decimal
from stillframe._shell import bench_raw as raw

if TYPE_CHECKING:
    from story import Story

# Memory needed, as a multiple of the checkpoint, measured with Lightning 2.6. It holds the clone
# that Lightning makes, its writer's buffer and a copy of that buffer, and the training itself:
# weights, gradients, AdamW's moments and the temporaries of a step.
MEMORY_FACTOR = 6
MEMORY_BASE = 700 << 20  # torch, Lightning and scikit-learn


class CannotRun(Exception):
    """The demo cannot run here; the message says why and what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status (see the module)."""
    asked = options.parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an ASCII terminal gets a ? and no traceback
    return run(asked)


def run(asked: argparse.Namespace) -> int:
    """Run what was asked for; return the exit status."""
    console = Console(highlight=False)
    try:
        with _directory(asked.dir) as directory, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _check_room(asked.size, directory)
            with console.status("Importing Lightning and scikit-learn ..."):
                story_class = _import_story()
            with _quiet():
                return story_class(
                    console,
                    nbytes=asked.size,
                    steps=asked.steps,
                    directory=directory / "checkpoints",
                    directory_text=f"{directory}, {_file_system(directory)}",
                    is_users_directory=asked.dir is not None,
                ).run()
    except CannotRun as reason:
        print(f"demo: {reason}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, SystemExit):  # Lightning turns the first into the second
        print("demo: interrupted", file=sys.stderr)
        return 130


def _import_story() -> type[Story]:
    """Return the class Story; raise CannotRun if a package that it imports is missing."""
    try:
        from story import Story
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        package = {"sklearn": "scikit-learn"}.get(module, module)
        raise CannotRun(
            f"it needs {package}, which is not installed: pip install lightning scikit-learn"
        ) from error
    return Story


# ---- where it runs -------------------------------------------------------------------------------


@contextmanager
def _directory(asked: Path | None) -> Iterator[Path]:
    """Yield the directory for checkpoints: `asked`, which stays, or a temporary one on a disk.

    Raises:
        CannotRun: `asked` cannot be made, or has checkpoints already.
    """
    if asked is not None:
        try:
            asked.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CannotRun(f"cannot use --dir {asked}: {error.strerror}") from error
        if (asked / "checkpoints").exists():
            raise CannotRun(f"{asked / 'checkpoints'} is there already: give another --dir")
        yield asked.resolve()
        return
    temporary = Path(tempfile.gettempdir())
    candidates = (temporary, Path("/var/tmp"), Path.cwd())
    on_disk = [each for each in candidates if _is_writable_disk(each)]
    parent = on_disk[0] if on_disk else temporary
    with tempfile.TemporaryDirectory(prefix="stillframe-demo-", dir=parent) as name:
        yield Path(name).resolve()


def _is_writable_disk(path: Path) -> bool:
    return os.access(path, os.W_OK | os.X_OK) and raw.file_system_of(path) != "tmpfs"


def _file_system(path: Path) -> str:
    kind = raw.file_system_of(path)
    return "unknown file system" if kind == "unknown" else kind


def _check_room(nbytes: int, directory: Path) -> None:
    """Raise CannotRun if disk or memory are too small for checkpoints of `nbytes`."""
    # The files of one run are there at the same time, and one more is being written.
    need = int(nbytes * (options.SAVES + 0.5))
    free = shutil.disk_usage(directory).free
    if free < need:
        raise CannotRun(
            f"{directory} has {decimal(free)} free, and checkpoints of {decimal(nbytes)} need "
            f"{decimal(need)}: give a smaller --size, or a --dir with more room"
        )
    need = MEMORY_BASE + MEMORY_FACTOR * nbytes
    memory = raw.available_memory_bytes()
    if memory < need:
        raise CannotRun(
            f"{decimal(memory)} of memory are free, and checkpoints of {decimal(nbytes)} need "
            f"{decimal(need)} here, most of it for Lightning's copies: give a smaller --size"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Lightning's notices, which do not concern the demo and would break its display."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


if __name__ == "__main__":
    sys.exit(main())
