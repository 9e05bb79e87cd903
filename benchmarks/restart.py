"""How long does a training that died take until it has made its first step again?

    python benchmarks/restart.py --dir DIR

It measures from the start of the process to the end of the first step of `Trainer.fit(ckpt_path=)`,
imports included. It compares Lightning's own CheckpointIO with stillframe's, with the file in the
page cache and without. It also measures the peak of resident memory during the resume, beyond what
the model itself takes. README.md says more.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from common import (
    BenchError,
    Series,
    end_with,
    format_size,
    format_times,
    parse_size,
    print_table,
    raw,
    write_json,
)
from machine import (
    add_directory_options,
    facts_lines,
    measured_in,
    reset_peak_rss,
    status_bytes,
)

LIGHTNING, OURS = "Lightning's", "stillframe"
WAYS = (LIGHTNING, OURS)
WARM, COLD = "file in memory", "file on the disk"
WIDTH = 1024  # of each layer
MAKE = "make"  # in place of a way: the training that makes the checkpoint
QUICK_NBYTES = 60_000_000  # bytes of the state with --quick
LIMIT_S = 600  # the longest that one process may take


# ---- in the measured process -----------------------------------------------------------------


def run(way: str, path: Path, nbytes: int) -> dict[str, float]:
    """Run one training, which resumes from the checkpoint `path`.

    If `way` is MAKE, the training begins from scratch and saves that checkpoint at its end.

    Returns:
        "at": the end of the first step (time.monotonic()). "peak_nbytes": the peak of
        resident memory when training began, less the resident memory with the model alone.
    """
    import lightning as L
    import torch
    from stillframe.lightning import AsyncCheckpointIO

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            layers = max(1, nbytes // (3 * 4 * WIDTH * WIDTH))
            self.layers = torch.nn.ModuleList(
                torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)
            )

        def training_step(self, batch: Any, index: int) -> Any:
            return torch.stack([layer.weight[0].sum() for layer in self.layers]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

        def on_train_start(self) -> None:
            result["peak_nbytes"] = float(status_bytes("VmHWM") - bytes_of_model)

        def on_train_batch_end(self, *_: Any) -> None:
            result.setdefault("at", time.monotonic())  # at the end of the first step only

    result: dict[str, float] = {}  # filled by the hooks of `Module`
    warnings.simplefilter("ignore")  # about few workers, few batches and no validation
    trainer = L.Trainer(
        max_steps=2 if way == MAKE else 3,  # one more than the checkpoint has
        plugins=None if way == LIGHTNING else [AsyncCheckpointIO()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    module = Module()
    bytes_of_model = status_bytes("VmRSS")  # and of everything that is imported
    reset_peak_rss()
    data = torch.utils.data.DataLoader(torch.zeros(8, 1))  # type: ignore[arg-type]
    trainer.fit(module, data, ckpt_path=None if way == MAKE else str(path))
    if way == MAKE:
        trainer.save_checkpoint(path)
    return result


# ---- in the parent -----------------------------------------------------------------------------


def _run_in_new_process(way: str, path: Path, nbytes: int) -> dict[str, float]:
    """Call `run` in a new process.

    Returns:
        "seconds" from the start of the process to the end of its first step, and the
        "peak_nbytes" of `run`.
    """
    start = time.monotonic()
    child = subprocess.run(
        [sys.executable, __file__, "--run", way, str(path), str(nbytes)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if child.returncode != 0:
        raise BenchError(f"a training failed: {child.stderr.strip()[-500:]}")
    result: dict[str, float] = json.loads(child.stdout.splitlines()[-1])  # of `run`
    first_step_end = result["at"]
    return {"seconds": first_step_end - start, "peak_nbytes": result["peak_nbytes"]}


def measure(directory: Path, nbytes: int, rounds: int) -> dict[str, Any]:
    """Return the statistics of the figures of `_run_in_new_process`, by situation and way."""
    path = directory / "restart.ckpt"
    _run_in_new_process(MAKE, path, nbytes)
    runs: dict[str, dict[str, list[dict[str, float]]]] = {
        situation: {way: [] for way in WAYS} for situation in (WARM, COLD)
    }
    for number in range(rounds):
        ways = WAYS if number % 2 == 0 else WAYS[::-1]
        for situation, runs_by_way in runs.items():
            for way in ways:
                if situation == COLD:
                    raw.forget(path)
                else:
                    path.read_bytes()  # brings the file into the page cache
                runs_by_way[way].append(_run_in_new_process(way, path, nbytes))
    document: dict[str, dict[str, Any]] = {WARM: {}, COLD: {}}
    for situation, runs_by_way in runs.items():
        for way, figures in runs_by_way.items():
            document[situation][way] = {
                name: Series.of([each[name] for each in figures]).to_json()
                for name in ("seconds", "peak_nbytes")
            }
    size = path.stat().st_size
    path.unlink()
    return {"nbytes": size, "restarts": document}


def show(found: dict[str, Any], rounds: int) -> None:
    """Print a table on stdout."""
    rows: list[list[str] | None] = []
    for situation, ways in found["restarts"].items():
        rows.append([situation, "", ""])
        for way, figures in ways.items():
            seconds, peak = figures["seconds"], figures["peak_nbytes"]["median"]
            times = format_times([seconds["median"], seconds["min"], seconds["max"]])
            rows.append([f"  {way}", times, f"{peak / found['nbytes']:.3f}"])
    title = f"Process start to first step, {format_size(found['nbytes'])}, {rounds} rounds"
    print_table(title, ["", "median (min..max)", "peak over the model / file"], rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=parse_size, default=1_070_000_000, help="bytes of the state")
    parser.add_argument("--quick", action="store_true", help="60 MB, one round")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    add_directory_options(parser)
    args = parser.parse_args(argv)
    if args.run:
        print(json.dumps(run(args.run[0], Path(args.run[1]), int(args.run[2]))))
        return 0
    nbytes, rounds = (QUICK_NBYTES, 1) if args.quick else (args.size, args.rounds)
    with measured_in(args, memory=0, disk=2 * nbytes) as (directory, facts):
        found = measure(directory, nbytes, rounds)
    print("\n".join(facts_lines(facts)))
    show(found, rounds)
    if args.json:
        write_json(args.json, {"facts": facts, "rounds": rounds, **found})
    return 0


if __name__ == "__main__":
    end_with(main)
