"""Runs the steps of the demo and shows them: progress bars, one table, the checks."""

from __future__ import annotations

import itertools
import os
import platform
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from digits import BATCH, HIDDEN_LAYERS, accuracy, width_for
from options import LEAST_STEPS, MOST_STEPS, SAVES
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from runs import (
    Figures,
    Run,
    Tick,
    figures,
    keep_memory,
    train,
    with_lightnings,
    with_ours,
    without_saves,
)
from stillframe._base.sizes import decimal
from stillframe.lightning import AsyncCheckpointIO

ROUNDS = 2  # runs of each way of saving, taken in turn, so that a slow phase affects all ways
WARM_UP_STEPS = 8
STEPS_S = 160  # seconds that all steps of all runs may take if the user gives no number of steps
REFRESH_S = 0.25
MOST_OTHERS = 0.05  # share of the CPUs; if other programs use more, lost times mean little
COUNTED = """\
Medians over the saves of {rounds}, of {steps} steps with a save after
every {every}. The first save of each run is left out, because its memory is new (its call took
{first_theirs} with Lightning, {first_ours} with stillframe). [b]Call[/b] is how long
save_checkpoint took; [b]wait[/b], how long the next optimizer step waited for the copy. [b]Lost
time[/b] is how much longer the steps after a save took than as many steps of the same run without
one, measured in turn, ± its standard error; [b]slowdown[/b] is what remains of it after call and
wait. Every run begins with a synced disk and an allocator that keeps freed memory (mallopt):
without that, steps vary by a third, with and without saves. [b]Finished[/b] counts from the start
of the call, to the written file for Lightning (which never syncs) and to the synced file and
directory for stillframe. [b]Extra memory[/b] is the process's peak above that of the same run
without saves, also in multiples of the state."""
BUSY = """\
Other programs used up to {share:.0%} of this machine's processors during a run. For slowdown and
lost time, run the demo on a quiet machine."""
NOISE = """\
Lost time is left out where it is smaller than its own error, because it would then show the noise
and not the save."""


