"""The CPUs of our threads if an OpenMP runtime has bound the main thread to one core."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from fix_processes import run_python
from stillframe._base.cpus import OpenMPRuntime, cpus_before_binding
from stillframe._shell.info import _ranges

BOTH, ONE, OTHER = {0, 1}, {0}, {1}
CORES = OpenMPRuntime([ONE, OTHER], 2)


@pytest.mark.parametrize(
    ("main", "first", "runtimes", "granted", "expected"),
    [
        (ONE, ONE, [], BOTH, None),  # no runtime binds: taskset does, or the program itself
        (ONE, ONE, [OpenMPRuntime([], 1)], BOTH, None),
        (ONE, ONE, [CORES], BOTH, BOTH),
        (ONE, ONE, [CORES], {0, 1, 2}, BOTH),  # taskset left two of three CPUs
        (ONE, ONE, [OpenMPRuntime([ONE], 1)], BOTH, None),  # taskset left one CPU
        (ONE, ONE, [OpenMPRuntime([ONE], 2)], BOTH, BOTH),  # the list names one of two CPUs
        (
            ONE,
            ONE,
            [OpenMPRuntime([ONE, OTHER], 3)],
            {0, 1, 2, 3},
            BOTH,
        ),  # the third CPU is unknown
        # it is unknown which two CPUs
        (ONE, ONE, [OpenMPRuntime([ONE, OTHER, {2}], 2)], {0, 1, 2, 3}, None),
        # the second runtime was loaded when the thread was bound already
        (ONE, ONE, [OpenMPRuntime([ONE], 1), CORES], BOTH, BOTH),
        (OTHER, ONE, [CORES], BOTH, None),  # the program has moved the thread since
        (BOTH, ONE, [CORES], BOTH, None),
        (ONE, BOTH, [CORES], BOTH, BOTH),  # bound at its first parallel region
        (ONE, {0, 2}, [CORES], {0, 1, 2}, {0, 2}),
    ],
)
def test_cpu_mask_from_before_openmp_bound_the_thread_is_found(
    main, first, runtimes, granted, expected
):
    assert cpus_before_binding(main, first, runtimes, lambda: granted) == expected


def test_cpu_numbers_are_shown_as_ranges():
    assert _ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


PROGRAM = """
import glob, json, os, sys, threading, torch
CHOSEN = json.loads(sys.argv[1])
import stillframe
if CHOSEN:
    os.sched_setaffinity(0, CHOSEN)

def core_masks():
    found = {}
    for task in glob.glob("/proc/self/task/*"):
        name = open(f"{task}/comm").read().strip()
        if name.startswith("sfr-"):
            found[name] = sorted(os.sched_getaffinity(int(os.path.basename(task))))
    return found

def python_masks():
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("sf-")]
    return {thread.name: sorted(os.sched_getaffinity(thread.native_id)) for thread in ours}

def save():
    durable = threading.Event()
    stillframe.async_save(
        {"w": torch.ones(100_000)}, "a.pt", on_durable=lambda path, report: durable.set()
    )
    return durable

save().wait()
save().wait()  # the thread that started the one for callbacks has come back from that
main = sorted(os.sched_getaffinity(0))
print(json.dumps({"core": core_masks(), "python": python_masks(), "main": main}))
"""
ALL = sorted(os.sched_getaffinity(0))
several = pytest.mark.skipif(len(ALL) < 2, reason="needs two CPUs")
gomp = pytest.mark.skipif(
    not any("libgomp" in line for line in Path("/proc/self/maps").read_text().splitlines()),
    reason="this torch has another OpenMP runtime",
)


def run(
    cwd: Path, chosen: list[int], variables: dict[str, str], cpus: list[int]
) -> dict[str, set[tuple[int, ...]]]:
    """Return the CPU masks of our threads, in the core and in Python, and of the main thread."""
    done = run_python(
        "-c",
        PROGRAM,
        json.dumps(chosen),
        cwd=cwd,
        # OpenMP binds as many threads as it likes.
        env={**{k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}, **variables},
        preexec_fn=lambda: os.sched_setaffinity(0, cpus),
    )
    assert done.returncode == 0, done.stderr
    masks = json.loads(done.stdout)
    core, python = ({tuple(mask) for mask in masks[kind].values()} for kind in ("core", "python"))
    assert "sf-callbacks" in masks["python"] and python == core
    return {"ours": core, "main": {tuple(masks["main"])}}


@several
@gomp
@pytest.mark.parametrize(
    "variables",
    [{"OMP_PROC_BIND": "true"}, {"OMP_PLACES": "cores"}, {"GOMP_CPU_AFFINITY": str(ALL[0])}],
    ids=str,
)
def test_threads_run_on_all_cpus_of_a_process_that_openmp_has_bound(tmp_path, variables):
    found = run(tmp_path, [], variables, ALL)
    assert found["main"] == {(ALL[0],)}
    assert found["ours"] == {tuple(ALL)}


@several
@gomp
def test_threads_stay_within_taskset(tmp_path):
    found = run(tmp_path, [], {"OMP_PROC_BIND": "true"}, ALL[1:2])
    assert found["ours"] == found["main"] == {(ALL[1],)}


@several
@gomp
def test_threads_follow_a_mask_that_the_program_sets(tmp_path):
    found = run(tmp_path, ALL[1:2], {"OMP_PROC_BIND": "true"}, ALL)
    assert found["ours"] == found["main"] == {(ALL[1],)}


@several
def test_threads_inherit_the_mask_if_openmp_does_not_bind(tmp_path):
    found = run(tmp_path, ALL[:1], {}, ALL)
    assert found["ours"] == found["main"] == {(ALL[0],)}
