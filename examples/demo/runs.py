"""Runs the demo's trainings: the same model, data and steps, each with one way of saving.

A run records when each of its steps starts. Each save has a *window* of steps, which begins with
the step that ends in the save. A window of steps without a save follows, so both kinds alternate
within one run. The figures are

    lost time of a save  = its window - as many steps of the adjacent windows without a save
    slowdown             = lost time - call - wait before the step

so the call, the wait and the slowdown together contain every effect of a save on the training. If a
save has not finished when its window ends, the next window counts as part of that save's window,
not as a window without a save.

Depending on earlier allocations, glibc returns freed gradients to the system or keeps them, so two
runs may differ in page faults alone. To prevent that, the allocator always keeps freed memory. Each
run begins after a sync, so that it does not wait for the writes of an earlier run.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from digits import DigitBatches, DigitsModel
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO as LightningsCheckpointIO
from stillframe import Engine, SaveReport
from stillframe._shell import bench_raw as raw
from stillframe.lightning import AsyncCheckpointIO

Tick = Callable[[], None]  # called once in each step; it draws the progress bar
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)


@dataclass
class Save:
    """One save as the training sees it; times in seconds."""

    path: str
    started: float  # time.perf_counter()
    call_s: float
    gate_s: float = 0.0
    finished_s: float | None = None  # from the call's entry; None until it has finished


@dataclass
class Run:
    """The measurements of one training run.

    `starts` holds values of time.perf_counter(): the start of each step, then the end of training.
    """

    saves: list[Save] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    grown_bytes: int | None = None  # of resident memory, from before the run to its peak
    others_share: float = 0.0  # of the machine's processors, used by other programs meanwhile
    losses: dict[int, float] = field(default_factory=dict)
    model: DigitsModel | None = None

    def _plain_step(self, save_number: int, period: int) -> float | None:
        """Return the mean seconds of a step in the window without a save after save `save_number`.

        Number 0 means the window before the first save. None means that the save had not finished
        when the window began.
        """
        half = period // 2
        # The step that ends in save n has the index n * period - 1. It begins the save's window of
        # `half` steps; the window without a save fills the rest of the period.
        begin = save_number * period - 1 + half
        end = (save_number + 1) * period - 1
        if save_number > 0:
            save = self.saves[save_number - 1]
            if save.finished_s is None or save.started + save.finished_s > self.starts[begin]:
                return None
        return (self.starts[end] - self.starts[begin]) / (end - begin)

    def lost(self, period: int) -> list[float]:
        """Return the lost time of each save in seconds, for a save every `period` steps.

        The first save is left out because its memory is new, and the last two because the run ends
        soon after them. The list is empty if the run has too few steps.
        """
        save_numbers = range(len(self.starts) // period - 1)
        plain_step_s: dict[int, float] = {}  # by the number of the save before the window
        for number in save_numbers:
            step_s = self._plain_step(number, period)
            if step_s is not None:
                plain_step_s[number] = step_s
        if not plain_step_s:
            return []
        lost_s = []
        for number in save_numbers[2:]:  # 0 is no save, 1 is the first one
            adjacent_s = [plain_step_s[n] for n in (number - 1, number) if n in plain_step_s]
            usual_s = statistics.mean(adjacent_s or plain_step_s.values())
            # If the save had not finished at the end of its window, the next window is its as well.
            nr_steps = period // 2 if number in plain_step_s else period
            begin = number * period - 1
            window_s = self.starts[begin + nr_steps] - self.starts[begin]
            lost_s.append(window_s - nr_steps * usual_s)
        return lost_s


class _Clock(Callback):
    """A callback that records when steps start. The time that `tick` takes counts for the previous
    step."""

    def __init__(self, run: Run, tick: Tick) -> None:
        self._run = run
        self._tick = tick

    def on_train_batch_start(self, *_: Any) -> None:
        self._tick()
        self._run.starts.append(time.perf_counter())

    def on_train_end(self, *_: Any) -> None:
        self._run.starts.append(time.perf_counter())


def _timed(save_checkpoint: Callable[..., None], run: Run) -> Callable[..., None]:
    """Return a function that calls `save_checkpoint` and adds the call to `run.saves`."""

    def timed(checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        start = time.perf_counter()
        save_checkpoint(checkpoint, path, storage_options)
        run.saves.append(Save(str(path), start, time.perf_counter() - start))

    return timed


class _WatchedTorchIO(TorchCheckpointIO):
    """The writer that Lightning's plugin calls on its thread.

    `finished` holds the time at which each file was written (time.perf_counter()), by its path.
    """

    def __init__(self) -> None:
        self.finished: dict[str, float] = {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        self.finished[str(path)] = time.perf_counter()


def train(
    width: int,
    steps: int,
    tick: Tick,
    *,
    plugin: Any = None,
    run: Run | None = None,
    directory: Path | None = None,
    every: int | None = None,
    resume: Path | None = None,
) -> Run:
    """Train to step `steps`, saving every `every` steps into `directory` if both are given.

    Args:
        plugin: The CheckpointIO that saves and loads; None for Lightning's default.
        run: Receives the measurements and is returned; None for a new one.
        resume: The checkpoint to resume from. Files are named `step=N.ckpt`.
    """
    run = run or Run()
    callbacks: list[Callback] = [_Clock(run, tick)]
    if directory is not None and every is not None:
        name = "{step}"
        callbacks.append(ModelCheckpoint(directory, name, save_top_k=-1, every_n_train_steps=every))
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        callbacks=callbacks,
        plugins=[plugin] if plugin is not None else None,
        logger=False,
        enable_checkpointing=every is not None,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    model = DigitsModel(width)
    os.sync()  # this run does not wait for writes of an earlier one
    others = raw.Others()
    trainer.fit(model, DigitBatches(), ckpt_path=resume)
    run.others_share = others.share()
    run.losses = model.losses
    run.model = model
    return run


def without_saves(width: int, steps: int, tick: Tick) -> Run:
    memory = _MemoryMeter()
    run = train(width, steps, tick)
    run.grown_bytes = memory.grown()
    return run


def with_lightnings(width: int, steps: int, tick: Tick, directory: Path, every: int) -> Run:
    """Train and save with Lightning's plugin; a save has finished when its file is written."""
    run = Run()
    base = _WatchedTorchIO()
    plugin = LightningsCheckpointIO(base)
    # Set on the instance, so that Lightning's class stays as shipped.
    setattr(plugin, "save_checkpoint", _timed(plugin.save_checkpoint, run))  # noqa: B010
    memory = _MemoryMeter()
    train(width, steps, tick, plugin=plugin, run=run, directory=directory, every=every)
    run.grown_bytes = memory.grown()
    for save in run.saves:
        if save.path in base.finished:
            save.finished_s = base.finished[save.path] - save.started
    return run