class Story:
    """One run of the demo, started by `run`.

    Args:
        directory: Receives the checkpoints.
        directory_text: The directory and its file system, as they are printed.
        is_users_directory: The user gave the directory, so its files are left there.
    """

    def __init__(
        self,
        console: Console,
        *,
        nbytes: int,
        steps: int | None,
        directory: Path,
        directory_text: str,
        is_users_directory: bool,
    ) -> None:
        self.console = console
        self.nbytes = nbytes
        self.width = width_for(nbytes)
        self.steps = steps or 0  # 0: chosen after the warm-up
        self.every = self.steps // SAVES
        self.rounds = ROUNDS
        self.directory = directory
        self.directory_text = directory_text
        self.is_users_directory = is_users_directory
        self.failed = False

    def run(self) -> int:
        """Run the demo; return 0 if every check passed, 1 if not."""
        started = time.monotonic()
        keep_memory()
        self._introduce()
        plain: list[Run] = []
        theirs: list[Run] = []
        ours: list[Run] = []
        with self._bars() as bar:
            with bar("warming up", WARM_UP_STEPS) as tick:  # libraries are loaded at the first use
                self._choose_steps(train(self.width, WARM_UP_STEPS, tick))
            for number in range(1, self.rounds + 1):
                of_rounds = f"{number} of {self.rounds}"
                with bar(f"without saves, {of_rounds}", self.steps) as tick:
                    plain.append(without_saves(self.width, self.steps, tick))
                with bar(f"Lightning's plugin, {of_rounds}", self.steps) as tick:
                    theirs.append(self._train_and_save(with_lightnings, tick))
                with bar(f"stillframe's plugin, {of_rounds}", self.steps) as tick:
                    ours.append(self._train_and_save(with_ours, tick))
            half = self.steps // self.every // 2 * self.every  # the step of a save
            with bar(f"going on from step {half}", self.steps - half) as tick:
                resumed = train(
                    self.width,
                    self.steps,
                    tick,
                    plugin=AsyncCheckpointIO(),
                    resume=self.directory / f"step={half}.ckpt",
                )
        self._show_table(plain, theirs, ours)
        self._check_losses([*plain, *theirs, *ours])
        self._check_resume(ours[-1], resumed, half)
        self._check_file(ours[-1])
        left = "nothing is left behind"
        if self.is_users_directory:
            left = f"checkpoints kept in {self.directory}"
        self.console.print(f"  [dim]{time.monotonic() - started:.0f} s in all; {left}[/dim]")
        return 1 if self.failed else 0

    def _choose_steps(self, warm_up: Run) -> None:
        """Choose as many steps as this machine can do in STEPS_S, if the user gave no number."""
        if not self.steps:
            starts = itertools.pairwise(warm_up.starts)
            step_s = statistics.median(next_start - start for start, next_start in starts)
            # Three kinds of runs, a resumed run of half the steps, and a margin for slower steps.
            nr_runs = 3 * ROUNDS + 0.5 + 1
            nr_fitting = int(STEPS_S / (step_s * nr_runs))
            if nr_fitting < LEAST_STEPS:
                self.rounds = 1
            self.steps = min(max(nr_fitting - nr_fitting % SAVES, LEAST_STEPS), MOST_STEPS)
            self.every = self.steps // SAVES

    def _train_and_save(self, way: Callable[..., Run], tick: Tick) -> Run:
        """Train with a way of saving, after removing the files of the last run."""
        shutil.rmtree(self.directory, ignore_errors=True)
        return way(self.width, self.steps, tick, self.directory, self.every)

    # ---- display ---------------------------------------------------------------------------------

    def _introduce(self) -> None:
        self.console.print("\n[b]stillframe demo[/b]: one training, saved in two ways\n")
        weights = self.nbytes / 12e6
        facts = {
            "model": f"{HIDDEN_LAYERS} hidden layers of {self.width}, {weights:.3g} million "
            f"weights, AdamW: checkpoints of {decimal(self.nbytes)}",
            "data": f"1,797 handwritten digits (scikit-learn), batches of {BATCH}",
            "machine": f"{os.cpu_count()} cores; Python {platform.python_version()}, "
            f"torch {torch.__version__}, Lightning {metadata.version('lightning')}",
            "files": self.directory_text,
        }
        for name, fact in facts.items():
            self.console.print(f"  [dim]{name:8}[/dim]{fact}", soft_wrap=True)
        self.console.print()

    @contextmanager
    def _bars(self) -> Iterator[Callable[[str, int], Any]]:
        """Yield a function that makes a progress bar: `with bar(name, steps) as tick`.

        The training calls `tick` once in each step, which redraws the bar. So no other thread runs.
        """
        columns = (
            TextColumn("  {task.description:26}"),
            BarColumn(32),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        shown = self.console.is_terminal
        with Progress(
            *columns, console=self.console, auto_refresh=False, disable=not shown
        ) as progress:

            @contextmanager
            def bar(name: str, steps: int) -> Iterator[Tick]:
                """Show a bar of `steps` steps; without a terminal print one line at its end."""
                task = progress.add_task(name, total=steps)
                started = drawn = time.monotonic()

                def tick() -> None:
                    nonlocal drawn
                    progress.advance(task)
                    if time.monotonic() - drawn > REFRESH_S:
                        progress.refresh()
                        drawn = time.monotonic()

                progress.refresh()
                yield tick
                progress.stop_task(task)
                progress.refresh()
                if not shown:
                    took = time.monotonic() - started
                    self.console.print(f"  {name:28}{steps} steps in {took:.1f} s")

            yield bar

    def _show_table(self, plain: list[Run], theirs: list[Run], ours: list[Run]) -> None:
        """Print the table of figures, and below it how they are counted and what disturbed them."""
        lightning = figures(theirs, plain, self.every)
        stillframe = figures(ours, plain, self.every)
        both = (lightning, stillframe)
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 2))
        table.add_column("each save")
        table.add_column("Lightning", justify="right")
        table.add_column("stillframe", justify="right", style="bold")
        table.add_column("ratio", justify="right")
        table.add_row(
            "call",
            _ms(lightning.call_s),
            _ms(stillframe.call_s),
            _ratio(lightning.call_s, stillframe.call_s),
        )
        table.add_row("wait before the step", "none", _ms(stillframe.gate_s))
        above_noise = [each for each in both if _is_above_noise(each)]
        if above_noise:
            slowdowns = [_ms(each.slowdown_s) if each in above_noise else "-" for each in both]
            table.add_row("slowdown of the steps", *slowdowns)
            ratio = _ratio(lightning.lost_s, stillframe.lost_s) if len(above_noise) == 2 else ""
            table.add_row("[b]lost time[/b]", *map(_lost_time, both), ratio)
        table.add_row(
            "finished after",
            f"{_ms(lightning.finished_s)}, not synced",
            f"{_ms(stillframe.finished_s)}, durable",
            _ratio(lightning.finished_s, stillframe.finished_s),
        )
        table.add_row(
            "extra memory",
            *map(self._memory, both),
            _ratio(lightning.memory_bytes, stillframe.memory_bytes),
        )
        self.console.print(table)
        rounds = f"{self.rounds} runs each, taken in turn"
        if self.rounds == 1:
            rounds = "one run each"
        counted = COUNTED.format(
            rounds=rounds,
            steps=self.steps,
            every=self.every,
            first_theirs=_ms(lightning.first_call_s),
            first_ours=_ms(stillframe.first_call_s),
        )
        if len(above_noise) < 2:
            self._print_paragraph("", NOISE, style="yellow")
        share = max(run.others_share for run in [*plain, *theirs, *ours])
        if share > MOST_OTHERS:
            self._print_paragraph("", BUSY.format(share=share), style="yellow")
        self._print_paragraph("", counted, style="dim")

    def _print_paragraph(self, mark: str, text: str, style: str = "") -> None:
        """Print `text`, wrapped next to a `mark` in the margin."""
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_column(width=3, justify="right", no_wrap=True)
        grid.add_row(mark, text.replace("\n", " "))
        self.console.print(grid, style=style, width=min(self.console.width, 100))
        self.console.print()

    def _memory(self, measured: Figures) -> str:
        if measured.memory_bytes is None:
            return "not measured"
        return f"{decimal(measured.memory_bytes)}, {measured.memory_bytes / self.nbytes:.1f} x"

    def _check(self, holds: bool, claim: str) -> None:
        """Print `claim` with a mark that says whether it holds; if not, the demo has failed."""
        self.failed = self.failed or not holds
        if not holds:
            claim = f"[bold red]NOT SO:[/bold red] {claim}"
        has_unicode = (self.console.encoding or "").lower().startswith("utf")
        good, bad = ("✓", "✗") if has_unicode else ("ok", "NO")
        mark = f"[green]{good}[/green]" if holds else f"[bold red]{bad}[/bold red]"
        self._print_paragraph(mark, claim)

    # ---- checks ----------------------------------------------------------------------------------

    def _check_losses(self, runs: list[Run]) -> None:
        """Check that saving does not change the training: every run has the same losses."""
        same = all(run.losses == runs[0].losses for run in runs)
        self._check(same, f"all {len(runs)} runs have the same {self.steps} losses, bit for bit")

    def _check_resume(self, uninterrupted: Run, resumed: Run, half: int) -> None:
        """Check that the run resumed at step `half` has the losses and weights of the other."""
        assert uninterrupted.model is not None
        assert resumed.model is not None
        rest = {step: loss for step, loss in uninterrupted.losses.items() if step >= half}
        weights = uninterrupted.model.state_dict()
        same = rest == resumed.losses and all(
            torch.equal(tensor, weights[name])
            for name, tensor in resumed.model.state_dict().items()
        )
        first, last = rest[half], rest[self.steps - 1]
        self._check(
            same,
            f"resumed at step {half}: {len(rest)} losses ({first:.9f} ... {last:.9f}) and every "
            "weight as in the uninterrupted run, bit for bit",
        )

    def _check_file(self, run: Run) -> None:
        """Check that torch.load reads the last checkpoint, with the final weights of `run`."""
        assert run.model is not None
        path = self.directory / f"step={self.steps}.ckpt"
        loaded = torch.load(path, weights_only=True)
        weights = run.model.state_dict()
        same = loaded["state_dict"].keys() == weights.keys() and all(
            torch.equal(tensor, weights[name]) for name, tensor in loaded["state_dict"].items()
        )
        self._check(
            same and loaded["global_step"] == self.steps,
            f"plain torch.load(weights_only=True) reads {path.name} "
            f"({decimal(path.stat().st_size)}): the final weights, which classify "
            f"{accuracy(run.model):.1%} of the digits correctly",
        )


