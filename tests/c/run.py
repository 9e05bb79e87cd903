"""Runs C test programs, each in its own process, as many at a time as there are CPUs.

    python tests/c/run.py {asan,tsan,valgrind} PROGRAM...
    python tests/c/run.py daily N PROGRAM...    # prints N of them, others every day

The exit status of a program is 0 if it passed and 77 if it was skipped; otherwise it failed. This
script needs only the standard library, because it runs before anything is installed.
"""

import datetime
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TIMEOUT_S = {"asan": 300, "tsan": 300, "valgrind": 600}
SKIPPED = 77
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}


def wrapper(tool: str) -> list[str]:
    """The command that a tool puts before a program."""
    if tool == "valgrind":
        if shutil.which("valgrind") is None:
            sys.exit("make valgrind needs valgrind, which is not installed")
        options = ["--quiet", "--error-exitcode=99", "--leak-check=full", "--fair-sched=yes"]
        options.append(f"--suppressions={Path(__file__).with_name('valgrind.supp')}")
        return ["valgrind", *options]
    if tool == "tsan" and shutil.which("setarch") is not None:
        # Its shadow memory overlaps a highly randomised address space (gcc before 14).
        return ["setarch", "-R"]
    return []


def run(tool: str, program: Path) -> tuple[str, str]:
    """Run one program and print its report; return "passed", "failed" or "skipped", and the report.

    The report of a program that passed leaves out its output.
    """
    start = time.monotonic()
    process = subprocess.Popen(
        [*wrapper(tool), str(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**OPTIONS, **os.environ},
        start_new_session=True,  # so that its children can be killed with it
    )
    late = b""
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S[tool])
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        late = b"\ntimed out"
    status = process.returncode
    output += late
    outcome = {0: "passed", SKIPPED: "skipped"}.get(status, "failed")
    lines = output.decode(errors="replace").rstrip().splitlines()
    if outcome == "passed":  # print what the program skipped, with the reason
        lines = [line for line in lines if line.endswith(": skipped")]
    else:
        lines.append(f"[exit status {status}]")
    first = f"  {outcome:8}{program.name:24}{time.monotonic() - start:6.1f} s"
    report = "\n".join([first, *lines])
    print(report, flush=True)  # in one call, because other programs run at the same time
    return outcome, report


def daily(number: int, programs: list[str], day: str = "") -> list[str]:
    """Return the programs of a day; each program has a turn within some days."""
    chosen = random.Random(day or datetime.date.today().isoformat())
    return sorted(chosen.sample(sorted(programs), min(number, len(programs))))


def main(tool: str, programs: list[str]) -> int:
    if tool == "daily":
        print(*daily(int(programs[0]), programs[1:]))
        return 0
    print(f"C tests ({tool})", flush=True)
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    try:
        results = list(pool.map(lambda program: run(tool, Path(program)), programs))
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C waits for running programs and starts no other
    outcomes = [outcome for outcome, _ in results]
    passed, failed, skipped = map(outcomes.count, ("passed", "failed", "skipped"))
    for outcome, report in results:  # again, because a log may keep only its end
        if outcome == "failed":
            print(report, flush=True)
    print(f"{tool}: {passed} passed, {failed} failed, {skipped} skipped", flush=True)
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