def with_ours(width: int, steps: int, tick: Tick, directory: Path, every: int) -> Run:
    """Train and save with stillframe's plugin; a save has finished when its file is durable.

    The engine is new, so the first save finds an empty pool, as in a new process.
    """
    run = Run()
    reports: dict[str, SaveReport] = {}
    reported = threading.Condition()

    def on_durable(path: Any, report: SaveReport) -> None:
        with reported:
            reports[str(path)] = report
            reported.notify_all()

    memory = _MemoryMeter()
    with Engine() as engine:
        plugin = AsyncCheckpointIO(engine=engine, on_durable=on_durable)
        setattr(plugin, "save_checkpoint", _timed(plugin.save_checkpoint, run))  # noqa: B010
        train(width, steps, tick, plugin=plugin, run=run, directory=directory, every=every)
        run.grown_bytes = memory.grown()
    with reported:  # callbacks have a thread of their own
        reported.wait_for(lambda: len(reports) == len(run.saves), timeout=10)
    for save in run.saves:
        report = reports.get(save.path)
        if report is not None:
            save.gate_s = report.gate_wait_s
            save.finished_s = report.durable_after_s
    return run


# ---- figures -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """Figures of one way of saving: medians over its warm saves, in seconds; None: not measured."""

    call_s: float
    first_call_s: float
    gate_s: float
    lost_s: float | None
    error_s: float | None  # standard error of `lost_s`
    finished_s: float | None
    memory_bytes: int | None  # the most of all rounds

    @property
    def slowdown_s(self) -> float | None:
        return None if self.lost_s is None else self.lost_s - self.call_s - self.gate_s


def figures(runs: list[Run], plain: list[Run], period: int) -> Figures:
    """Compute the figures of a way of saving from its runs.

    Memory is compared with the run without saves of the same round, in `plain`.
    """
    warm = [save for run in runs for save in run.saves[1:]]
    lost = [each for run in runs for each in run.lost(period)]
    finished = [save.finished_s for save in warm if save.finished_s is not None]
    memory = [
        run.grown_bytes - plain_run.grown_bytes
        for run, plain_run in zip(runs, plain, strict=True)
        if run.grown_bytes is not None and plain_run.grown_bytes is not None
    ]
    return Figures(
        call_s=statistics.median(save.call_s for save in warm),
        first_call_s=statistics.median(run.saves[0].call_s for run in runs),
        gate_s=statistics.median(save.gate_s for save in warm),
        lost_s=statistics.median(lost) if lost else None,
        error_s=_error(lost) if len(lost) > 2 else None,
        finished_s=statistics.median(finished) if finished else None,
        memory_bytes=max(memory) if memory else None,
    )


def _error(values: list[float]) -> float:
    """Return the standard error of the median, assuming a normal distribution.

    That is 1.2533 / sqrt(n) of the standard deviation, which is estimated as 1.4826 times the
    median distance from the median.
    """
    middle = statistics.median(values)
    distance = statistics.median(abs(value - middle) for value in values)
    return 1.2533 * 1.4826 * distance / math.sqrt(len(values))


def keep_memory() -> None:
    """Make glibc keep freed memory in every run; with other C libraries do nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest value that mallopt accepts
        mallopt(_M_TRIM_THRESHOLD, -1)  # never return memory


class _MemoryMeter:
    """Measures the growth of this process's resident memory from the peak that the kernel keeps."""

    def __init__(self) -> None:
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # returns freed memory
        if trim is not None:
            trim(0)
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the present value
            self._before: int | None = _status_bytes("VmRSS")
        except OSError:
            self._before = None

    def grown(self) -> int | None:
        """Return the bytes from the start to the peak, or None if the kernel does not tell."""
        return None if self._before is None else _status_bytes("VmHWM") - self._before


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")
