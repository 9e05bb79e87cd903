"""Saves in children of multiprocessing, which run no exit handlers: each save ends or is
reported."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import stillframe
from fix_processes import run_python

# The tensors are small and the syncs slow: without a wait each child would end long before its
# saves. Each kind of child does the same three things.
WORK = """
import multiprocessing, os, sys, threading, time
import torch
import stillframe
import stillframe._save.exit as at_exit
from stillframe.testing import fault, slow

at_exit._QUIET_S = 60
blocks = []  # they last as long as the process

def enter(block):
    block.__enter__()
    blocks.append(block)

def save(name):
    enter(slow("fdatasync", 0.3))
    stillframe.async_save({"w": torch.full((100_000,), 3.0)}, f"{name}.pt")

def fail(name):
    enter(fault("rename"))
    blocks.append(stillframe.async_save({"w": torch.ones(10)}, f"{name}.pt"))

def remove(name):
    open(f"{name}.old", "w").close()
    save(name)
    stillframe.remove(f"{name}.old")

TASKS = save, fail, remove

def processes(context, **options):
    for task in TASKS:
        child = context.Process(target=task, args=(task.__name__,), **options)
        child.start()
        child.join()
        assert child.exitcode == 0, child.exitcode

def fork():
    processes(multiprocessing.get_context("fork"))

def forkserver():
    processes(multiprocessing.get_context("forkserver"))

def spawn():
    processes(multiprocessing.get_context("spawn"))

def daemonic():
    processes(multiprocessing.get_context("fork"), daemon=True)

def forked_again():
    context = multiprocessing.get_context("fork")
    for task in TASKS:
        child = context.Process(target=fork_and, args=(task,))
        child.start()
        child.join()

def fork_and(task):
    pid = os.fork()
    if pid == 0:
        task(task.__name__)
    else:
        os.waitpid(pid, 0)

def torch_spawn():
    for task in TASKS:
        torch.multiprocessing.start_processes(
            in_torch, args=(task.__name__,), nprocs=1, start_method="fork"
        )

def in_torch(rank, name):
    globals()[name](name)

def pool():
    for task in TASKS:
        with multiprocessing.get_context("fork").Pool(1) as workers:
            workers.apply(task, (task.__name__,))
            workers.close()
            workers.join()

def executor():
    from concurrent.futures import ProcessPoolExecutor
    context = multiprocessing.get_context("fork")
    for task in TASKS:
        with ProcessPoolExecutor(1, mp_context=context) as workers:
            workers.submit(task, task.__name__).result()

class Items(torch.utils.data.Dataset):
    def __init__(self, task):
        self.task = task
    def __len__(self):
        return 1
    def __getitem__(self, index):
        self.task(self.task.__name__)
        return index

def loader():
    for task in TASKS:
        for _ in torch.utils.data.DataLoader(Items(task), num_workers=1):
            pass
"""
MAIN = """
if __name__ == "__main__":
    globals()[sys.argv[1]]()
"""
KINDS = (
    "fork",
    "forkserver",
    "spawn",
    "daemonic",
    "forked_again",
    "torch_spawn",
    "pool",
    "executor",
    "loader",
)


def run(code: str, cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    script = cwd / "program.py"
    script.write_text(code)
    return run_python(script, *args, cwd=cwd)


def saved(path: Path) -> bool:
    return bool((stillframe.load(path)["w"] == 3.0).all())


@pytest.mark.parametrize("kind", KINDS)
def test_child_saves_are_durable_and_failures_are_printed(tmp_path, kind):
    done = run(WORK + MAIN, tmp_path, kind)
    assert done.returncode == 0, done.stderr
    assert saved(tmp_path / "save.pt")
    assert not (tmp_path / "fail.pt").exists()
    assert done.stderr.count("stillframe: a save failed") == 1 and "fail.pt" in done.stderr
    assert saved(tmp_path / "remove.pt")
    assert not (tmp_path / "remove.old").exists()


CALLBACK = """
def report_durable(queue):
    enter(slow("fdatasync", 0.3))
    stillframe.async_save(
        {"w": torch.ones(10)}, "a.pt", on_durable=lambda path, report: queue.put(path)
    )

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=report_durable, args=(queue,))
    child.start()
    print(queue.get(timeout=60))
    child.join()
"""


def test_callback_of_a_childs_last_save_reaches_a_queue(tmp_path):
    done = run(WORK + CALLBACK, tmp_path)
    assert (done.returncode, done.stdout) == (0, "a.pt\n"), done.stderr


THREADS = """
def work():
    def later():
        from stillframe._save import completion
        while not completion.thread.is_exiting:  # the child's work has returned
            time.sleep(0.01)
        save("late")
        enter(fault("rename"))
        stillframe.remove("old")
        blocks.append(stillframe.async_save({"w": torch.ones(10)}, "failing.pt"))
    threading.Thread(target=later).start()
    save("first")

if __name__ == "__main__":
    open("old", "w").close()
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


def test_thread_that_outlives_a_childs_work_saves_durably(tmp_path):
    """Python joins such threads after all finalizers, so their saves end in the call."""
    done = run(WORK + THREADS, tmp_path)
    assert done.returncode == 0, done.stderr
    assert saved(tmp_path / "first.pt") and saved(tmp_path / "late.pt")
    assert not (tmp_path / "old").exists()
    assert done.stderr.count("failing.pt") == 1, done.stderr


LATE_IMPORT = """
import multiprocessing

def work():
    import torch, stillframe
    from stillframe.testing import slow
    slow("fdatasync", 0.3).__enter__()
    stillframe.async_save({"w": torch.full((10,), 3.0)}, "a.pt")

if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
"""


def test_child_that_imports_the_package_itself_finishes_its_saves(tmp_path):
    done = run(LATE_IMPORT, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert saved(tmp_path / "a.pt")


RAISING = """
def work():
    def broken():
        raise RuntimeError("a broken step")
    at_exit.settle_ended_saves = broken
    enter(fault("rename"))
    blocks.append(stillframe.async_save({"w": torch.ones(10)}, "a.pt"))
    raise ValueError("the work's own error")

if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


def test_error_in_a_step_of_the_drain_does_not_skip_the_others(tmp_path):
    done = run(WORK + RAISING, tmp_path)
    assert done.returncode == 1
    assert "a broken step" in done.stderr and "the work's own error" in done.stderr
    assert done.stderr.count("stillframe: a save failed") == 1


def test_main_process_waits_and_prints_once(tmp_path):
    main = '\nif __name__ == "__main__":\n    fail("fail")\n    save("save")\n'
    done = run(WORK + main, tmp_path)
    assert done.returncode == 0, done.stderr
    assert saved(tmp_path / "save.pt")
    assert done.stderr.count("a save failed") == 1
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".stillframe-")]
