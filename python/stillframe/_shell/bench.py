"""`stillframe bench DIR`: the speed of memory and disk, and of saves and loads compared with them.

Each of a few rounds measures a memcpy, a write of as many bytes with a sync, `async_save` of a
model with AdamW, a read, and `load`. A short write before chooses the size, so that the command
takes half a minute on any disk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stillframe._base.sizes import decimal
from stillframe._shell import bench_raw as raw
from stillframe._shell.bench_result import BenchResult, show

GOOD, UNUSABLE = 0, 2  # exit statuses

_TRIAL_NBYTES = 32 << 20  # the length of the short write that tells how fast the disk is
# The least and the most bytes of the state, unless the user asks for a size.
_LEAST_NBYTES = 32 << 20
_MOST_NBYTES = 512 << 20
_WRITE_S = 1.0  # the state is so large that one raw write takes about this time
_BUDGET_S = 15.0  # after this time no new round begins
_ROUNDS = 5  # the most rounds
# How many times the bytes of the state are needed:
_MEMORY_TIMES = 7  # two buffers, the state, its gradients, the pool, the loaded state, a margin
_DISK_TIMES = 3  # the raw file, the checkpoint, a margin
_TENSOR_NUMEL = 512 << 10  # elements of each weight, about


class BenchError(Exception):
    """A measurement cannot be made here; the text says why."""


# ---- measuring -------------------------------------------------------------------------------


class _BenchState:
    """A model's weights and AdamW's moments, `nbytes` in all."""

    def __init__(self, nbytes: int) -> None:
        import torch

        weight_nbytes = 3 * 4  # for each element of a weight: the weight and two moments in float32
        count = max(1, nbytes // (weight_nbytes * _TENSOR_NUMEL))
        numel = nbytes // (weight_nbytes * count)
        self.weights = [torch.nn.Parameter(torch.full((numel,), 0.5)) for _ in range(count)]
        for weight in self.weights:
            weight.grad = torch.full_like(weight, 1e-3)
        self.optimizer = torch.optim.AdamW(self.weights, lr=1e-4)
        for _ in range(4):  # after a few steps a save may defer the tensors
            self.optimizer.step()

    def tree(self) -> dict[str, Any]:
        return {"model": dict(enumerate(self.weights)), "optim": self.optimizer.state_dict()}


class _Bench:
    """The measurements of one run. As a context manager it ends a save that is under way.

    Args:
        directory: Gets the files that are written.
        nbytes: The bytes of the state.
        progress: Called with the name of each measurement that begins.
    """

    def __init__(self, directory: Path, nbytes: int, progress: Callable[[str], None]) -> None:
        from stillframe._save.engine import Engine

        self._directory = directory
        self._progress = progress
        progress("making a state")
        self._source = raw.make_buffer(nbytes)
        self._target = raw.make_buffer(nbytes)
        self._state = _BenchState(nbytes)
        self._nbytes = nbytes
        self._engine = Engine()
        self._handle: Any = None
        self.direct = True  # the raw writes bypass the page cache
        self.values: dict[str, list[float]] = {}  # seconds of each round, by the measurement's name
        self.first_durable_s = 0.0
        self.report: Any = None

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:  # an exception has interrupted a save
            self._handle.cancel()
        self._engine.close()
        if self._handle is not None:
            with contextlib.suppress(BaseException):
                self._handle.exception()  # takes the error, which would be logged otherwise

    @property
    def pool_bytes(self) -> int:
        return int(self._engine.stats()["pool_bytes"])

    def _add(self, name: str, seconds: float) -> None:
        self.values.setdefault(name, []).append(seconds)

    def median(self, name: str) -> float:
        return statistics.median(self.values[name])

    def make_first_save(self) -> None:
        """Make the first save, which is slow because the pool takes its memory."""
        self._progress("first save")
        self.first_durable_s = self._save().durable_after_s

    def round(self) -> None:
        """Make each measurement once, so that a slow moment spoils one round only."""
        self._progress("raw memcpy")
        self._add("memcpy", raw.measure_copy_seconds(self._source, self._target))
        self._progress("raw write + sync")
        path = self._directory / "raw"
        written, self.direct = raw.measure_write_seconds(path, self._source)
        self._add("write", written)
        self._progress("save")
        report = self._save()
        self._add("call", report.blocked_s)
        self._add("staged", report.staged_after_s)
        self._add("durable", report.durable_after_s)
        self._progress("raw read")
        self._add("read", raw.measure_read_seconds(path, self._target)[0])
        path.unlink()
        self._progress("load")
        self._load()

    def _save(self) -> Any:
        from stillframe._save.api import async_save

        path = self._directory / "save.pt"
        path.unlink(missing_ok=True)
        self._handle = async_save(self._state.tree(), path, engine=self._engine)
        self._handle.wait_staged()
        self.report = self._handle.result()
        self._handle = None
        return self.report

    def _load(self) -> None:
        from stillframe._load.load import load

        path = self._directory / "save.pt"
        raw.forget(path)
        start = time.perf_counter()
        tree = load(path)
        self._add("load", time.perf_counter() - start)
        del tree  # after the measurement, which it is no part of


def _choose_size(directory: Path, asked: int | None, progress: Callable[[str], None]) -> int:
    """Return the bytes of the state: `asked`, or by default as many as the disk writes in a second.
    Raise BenchError if there is too little memory or disk space."""
    progress("how fast is this disk?")
    max_by_memory = raw.available_memory_bytes() // _MEMORY_TIMES
    max_by_disk = shutil.disk_usage(directory).free // _DISK_TIMES
    if asked is None:
        most = min(max_by_memory, max_by_disk)
        if most < _LEAST_NBYTES:
            short = "memory" if max_by_memory < max_by_disk else f"room in {directory.parent}"
            raise BenchError(f"there is too little {short} to measure anything")
        trial, path = raw.make_buffer(_TRIAL_NBYTES), directory / "probe"
        seconds, _ = raw.measure_write_seconds(path, trial)
        path.unlink()
        written_in_time = _TRIAL_NBYTES / seconds * _WRITE_S
        nbytes = int(min(max(written_in_time, _LEAST_NBYTES), most, _MOST_NBYTES))
    elif asked > max_by_memory:
        raise BenchError(
            f"a state of {decimal(asked)} needs {decimal(asked * _MEMORY_TIMES)} of memory and"
            f" {decimal(max_by_memory * _MEMORY_TIMES)} are free: ask for a smaller --size"
        )
    elif asked > max_by_disk:
        raise BenchError(
            f"a state of {decimal(asked)} needs {decimal(asked * _DISK_TIMES)} on the disk and"
            f" {decimal(max_by_disk * _DISK_TIMES)} are free: ask for a smaller --size"
        )
    else:
        nbytes = asked
    return max(nbytes // raw.PAGE_BYTES, 1) * raw.PAGE_BYTES  # whole pages, for O_DIRECT


def measure(directory: Path, asked: int | None, progress: Callable[[str], None]) -> BenchResult:
    """Measure in the empty `directory`, and leave files there.

    Args:
        asked: The bytes of the state; None chooses them.
        progress: Called with the name of each measurement that begins.

    Raises:
        BenchError: There is too little memory or disk space.
        OSError, SaveError: The file system failed.
    """
    started = time.monotonic()
    others = raw.Others()  # begins to measure what other processes take
    nbytes = _choose_size(directory, asked, progress)
    with _Bench(directory, nbytes, progress) as bench:
        bench.make_first_save()
        rounds = 0
        while rounds < _ROUNDS and (rounds == 0 or time.monotonic() - started < _BUDGET_S):
            bench.round()
            rounds += 1
        return BenchResult(
            directory=str(directory.parent),
            file_system=raw.file_system_of(directory),
            nbytes=nbytes,
            rounds=rounds,
            raw_direct=bench.direct,
            memcpy_s=bench.median("memcpy"),
            write_s=bench.median("write"),
            read_s=bench.median("read"),
            call_s=bench.median("call"),
            staged_s=bench.median("staged"),
            durable_s=bench.median("durable"),
            first_durable_s=bench.first_durable_s,
            load_s=bench.median("load"),
            io_mode=bench.report.io_mode,
            pool_bytes=bench.pool_bytes,
            others=others.share(),
            fallbacks=list(bench.report.fallbacks),
        )


# ---- the directory ---------------------------------------------------------------------------


def _make_scratch_directory(parent: Path) -> contextlib.AbstractContextManager[Path]:
    """Make a directory in `parent`, or raise BenchError. Return a context manager that removes the
    directory at the end."""
    if not parent.exists():
        raise BenchError(f"{parent}: there is no such directory")
    if not parent.is_dir():
        raise BenchError(f"{parent} is a file: name the directory to measure")
    try:
        made = Path(tempfile.mkdtemp(prefix=".stillframe-bench-", dir=parent))
    except OSError as error:
        raise BenchError(f"{parent} cannot be written to: {error.strerror}") from None
    return raw.remove_directory_afterwards(made.resolve())


# ---- the command ---------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """Run the command. Return 0, or 2 if nothing can be measured."""
    from stillframe.errors import StillframeError

    try:
        with (
            _make_scratch_directory(Path(options.directory)) as directory,
            raw.open_status_line() as line,
        ):
            result = measure(directory, options.size, lambda text: line(f"{text} ..."))
    except BenchError as error:
        print(f"stillframe bench: {error}", file=sys.stderr)
        return UNUSABLE
    except (OSError, StillframeError, MemoryError) as error:
        text = str(error) or "there is not enough memory"
        print(f"stillframe bench: {options.directory}: {text}", file=sys.stderr)
        return UNUSABLE
    if options.json:
        print(json.dumps(result.as_json(), indent=2))
    else:
        show(result)
    return GOOD