def _is_above_noise(measured: Figures) -> bool:
    """Return whether the lost time is larger than its standard error."""
    if measured.lost_s is None or measured.error_s is None:
        return False
    return abs(measured.lost_s) > measured.error_s


def _lost_time(measured: Figures) -> str:
    if measured.lost_s is None or measured.error_s is None:
        return "not measured"
    if not _is_above_noise(measured):
        return f"within the noise, ± {_ms(measured.error_s)}"
    return f"{_ms(measured.lost_s)} ± {_ms(measured.error_s)}"


def _ms(seconds: float | None) -> str:
    """Format seconds for people: "0.52 ms", "8.3 ms", "217 ms", "1.18 s"."""
    if seconds is None:
        return "not measured"
    ms = seconds * 1e3
    if abs(ms) >= 1000:
        return f"{seconds:.2f} s"
    if abs(ms) < 0.005:
        return "0 ms"
    if abs(ms) < 1:
        return f"{ms:.2f} ms"
    if abs(ms) < 10:
        return f"{ms:.1f} ms"
    return f"{ms:.0f} ms"


def _ratio(theirs: float | None, ours: float | None) -> str:
    """Return our figure relative to theirs, such as "1/12" or "1.3 x"; "" if one is not above 0."""
    if theirs is None or ours is None or ours <= 0 or theirs <= 0:
        return ""
    ratio = theirs / ours
    if ratio >= 9.5:
        return f"1/{ratio:.0f}"
    if ratio > 1:
        return f"1/{ratio:.1f}"
    return f"{1 / ratio:.1f} x"
