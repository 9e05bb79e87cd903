"""Saves when the process exits, forks, is interrupted, or ends with an exception."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import stillframe
import torch
from fix_processes import run_python
from stillframe.testing import held, slow

PRELUDE = """
import os, signal, sys, threading, time, torch, stillframe
import stillframe._save.exit as at_exit
from stillframe.testing import fault, held, slow
at_exit._QUIET_S = 60  # a slow machine says nothing of a wait that a test does not mean
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
STATE = {"w": torch.full((100_000,), 3.0)}
blocks = []
def hold(block):  # a block that lasts as long as the process
    block.__enter__()
    blocks.append(block)
def hold_until_printed(words, block):  # a block that is left when the exit prints these words
    def print_and_go(sentence, print_line=at_exit._print_line):
        print_line(sentence)
        if words in sentence:
            block.__exit__(None, None, None)
    at_exit._print_line, at_exit._QUIET_S = print_and_go, 0.1
    block.__enter__()
"""


def run(code: str, cwd: Path, **options: object) -> subprocess.CompletedProcess[str]:
    return run_python("-c", PRELUDE + textwrap.dedent(code), cwd=cwd, **options)


def whole(path: Path, value: float = 3.0) -> bool:
    return bool((stillframe.load(path, verify=True)["w"] == value).all())


def temporaries(path: Path) -> list[str]:
    return [name for name in os.listdir(path) if name.startswith(".stillframe-")]


def test_saves_in_flight_finish_at_exit_with_a_line(tmp_path):
    done = run(
        """
        hold_until_printed("waiting for a.pt", held("fdatasync"))
        stillframe.async_save(STATE, "a.pt", on_durable=lambda path, report: print("durable", path))
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "waiting for a.pt" in done.stderr and "durable a.pt" in done.stdout
    assert whole(tmp_path / "a.pt") and not temporaries(tmp_path)


def test_short_wait_at_exit_prints_nothing(tmp_path):
    done = run('hold(slow("fdatasync", 0.1)); stillframe.async_save(STATE, "a.pt")', tmp_path)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
    assert whole(tmp_path / "a.pt")


def test_exit_without_saves_in_flight_prints_nothing(tmp_path):
    done = run('stillframe.save(STATE, "a.pt")', tmp_path)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


def test_removes_in_flight_run_at_exit(tmp_path):
    done = run(
        """
        stillframe.save(STATE, "old.pt")
        hold(slow("fdatasync", 0.2))
        stillframe.async_save(STATE, "new.pt")
        stillframe.remove("old.pt")
        """,
        tmp_path,
    )
    assert done.returncode == 0
    assert sorted(os.listdir(tmp_path)) == ["new.pt"]


def test_failed_remove_without_any_save_is_printed(tmp_path):
    done = run(
        """
        open("old.pt", "w").close()
        hold(fault("unlink", sticky=True))
        stillframe.remove("old.pt")
        """,
        tmp_path,
    )
    assert done.returncode == 0
    assert "old.pt" in done.stderr and "Input/output error" in done.stderr
    assert (tmp_path / "old.pt").exists()


def test_uncollected_error_is_printed_at_exit(tmp_path):
    done = run(
        """
        hold(fault("rename"))
        handle = stillframe.async_save(STATE, "a.pt")
        """,
        tmp_path,
    )
    assert done.returncode == 0
    assert "a save failed" in done.stderr and "a.pt" in done.stderr and "rename" in done.stderr
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("kept", ["", "handle = "])
@pytest.mark.parametrize("ended", [False, True])
def test_failure_is_printed_once_and_the_exit_status_is_the_programs(tmp_path, kept, ended):
    """This holds whether the handle is kept or freed, and whether the save fails before the exit or
    during it."""
    done = run(
        f"""
        hold(fault("rename")); hold(slow("fdatasync", 0.2))
        {kept}stillframe.async_save(STATE, "a.pt")
        time.sleep({1.0 if ended else 0})
        sys.exit(3)
        """,
        tmp_path,
    )
    assert done.returncode == 3
    assert done.stderr.count("a save failed") == 1 and done.stderr.count("a.pt") == 1


def test_forked_child_prints_no_failure_of_its_parent(tmp_path):
    done = run(
        """
        hold(fault("rename"))
        handle = stillframe.async_save(STATE, "a.pt")
        while not handle.done():
            time.sleep(0.001)
        pid = os.fork()
        if pid == 0:
            sys.exit(0)  # runs the exit handlers
        os.waitpid(pid, 0)
        print("child ended", file=sys.stderr, flush=True)
        """,
        tmp_path,
    )
    before, _, after = done.stderr.partition("child ended")
    assert not before and after.count("a save failed") == 1


