"""What does saving from a GPU cost, compared with peers? `make gpu` measures all parts.

    saves      every way: call, GPU memory, steps meanwhile, delay of `.item()`, time to the end
    sweep      copies of several sizes and numbers in flight: their speed, and delay of `.item()`
    pinning    how fast memory is pinned, and a first save with nothing warmed up
    profile    torch.profiler over one save: do copies overlap kernels, does anything synchronise?
    ahead      a training whose host runs ahead of the device: steps with saves and steps without

`.item()` is called on a stream that has nothing to do with the save, to see how long the save
delays other streams. Each way runs in a process of its own. Every table has stillframe and a plain
pinned copy of the same bytes, so that figures can be compared within one run. The script writes one
JSON and one table. Without a GPU it says so and exits with status 0. `--rehearse` runs everything
with a tiny state on the CPU over the tests' fake driver. That shows that the script works; its
figures mean nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from common import BenchError, print_table, write_json
from gpu_rows import Rows, other_rows, saves_rows
from gpu_ways import OURS, WAYS
from machine import machine_facts
from process import Worker

ROOT = Path(__file__).parents[1]
PARTS = ("saves", "sweep", "pinning", "profile", "ahead")
WAY_TIMEOUT_S = 150  # a way that takes longer is ended, and the table says so
COLUMNS = ("", "blocked", "GPU memory", "reserved", "steps", "D2H GB/s", ".item()", "end", "RSS")


# ---- each measure in a process of its own ----------------------------------------------------


def in_process(part: str, limit_s: float, *arguments: Any) -> Any:
    """Run a measure in a new process; return its result, or a sentence on why there is none.

    limit_s: Seconds that are left of the run; a measure gets at most WAY_TIMEOUT_S of them.
    """
    limit_s = min(limit_s, WAY_TIMEOUT_S)
    if limit_s < 1:
        return "not started: no time was left"
    try:
        with Worker(part, import_module, "gpu_measures", limit_s=limit_s) as worker:
            return worker.ready().call("measure", part, *arguments)
    except BenchError as error:
        return str(error).splitlines()[0]


# ---- the run ---------------------------------------------------------------------------------


def reason_to_skip() -> str:
    """Return why nothing can be measured here, or "" if there is a GPU."""
    try:
        import torch
    except ImportError as error:
        return f"no torch here ({error})"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return ""


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--states", nargs="+", choices=("small", "large"), default=["small", "large"]
    )
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=2, help="warm saves of each way (2)")
    parser.add_argument("--steps", type=int, default=6, help="steps timed in each round (6)")
    parser.add_argument("--cap-s", type=float, default=40.0, help="no new round after this (40)")
    parser.add_argument(
        "--item-s", type=float, default=0.5, help="seconds of each series of .item() calls (0.5)"
    )
    parser.add_argument("--dir", type=Path, default=Path("."), help="on the disk to write to")
    parser.add_argument(
        "--until-s",
        type=float,
        default=3600.0,
        help="nothing is begun after so many seconds (3600)",
    )
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "gpu.json")
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny, on the CPU: does the script work?"
    )
    return parser.parse_args(argv)


def measure(options: argparse.Namespace, directory: Path, results: dict[str, Any]) -> Rows:
    """Fill `results` part by part and write them after each; return the table's rows.

    The figures of finished parts are kept even if a later part fails.
    """
    rows: Rows = []
    deadline = time.monotonic() + options.until_s

    def run(part: str, what: str, *arguments: Any) -> Any:
        """Print `what` as progress, and measure a part in the time that is left."""
        print(what, file=sys.stderr, flush=True)
        return in_process(part, deadline - time.monotonic(), options, *arguments, directory)

    def write_results() -> None:
        write_json(options.json, {"options": str(options), "results": results})

    # Saves come first: they tell most, and the run may be ended before the other parts.
    sizes = options.states if "saves" in options.parts else []
    for size in sizes:
        ways: dict[str, Any] = {}
        for name in options.ways:
            ways[name] = run("saves", f"saves, {size}: {name}", size, name)
            results[f"saves {size}"] = ways
            write_results()
            for path in directory.iterdir():  # so that the next way starts with an empty directory
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        rows += [*saves_rows(size, ways), None]
    size = options.states[0]
    for part in options.parts:
        if part != "saves":
            results[part] = run(part, f"{part}, {size}", size)
            write_results()
            rows += [*other_rows(part, size, results[part]), None]
    return rows


def has_failed(results: dict[str, Any]) -> bool:
    """Return whether stillframe's saves or another part has failed; peers may fail.

    The result of a failed measure is a sentence in place of figures.
    """
    groups = [results, results.get("saves small", {}), results.get("saves large", {})]
    names = (OURS, *PARTS)
    return any(isinstance(group.get(name), str) for group in groups for name in names)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    reason = reason_to_skip()
    if options.rehearse:
        os.environ["STILLFRAME_LIBCUDA"] = str(ROOT / "build" / "libfake_cuda.so")
    elif reason:
        print(f"benchmarks/gpu.py skips: {reason}")
        return 0
    results: dict[str, Any] = {}
    directory = Path(tempfile.mkdtemp(prefix="stillframe-gpu-", dir=options.dir)).resolve()
    try:
        rows = measure(options, directory, results)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    facts = machine_facts(options.dir)
    facts["gpu"] = gpu_name() if not options.rehearse else "none: a rehearsal"
    print(f"{facts['gpu']}; {facts['cpu']}, {facts['cores']} cores; Linux {facts['kernel']};")
    print(f"Python {facts['python']}, torch {facts['torch']}, lightning {facts['lightning']}")
    title = "saving from a GPU"
    if options.rehearse:
        title += " (REHEARSAL: no figure means anything)"
    print_table(title, COLUMNS, rows)
    write_json(options.json, {"machine": facts, "options": str(options), "results": results})
    return 1 if has_failed(results) else 0


def gpu_name() -> str:
    import torch

    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"


if __name__ == "__main__":
    sys.exit(main())
