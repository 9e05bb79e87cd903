"""Saves states of 0.3 to 9 GB in every way, and loads each file in every way.

    python tests/large/large.py [--dir DIR] [--states NAME ...] [--saves WAY ...] [--loads WAY ...]

Saves and loads run in processes with a time limit for each case, so a hang fails one case and does
not end the run. The contents are compared with a pattern, 4 MiB at a time (states.py). A state that
does not fit the free disk or memory is skipped, and a line names it. A table follows at the end.
The exit status is 1 unless every case that ran is ok, and 2 if none ran.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import states
import ways

ROOT = Path(__file__).parents[2]
OK, WRONG, HANG, ERROR, SKIPPED = "ok", "WRONG", "HANG", "ERROR", "skipped"
SLOWEST = 50 * states.MB  # bytes a second: a slower case counts as a hang
BESIDE = 700 * states.MB  # bytes of memory besides the state: the interpreter, torch, buffers
GRACE_S = 20  # for a process to start and to end


@dataclass(frozen=True)
class Case:
    """One save, or one load of what was saved."""

    state: str
    saving: str
    loading: str = ""  # none: the save

    @property
    def row(self) -> str:
        return f"{self.saving}: {self.loading}" if self.loading else self.saving


@dataclass(frozen=True)
class Outcome:
    kind: str
    words: str = ""
    seconds: float = 0.0
    peak_nbytes: int = 0


class Runner:
    """Runs the cases of one file at a time, in a directory of its own.

    Args:
        directory: Where the files go.
        memory: Bytes that one case may have resident.
        limit: Seconds that each case has, besides those for its bytes.
        divisor: By how much each tensor is made smaller.
    """

    def __init__(self, directory: Path, memory: int, limit: float, divisor: int) -> None:
        self._path = directory / "state.pt"
        self._memory, self._limit, self._divisor = memory, limit, divisor

    def run(self, saved: Case, loadings: list[str]) -> Iterator[tuple[Case, Outcome]]:
        """Save, load in each of these ways, and remove the file. Yield each case when it ends."""
        try:
            if why := self._why_not(saved):
                yield saved, Outcome(SKIPPED, why)
                return
            (outcome,) = self._processes(saved, [])
            yield saved, outcome
            if outcome.kind == OK:
                cases = (replace(saved, loading=loading) for loading in loadings)
                yield from zip(cases, self._processes(saved, loadings), strict=True)
        finally:
            self._remove()

    def _why_not(self, case: Case) -> str:
        """Return why a file does not fit this machine; "" where it does."""
        nbytes = self._state(case.state).nbytes
        wanted = nbytes * ways.copies_in_memory(case.saving) + BESIDE
        if wanted > self._memory:
            return f"takes {wanted / 1e9:.1f} GB of memory, and may have {self._memory / 1e9:.1f}"
        free = shutil.disk_usage(self._path.parent).free
        if nbytes * 1.1 + BESIDE > free:
            return f"{nbytes / 1e9:.1f} GB do not fit the disk, which has {free / 1e9:.1f} free"
        return ""

    def _processes(self, case: Case, loadings: list[str]) -> Iterator[Outcome]:
        """Yield the outcome of the save, or of each load. One process makes all loads. If a load
        ends the process, a new one makes the rest."""
        left = max(1, len(loadings))
        while left > 0:
            for outcome in self._process(case, loadings[-left:] if loadings else []):
                left -= 1
                yield outcome

    def _process(self, case: Case, loadings: list[str]) -> Iterator[Outcome]:
        """Yield the outcomes up to the first case that ends the process, or of all cases."""
        state, nr_left = self._state(case.state), max(1, len(loadings))
        limit = self._limit + state.nbytes / SLOWEST
        child = Path(__file__).with_name("child.py")
        size = (str(self._divisor), str(limit))
        command = [sys.executable, child, case.saving, case.state, *size, self._path, *loadings]
        with (
            tempfile.TemporaryFile("w+") as err,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=err, text=True,
                env=self._environment(state), start_new_session=True,
            ) as process,
        ):  # fmt: skip
            # The process kills itself; this is for a process that cannot.
            kill = threading.Timer(nr_left * limit + GRACE_S, _kill, [process.pid])
            kill.start()
            try:
                for line in process.stdout or ():
                    if line.startswith("{"):
                        nr_left -= 1
                        yield _outcome(json.loads(line))
                status = process.wait()
            finally:
                kill.cancel()
                _kill(process.pid)
            if nr_left > 0:
                err.seek(0)
                yield _unfinished(status, err.read().strip())

    def _state(self, name: str) -> states.State:
        return states.STATES[name].scaled(self._divisor)

    def _environment(self, state: states.State) -> dict[str, str]:
        room = max(self._memory - state.nbytes - BESIDE, 64 * states.MIB)
        return {**os.environ, "STILLFRAME_POOL_BYTES": str(min(room, 8 * states.GB))}

    def _remove(self) -> None:
        """Remove the file of a save, complete or not."""
        for path in self._path.parent.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _kill(pid: int) -> None:
    """End a process and the command that it runs."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _outcome(found: dict[str, Any]) -> Outcome:
    words = found.get("error") or found["wrong"]
    kind = OK
    if "error" in found:
        kind = ERROR
    elif words:
        kind = WRONG
    return Outcome(kind, words, found["seconds"], found["peak_nbytes"])