@pytest.mark.parametrize(("disk_s", "callback_s"), [(0.4, 0), (0.05, 0.8)])
def test_callbacks_at_exit_finish_and_their_saves_are_made(tmp_path, disk_s, callback_s):
    done = run(
        f"""
        at_exit._QUIET_S = 0.01
        engine = stillframe.Engine(pool_bytes=32 << 20)
        hold(slow("fdatasync", {disk_s}))
        def durable(path, report):
            if path == "a.pt":
                stillframe.async_save(STATE, "b.pt", on_durable=durable, engine=engine)
                time.sleep({callback_s})
            sys.stdout.write(path + "\\n")
            sys.stdout.flush()
        stillframe.async_save(STATE, "a.pt", on_durable=durable)
        """,
        tmp_path,
    )
    assert sorted(done.stdout.split()) == ["a.pt", "b.pt"], done.stderr
    assert whole(tmp_path / "a.pt") and whole(tmp_path / "b.pt")


def test_wait_all_makes_the_exit_status_show_a_failed_save(tmp_path):
    done = run(
        """
        from stillframe.testing import fault
        hold(fault("rename"))
        handle = stillframe.async_save(STATE, "a.pt")
        stillframe.wait_all()
        """,
        tmp_path,
    )
    assert done.returncode == 1
    assert done.stderr.count("stillframe.errors.SaveError: ") == 1
    assert "a save failed" not in done.stderr


def test_a_training_that_dies_of_an_exception_still_finishes_its_saves(tmp_path):
    done = run(
        """
        hold(slow("fdatasync", 0.3))
        stillframe.async_save(STATE, "a.pt")
        raise RuntimeError("out of luck")
        """,
        tmp_path,
    )
    assert done.returncode == 1 and "out of luck" in done.stderr
    assert whole(tmp_path / "a.pt")


