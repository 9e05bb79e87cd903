"""The first half hour on a GPU: everything that needs one, in parts that fail separately.

    python benchmarks/gpu_first.py --out DIR [--parts facts tests ...] [--dir DIR] [--rehearse]

Each part is a command of its own that may take ten minutes. Its output goes to DIR/NAME.log, its
figures to DIR/NAME.json. A part that fails or takes longer does not affect the others, and the
table at the end says how each part ended. All files together stay below 16 MiB: long logs are cut
in the middle, and the largest files are removed. `make gpu` runs this script, which installs and
downloads nothing.

    facts       driver, topology, memlock, ZONE_MOVABLE, huge pages, disk
    tests       tests/gpu
    segments    tests/gpu with expandable_segments:True
    one-queue   tests/gpu with CUDA_DEVICE_MAX_CONNECTIONS=1
    driver      the driver alone: batches, rows, queue depth, registrations during launches
    pinning     warm_up and a cold first save
    small       saves of a small state, every way
    large       saves of a large one
    busy        the large one with a busy process on every core
    sweep       copies of several sizes and numbers in flight
    profile     whether copies overlap kernels, and whether a call synchronises
    ahead       a training whose host runs ahead of the device
    offload     weights that come layer by layer and leave again, six ways
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PART_S = 590  # the longest that a part may take, in seconds: a little less than ten minutes
LOG_BYTES = 512 << 10  # the most bytes of one log
OUT_BYTES = 15 << 20  # the most bytes of all files together
GRACE_S = 5  # seconds of PART_S that are left for ending a part's processes

# A shell script that prints the facts of the machine.
FACTS = """
nvidia-smi; nvidia-smi topo -m; nvidia-smi -q | head -150
uname -a; nproc; free -g; lscpu | head -30; ulimit -a
grep -iE 'huge|mlocked|unevict' /proc/meminfo; cat /sys/kernel/mm/transparent_hugepage/enabled
grep -E 'Node|present|managed' /proc/zoneinfo | grep -A2 -i movable
cat /proc/driver/nvidia/version /proc/driver/nvidia/params 2>/dev/null | head -40
df -h "$1" /tmp /dev/shm; findmnt -T "$1"; lsblk -o NAME,MODEL,SIZE,ROTA 2>/dev/null  # $1: --dir
"$2" -c 'import torch; print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name())'
"$2" -c 'import stillframe; print(stillframe.default_engine().stats())'  # $2: Python
true  # a missing tool must not fail the part
"""


@dataclass(frozen=True)
class Part:
    """A command, its environment variables, and the number of busy processes meanwhile."""

    name: str
    command: list[str]
    env: dict[str, str]
    busy: int = 0


def parts(options: argparse.Namespace) -> list[Part]:
    """Return all parts, in the order in which they run."""
    python, out = sys.executable, options.out
    rehearse = ["--rehearse"] if options.rehearse else []
    # Without pyproject.toml: its settings need plugins that this Python may not have.
    pytest = [python, "-m", "pytest", "-c", os.devnull, f"--rootdir={ROOT}", "-ra"]
    pytest += ["-p", "no:cacheprovider", str(ROOT / "tests" / "gpu")]
    config = "expandable_segments:True"

    def gpu_part(name: str, part: str, *more: str, busy: int = 0) -> Part:
        """Return a part that runs gpu.py for one of its own parts, with `more` options."""
        script = [python, str(ROOT / "benchmarks" / "gpu.py"), "--dir", str(options.dir)]
        script += ["--json", str(out / f"{name}.json"), "--parts", part, "--until-s", "560"]
        return Part(name, [*script, *more, *rehearse], env={}, busy=busy)

    driver = [python, str(ROOT / "benchmarks" / "gpu_driver.py")]
    offload = [python, str(ROOT / "benchmarks" / "offload.py")]
    ours = ["--ways", "stillframe"]
    cores = 1 if options.rehearse else os.cpu_count() or 1
    return [
        Part("facts", ["sh", "-c", FACTS, "facts", str(options.dir), python], env={}),
        Part("tests", pytest, env={}),
        Part(
            "segments",
            pytest,
            {"PYTORCH_CUDA_ALLOC_CONF": config, "PYTORCH_ALLOC_CONF": config},
        ),
        Part("one-queue", pytest, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        Part("driver", [*driver, "--json", str(out / "driver.json"), *rehearse], env={}),
        gpu_part("pinning", "pinning", "--states", "small"),
        gpu_part("small", "saves", "--states", "small"),
        gpu_part("large", "saves", "--states", "large"),
        gpu_part("busy", "saves", "--states", "large", *ours, busy=cores),
        gpu_part("sweep", "sweep", "--states", "small"),
        gpu_part("profile", "profile", "--states", "small"),
        gpu_part("ahead", "ahead", "--states", "small"),
        Part("offload", [*offload, "--out", str(out / "offload.json"), *rehearse], env={}),
    ]


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run `count` processes that only take processor time, until the block ends."""
    spin = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(spin) for _ in range(count)]
    try:
        yield
    finally:
        for each in processes:
            each.kill()
            each.wait()


def run(part: Part, out: Path) -> str:
    """Run a part; return a sentence that says how it ended and how long it took."""
    log = out / f"{part.name}.log"
    paths = [str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, **part.env, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    start = time.monotonic()
    with log.open("wb") as output, busy_processes(part.busy):
        process = subprocess.Popen(
            part.command, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        try:
            status = process.wait(PART_S - GRACE_S)
            ended = "ok" if status == 0 else f"ended with status {status}"
        except subprocess.TimeoutExpired:
            ended = f"took more than {PART_S - GRACE_S} s and was ended"
        finally:
            # The whole group, with the processes that the part started itself.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    shorten(log)
    return f"{ended}, {time.monotonic() - start:.0f} s"


def shorten(log: Path) -> None:
    """Cut the middle out of a log that is longer than LOG_BYTES."""
    text = log.read_bytes()
    if len(text) > LOG_BYTES:
        half = LOG_BYTES // 2
        log.write_bytes(text[:half] + b"\n... cut ...\n" + text[-half:])


def remove_largest_files(out: Path) -> list[str]:
    """Remove the largest files until the rest take at most OUT_BYTES; return what was removed."""
    removed = []
    files = [path for path in out.rglob("*") if path.is_file()]
    files.sort(key=size_of)
    while files and sum(map(size_of, files)) > OUT_BYTES:
        largest = files.pop()
        removed.append(f"{largest.name} ({size_of(largest) >> 20} MiB)")
        largest.unlink()
    return removed


def size_of(path: Path) -> int:
    return path.stat().st_size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--dir", type=Path, default=Path("."), help="on the disk to write to")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="run only these parts")
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny, without a GPU: do the parts work?"
    )
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    options.dir = options.dir.resolve()
    known = parts(options)
    chosen = options.parts or [part.name for part in known]
    unknown = set(chosen) - {part.name for part in known}
    if unknown:
        parser.error(f"no such parts: {', '.join(sorted(unknown))}")
    endings = []
    for part in known:
        if part.name not in chosen:
            continue
        print(f"---- {part.name}", flush=True)
        ended = run(part, options.out)
        print(f"     {ended}", flush=True)
        endings.append((part.name, ended))
    left_out = remove_largest_files(options.out)
    lines = [f"{name:10} {ended}" for name, ended in endings]
    lines += [f"left out: {name}" for name in left_out]
    (options.out / "summary.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(["", *lines]))
    all_succeeded = all(ended.startswith("ok") for _, ended in endings)
    return 0 if all_succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