def _unfinished(status: int, err: str) -> Outcome:
    """Return the outcome of a case that ended its process."""
    if "Timeout (" in err or status == -signal.SIGKILL:
        return Outcome(HANG, err or "killed")
    return Outcome(ERROR, f"exit status {status}: {err[-2000:]}")


def run_all(args: argparse.Namespace, runner: Runner) -> dict[Case, Outcome]:
    """Run the requested cases and print the outcome of each."""
    found: dict[Case, Outcome] = {}
    for name in args.states or states.STATES:
        for saving in args.saves or ways.SAVES:
            loads = ways.loads_of(saving, every=args.all)
            chosen = [each for each in loads if args.loads is None or each in args.loads]
            for case, outcome in runner.run(Case(name, saving), chosen):
                found[case] = outcome
                _report(case, outcome)
    return found


def _report(case: Case, outcome: Outcome) -> None:
    words = "" if outcome.kind in (OK, HANG) else f"  {outcome.words[:200]}"
    memory = f"{outcome.peak_nbytes / 1e9:5.1f} GB" if outcome.peak_nbytes else " " * 8
    print(
        f"{outcome.seconds:6.1f} s {memory}  {outcome.kind:7} {case.state}: {case.row}{words}",
        flush=True,
    )


def show(found: dict[Case, Outcome]) -> None:
    """Print the outcome of each case, and the reason of each failure."""
    columns = list(dict.fromkeys(case.state for case in found))
    rows = list(dict.fromkeys(case.row for case in found))
    kinds = {(case.row, case.state): outcome.kind for case, outcome in found.items()}
    width = max(map(len, rows))
    print(f"\n{'':{width}}", *(f"{name:>14}" for name in columns))
    for row in rows:
        print(f"{row:{width}}", *(f"{kinds.get((row, name), '-'):>14}" for name in columns))
    counts = dict.fromkeys((OK, WRONG, HANG, ERROR, SKIPPED), 0)
    for outcome in found.values():
        counts[outcome.kind] += 1
    peak = max(outcome.peak_nbytes for outcome in found.values())
    print("\n" + ", ".join(f"{count} {kind}" for kind, count in counts.items()), end="")
    print(f"; at most {peak / 1e9:.1f} GB resident")
    for case, outcome in found.items():
        if outcome.kind != OK:
            print(f"\n{outcome.kind} {case.state}: {case.row}\n{outcome.words}")


def available_nbytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dir", type=Path, default=ROOT / "build", help="where the files go")
    parser.add_argument("--states", nargs="+", metavar="NAME", choices=states.STATES)
    parser.add_argument("--saves", nargs="+", metavar="WAY", choices=ways.SAVES)
    parser.add_argument("--loads", nargs="+", metavar="WAY", choices=ways.EVERY_LOAD)
    parser.add_argument("--all", action="store_true", help="every way of loading of every file")
    parser.add_argument("--memory", type=float, default=12.0, help="GB that a case may have")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds besides those for bytes")
    parser.add_argument(
        "--divisor",
        type=int,
        default=1,
        help="of the sizes of tensors; the thresholds are lowered too",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    args.dir.mkdir(parents=True, exist_ok=True)
    memory = min(int(args.memory * states.GB), available_nbytes() - states.GB)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="large-", dir=args.dir) as directory:
        found = run_all(args, Runner(Path(directory), memory, args.limit, args.divisor))
    show(found)
    print(f"{time.monotonic() - start:.0f} s")
    kinds = {outcome.kind for outcome in found.values()} - {SKIPPED}
    return 2 if not kinds else int(kinds != {OK})


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # removes the files
    sys.exit(main())