def start(code: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_ctrl_c_ends_a_wait_at_once_and_the_save_finishes(tmp_path):
    process = start(
        """
        with held("fdatasync"):
            handle = stillframe.async_save(STATE, "a.pt")
            try:
                print("waiting", flush=True)
                handle.result()
            except KeyboardInterrupt:
                print("interrupted", handle.done(), flush=True)
        """,
        tmp_path,
    )
    assert process.stdout is not None and process.stdout.readline() == "waiting\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=240)
    assert out == "interrupted False\n" and process.returncode == 0
    assert whole(tmp_path / "a.pt")


def test_a_second_ctrl_c_at_exit_gives_up_and_leaves_the_old_file(tmp_path):
    process = start(
        """
        stillframe.save({"w": torch.full((10,), 1.0)}, "a.pt")
        hold_until_printed("given up", held("pwrite"))
        stillframe.async_save(STATE, "a.pt")
        print("leaving", flush=True)
        """,
        tmp_path,
    )
    assert process.stdout is not None and process.stdout.readline() == "leaving\n"
    assert process.stderr is not None and "waiting for a.pt" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert "again gives up" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert "given up" in err
    assert whole(tmp_path / "a.pt", 1.0) and not temporaries(tmp_path)


def test_unresponsive_file_system_is_named_at_exit_and_can_be_left(tmp_path):
    process = start(
        """
        stillframe.save({"w": torch.full((10,), 1.0)}, "a.pt")
        at_exit._QUIET_S = at_exit._CANCEL_S = 0.3
        stillframe._core.log_tune(10**8)
        hold(slow("rename", 600))
        stillframe.async_save({"w": torch.full((10,), 3.0)}, "a.pt")
        try:
            stillframe.wait_all(0.5)
        except TimeoutError as error:
            print(error, flush=True)
        """,
        tmp_path,
    )
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    assert re.search(r"a.pt: writing\); the file system of \S+/a.pt has not answered for", line)
    assert "waiting for a.pt" in process.stderr.readline()
    line = process.stderr.readline()
    assert re.search(r"a.pt has not answered for \d+ s; Ctrl-C twice leaves it", line)
    process.send_signal(signal.SIGINT)
    assert "again gives up" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert "given up" in err and "left as it is: the file system of" in err
    assert whole(tmp_path / "a.pt", 1.0)
    for name in temporaries(tmp_path):
        (tmp_path / name).unlink()


def test_saves_of_callbacks_at_exit_are_waited_for_with_their_file_system(tmp_path):
    """The file system does not answer. No other wait at exit prints anything."""
    done = run(
        """
        stillframe._core.log_tune(10**8)
        hold(slow("open", 0))  # the table of calls is exchanged while no save is in flight
        renames, leaving = held("rename"), threading.Event()
        finish, close = at_exit.completion.callbacks.finish, at_exit.close_default_engine
        def durable(path, report):
            leaving.wait()
            hold_until_printed("has not answered", renames)
            stillframe.async_save(STATE, "b.pt")
        def finishing():
            leaving.set()
            finish()
        def closing():
            renames.__exit__(None, None, None)
            close()
        at_exit.completion.callbacks.finish = finishing
        at_exit.close_default_engine = closing
        stillframe.async_save(STATE, "a.pt", on_durable=durable)
        """,
        tmp_path,
    )
    assert re.search(r"b.pt has not answered for \d+ s; Ctrl-C twice leaves it", done.stderr)
    assert whole(tmp_path / "a.pt") and whole(tmp_path / "b.pt")


def test_killed_save_leaves_a_temporary_that_the_next_save_removes(tmp_path):
    process = start(
        """
        hold(held("pwrite"))
        stillframe.async_save(STATE, "a.pt")
        print("saving", flush=True)
        time.sleep(300)
        """,
        tmp_path,
    )
    assert process.stdout is not None and process.stdout.readline() == "saving\n"
    while not temporaries(tmp_path):
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert len(temporaries(tmp_path)) == 1 and not (tmp_path / "a.pt").exists()
    stillframe.save({"w": torch.full((4,), 3.0)}, tmp_path / "a.pt")
    assert not temporaries(tmp_path) and whole(tmp_path / "a.pt")


FORK_CHILD = """
    import traceback
    from stillframe import ForkError
    engine = stillframe.Engine(pool_bytes=64 << 20)
    called = threading.Event()
    stillframe.async_save(STATE, "called.pt", engine=engine, on_durable=lambda *_: called.set())
    assert called.wait(60)  # from now on there is a thread for callbacks
    syncs = held("fdatasync")  # until the child has ended
    hold(syncs)
    handle = stillframe.async_save(STATE, "parent.pt", engine=engine)
    default = stillframe.async_save(STATE, "default.pt")

    def refused(call, *args, **kwargs):
        try:
            call(*args, **kwargs)
        except ForkError:
            return
        raise AssertionError(f"{call} was not refused")

    def child():
        stillframe._core.inject_clear()
        refused(handle.result); refused(handle.exception); refused(handle.wait_staged)
        refused(handle.cancel); refused(handle.progress); refused(handle.done)
        refused(lambda: handle.state)
        refused(stillframe.async_save, STATE, "no.pt", engine=engine)
        refused(engine.stats); refused(engine.close)
        refused(engine.warm_up, 1); refused(engine.trim)
        assert not os.path.exists("no.pt")
        stillframe.wait_all()  # the parent's saves are not the child's
        stillframe.save({"w": torch.full((10,), 3.0)}, "child.pt")
        with stillframe.Engine(pool_bytes=32 << 20) as own:
            called = threading.Event()  # the parent's may be locked here for good
            tree = {"w": torch.full((10,), 3.0)}
            stillframe.async_save(tree, "own.pt", engine=own, on_durable=lambda *_: called.set())
            assert len([n for n in os.listdir(".") if n.startswith(".stillframe-")]) >= 1
        assert called.wait(60)
"""


@pytest.mark.parametrize("kind", ["os.fork", "os._exit", "multiprocessing"])
def test_forked_child_cannot_use_objects_of_its_parent(tmp_path, kind):
    """The parent's saves go on; the child deletes, unlocks and joins nothing of them."""
    endings = {
        "os.fork": """
            pid = os.fork()
            if pid == 0:
                child()
                sys.exit(0)  # runs the exit handlers
            """,
        "os._exit": """
            pid = os.fork()
            if pid == 0:
                child()
                os._exit(0)
            """,
        "multiprocessing": """
            import multiprocessing, warnings
            process = multiprocessing.get_context("fork").Process(target=child)
            process.start()
            pid = None
            process.join()
            assert process.exitcode == 0, process.exitcode
            """,
    }
    done = run(
        textwrap.dedent(FORK_CHILD)
        + textwrap.dedent(endings[kind])
        + textwrap.dedent(
            """
            if pid is not None:
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            syncs.__exit__(None, None, None)
            handle.result(); default.result(); engine.close()
            """
        ),
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "ForkError" not in done.stderr
    for name in ("parent", "default", "child", "own"):
        assert whole(tmp_path / f"{name}.pt"), name
    assert not temporaries(tmp_path)


def test_fork_in_any_state_of_a_save_leaves_a_whole_file(tmp_path):
    for call in ("open", "capture_copy", "pwrite", "fdatasync", "rename", "fsync"):
        with slow(call, 0.1):
            handle = stillframe.async_save({"w": torch.full((10_000,), 3.0)}, tmp_path / "a.pt")
            for _ in range(3):
                pid = os.fork()
                if pid == 0:
                    os._exit(0)
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
                time.sleep(0.04)
            handle.result()
        assert whole(tmp_path / "a.pt") and not temporaries(tmp_path)


def test_program_started_during_a_save_inherits_no_descriptor(tmp_path):
    with held("fdatasync"):
        handle = stillframe.async_save({"w": torch.ones(4)}, tmp_path / "a.pt")
        while not temporaries(tmp_path):
            time.sleep(0.005)
        out = run_python(
            "-c",
            "import os; print([os.readlink(f'/proc/self/fd/{n}') for n in range(3, 20)"
            " if os.path.exists(f'/proc/self/fd/{n}')])",
            check=True,
            close_fds=False,
        ).stdout
        assert ".stillframe-" not in out
    handle.result()


def test_default_engine_is_configured_before_first_use_and_made_again_after_close(tmp_path):
    done = run(
        """
        def refused(kind, **options):
            try:
                stillframe.configure(**options)
            except kind:
                return
            raise AssertionError(f"{options} were not refused")
        refused(ValueError, pool_bytes=5)
        stillframe.configure(pool_bytes=32 << 20)
        if os.fork() == 0:  # with the same options; it is in use once it was handed out
            assert stillframe.default_engine().stats()["pool_bytes"] == 32 << 20
            refused(stillframe.StillframeError, pool_bytes=64 << 20)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
        stillframe.save(STATE, "a.pt")
        refused(stillframe.StillframeError, pool_bytes=64 << 20)
        stillframe.default_engine().close()
        stillframe.save(STATE, "b.pt")
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert whole(tmp_path / "a.pt") and whole(tmp_path / "b.pt")


def test_importing_the_package_starts_no_thread_and_takes_no_memory(tmp_path):
    done = run(
        """
        assert threading.active_count() == 1
        tasks = os.listdir("/proc/self/task")
        names = {open(f"/proc/self/task/{task}/comm").read().strip() for task in tasks}
        assert not any(name.startswith("sfr-") for name in names), names
        engine = stillframe.Engine()
        assert engine.stats()["committed_bytes"] == 0
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_a_thread_that_saves_when_the_interpreter_exits_does_not_hang_it(tmp_path):
    done = run(
        """
        def work():
            try:
                while True:
                    stillframe.async_save(STATE, "a.pt")
            except BaseException as error:
                # in one call: the interpreter ends this thread at any time, also while it prints
                os.write(2, repr(error).encode())
        threading.Thread(target=work, daemon=True).start()
        time.sleep(0.3)
        """,
        tmp_path,
    )
    refused = "StillframeError('the interpreter is exiting: no more saves and removes')"
    waited = "StillframeError('the engine is closed')"  # the call waited for a slot meanwhile
    assert done.returncode == 0, done.stderr
    assert done.stderr in (refused, waited, "")
    assert whole(tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt")["w"].shape == (100_000,)


def test_a_thread_that_starts_saving_while_the_exit_drains_is_refused(tmp_path):
    done = run(
        """
        errors, syncs = [], held("fdatasync")
        def work():
            while not at_exit.completion.thread.is_draining:
                time.sleep(0.001)
            try:
                stillframe.async_save(STATE, "late.pt")
            except stillframe.StillframeError as error:
                errors.append(str(error))
            syncs.__exit__(None, None, None)
        syncs.__enter__()
        stillframe.async_save(STATE, "a.pt", on_durable=lambda *_: print(errors, flush=True))
        threading.Thread(target=work, daemon=True).start()
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "no more saves and removes" in done.stdout
    assert whole(tmp_path / "a.pt")
    assert not (tmp_path / "late.pt").exists()


def test_the_first_save_of_a_process_may_be_an_exit_handlers(tmp_path):
    done = run(
        """
        import atexit
        hold(slow("fdatasync", 0.3))
        at_exit._QUIET_S = 0.1  # so that there is the line of a long wait
        def save():
            # print() writes a line's end by itself: the last save's line and "all" ran into one.
            called = lambda path, report: sys.stdout.write(f"{path}\\n")
            for name in ("a.pt", "b.pt", "old.pt"):
                stillframe.async_save(STATE, name, on_durable=called)
            stillframe.remove("old.pt")
            stillframe.snapshot(STATE, overlap=True).wait()
            stillframe.wait_all()
            print("all", flush=True)
        atexit.register(save)
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "Exception" not in done.stderr and "Error" not in done.stderr
    assert {Path(line).name for line in done.stdout.split()} == {"a.pt", "b.pt", "old.pt", "all"}
    assert whole(tmp_path / "a.pt") and whole(tmp_path / "b.pt")
    assert not (tmp_path / "old.pt").exists()


def test_later_exit_handler_saves_and_removes_at_once(tmp_path):
    done = run(
        """
        import atexit, os
        # Handlers run last first: one registered before the import would run after ours.
        atexit.unregister(stillframe._save.exit._drain)
        def last():
            handle = stillframe.async_save(
                STATE, "b.pt", on_durable=lambda *_: print("called", flush=True)
            )
            print(handle.state, handle.result().nbytes > 0, flush=True)
            stillframe.remove("a.pt")
            print(os.path.exists("a.pt"), flush=True)
        atexit.register(last)
        atexit.register(stillframe._save.exit._drain)
        stillframe.async_save(STATE, "a.pt")
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["called", "durable", "True", "False"]
    assert whole(tmp_path / "b.pt")


def test_later_exit_handler_may_save_deferrable_state(tmp_path):
    """The verdict is given, although the thread that normally gives it has ended."""
    done = run(
        """
        import atexit
        atexit.unregister(stillframe._save.exit._drain)
        model = torch.nn.Linear(600, 600)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(4):
            model(torch.randn(2, 600)).sum().backward()
            optimizer.step()
        def last():
            report = stillframe.async_save({"w": model.weight}, "b.pt").result()
            print(report.deferred_nbytes, flush=True)
        atexit.register(last)
        atexit.register(stillframe._save.exit._drain)
        stillframe.async_save(STATE, "a.pt")
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(4 * 600 * 600)]
    assert whole(tmp_path / "a.pt") and (tmp_path / "b.pt").exists()


@pytest.mark.leaves_temporaries
def test_a_crash_in_a_thread_of_ours_has_its_traceback(tmp_path):
    # The lane reads a page that was unmapped. A sample in the call may crash first, which counts
    # too.
    done = run(
        """
        import ctypes, faulthandler, mmap, struct
        from stillframe import _core
        faulthandler.enable()
        memory = mmap.mmap(-1, 64 << 20)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        libc = ctypes.CDLL(None)
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        assert libc.mprotect(address + (21 << 20), 4096, 0) == 0
        engine = _core.Engine(64 << 20, 1 << 20, 1, 1)
        rows = struct.pack("=QQII", address, 64 << 20, 1, 0)
        ticket = _core.Ticket(engine, os.fsencode(os.getcwd()), b"a.pt", b"skeleton", rows, 0)
        ticket.submit(())
        ticket.wait(_core.WAIT_ENDED)
        print("it lives")
        """,
        tmp_path,
    )
    assert done.returncode == -signal.SIGSEGV and "it lives" not in done.stdout
    assert "Fatal Python error: Segmentation fault" in done.stderr


def test_saves_work_under_an_address_space_limit(tmp_path):
    done = run(
        """
        import resource
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), resource.RLIM_INFINITY))
        stillframe.save(STATE, "a.pt")
        print(stillframe.default_engine().stats()["pool_bytes"])
        try:
            stillframe.Engine(pool_bytes=1 << 40)
        except MemoryError as error:
            print(error)
        """,
        tmp_path,
        env={k: v for k, v in os.environ.items() if k != "STILLFRAME_POOL_BYTES"},
    )
    assert done.returncode == 0, done.stderr
    cap, sentence = done.stdout.splitlines()
    assert 0 < int(cap) <= 1 << 29
    assert str(1 << 40) in sentence
    assert whole(tmp_path / "a.pt")
