"""The mirror when a process exits, forks, is killed, or shares a directory with another one."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import stillframe
import stillframe._save.exit as at_exit
import torch
from fix_mirror import Child, StubStore, entries, has_entries, state, uploaded, when_said
from fix_processes import run_python
from fix_waits import eventually
from stillframe import _core
from stillframe._preemption import in_time
from stillframe._remote import journal, mirror, sending
from stillframe._save import uploads


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return an empty directory for checkpoints, which is the current one."""
    (tmp_path / "ckpt").mkdir()
    monkeypatch.chdir(tmp_path / "ckpt")
    stillframe.default_engine().warm_up(1)
    yield tmp_path / "ckpt"


def save(store: StubStore, *names: str) -> None:
    for name in names:
        stillframe.save(state(1), name, mirror=store.url)


def go_on(store: StubStore) -> None:
    """Save once more, as the next process does, and wait for all uploads."""
    save(store, "next.pt")
    uploaded()


# ---- the exit ----


def test_exit_finishes_uploads_and_prints_nothing_about_a_short_wait(store, run):
    code = """
import sys, torch, stillframe, stillframe._save.exit
stillframe._save.exit._QUIET_S = 60  # a slow machine's wait is no long one
for n in range(3):
    stillframe.async_save({"n": n}, f"{n}.pt", mirror=sys.argv[1])
"""
    done = run_python("-c", code, f"file://{store.path}/run")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert store.names() == {"0.pt", "1.pt", "2.pt"} == set(os.listdir(run))


def test_exit_says_which_uploads_it_waits_for(store, run, tmp_path):
    def work() -> None:
        store.switch("held", True)
        save(store, "a.pt", "b.pt")
        stillframe.remove("b.pt")
        when_said("waiting for 2 uploads", lambda: store.switch("held", False))

    child = Child(work, tmp_path / "printed")
    assert child.printed() == (
        f"stillframe: waiting for 2 uploads to {store.url} (24.6 kB); Ctrl-C twice leaves it to"
        " the next process\n"
    )
    assert store.names() == {"a.pt", "b.pt"} and os.listdir(run) == ["a.pt"]


def test_exit_does_not_wait_for_a_store_that_is_down(store, run, tmp_path):
    def work() -> None:
        store.switch("down", True)
        save(store, "a.pt", "b.pt")
        stillframe.remove("a.pt")

    lines = Child(work, tmp_path / "printed").printed().splitlines()
    assert "a.pt waits to be uploaded" in lines[0]
    assert lines[1:] == [
        "stillframe: left to the next process that saves there with a mirror: 2 uploads to"
        f" {store.url} (24.6 kB)",
        f"stillframe: {run}/a.pt was not removed: it is not uploaded yet",
    ]
    assert entries(run) == ["due", "due"] and store.names() == set()
    store.switch("down", False)
    go_on(store)
    assert store.puts() == ["a.pt", "b.pt", "next.pt"]


def test_ctrl_c_at_exit_mentions_uploads_only_if_some_are_waiting(store, run, capsys):
    at_exit._print_interrupt_hint()
    assert "still writing; Ctrl-C again" in capsys.readouterr().err
    with store.held():
        save(store, "a.pt")
        assert eventually(lambda: not _core.log_pending())  # the save has left the log
        at_exit._print_interrupt_hint()
    assert "still uploading; Ctrl-C again" in capsys.readouterr().err


def test_uploads_given_up_by_a_second_ctrl_c_are_made_by_the_next_process(store, run, tmp_path):
    def work() -> None:
        store.switch("held", True)
        stillframe.save(state(1, sending._PIECE), "a.pt", mirror=store.url)
        store.wait_for("begin", "a.pt")
        for words in ("waiting for 1 upload", "still uploading"):
            when_said(words, lambda: os.kill(os.getpid(), signal.SIGINT))
        threading.Thread(target=let_go, daemon=True).start()

    def let_go() -> None:
        assert eventually(lambda: mirror.uploader._given_up)
        store.switch("held", False)

    printed = Child(work, tmp_path / "printed").printed()
    words = ("waiting for 1 upload", "still uploading; Ctrl-C again", "given up", "1 upload to")
    places = [printed.index(each) for each in words[:-1]] + [printed.rindex(words[-1])]
    assert places == sorted(places)
    assert entries(run) == ["due"] and store.names() == set()
    assert not [each for each in store.path.rglob("*") if "stillframe-tmp" in each.name]
    go_on(store)
    assert store.names() == {"a.pt", "next.pt"} and entries(run) == []


def test_exit_after_a_preemption_does_not_wait_beyond_its_deadline(store, run, tmp_path):
    def work() -> None:
        save(store, "a.pt")
        store.wait_for("begin", "a.pt")
        in_time.finish(time.monotonic())

    with store.held():
        assert Child(work, tmp_path / "printed").printed() == (
            "stillframe: left to the next process that saves there with a mirror: 1 upload to"
            f" {store.url} (12.3 kB)\n"
        )
    assert entries(run) == ["due"]
    go_on(store)
    assert store.puts() == ["a.pt", "next.pt"]


def test_child_of_multiprocessing_finishes_its_uploads_before_it_ends(store, run):
    def work() -> None:
        torch.set_num_threads(1)
        stillframe.async_save(state(1), "a.pt", mirror=store.url)

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    assert child.exitcode == 0 and store.names() == {"a.pt"} and os.listdir(run) == ["a.pt"]


# ---- fork ----


def test_forked_child_uploads_nothing_of_its_parent(store, run, tmp_path):
    with store.held():
        save(store, "a.pt", "b.pt")
        stillframe.remove("b.pt")
        store.wait_for("begin", "a.pt")

        def work() -> None:
            assert not journal._locked and not uploads._postponed
            assert not mirror.uploader._thread.is_alive() and stillframe.exists("b.pt")
            uploaded()

        assert Child(work, tmp_path / "printed").printed() == ""
        assert has_entries(run, "due", "due")
    uploaded()
    assert store.puts("begin") == store.puts() == ["a.pt", "b.pt"]
    assert {line.split(" ")[2] for line in store.lines()} == {str(os.getpid())}


def test_forked_child_that_cannot_use_the_client_still_saves_to_the_disk(server, run, tmp_path):
    def work() -> None:
        stillframe.save(state(1), "a.pt", mirror=server.url("run/"))

    stillframe.save(state(1), "first.pt", mirror=server.url("run/"))
    uploaded()
    printed = Child(work, tmp_path / "printed").printed()
    assert "a.pt waits to be uploaded: " in printed and "fork" in printed
    assert entries(run) == ["due"] and set(server.objects()) == {"run/first.pt"}
    stillframe.save(state(1), "next.pt", mirror=server.url("run/"))
    uploaded()
    assert server.objects().keys() == {"run/first.pt", "run/a.pt", "run/next.pt"}


def test_forked_child_does_not_keep_the_journals_lock_of_its_parent(store, run, tmp_path):
    def work() -> None:
        save(store, "a.pt")
        store.wait_for("begin", "a.pt")
        if os.fork() == 0:
            (tmp_path / "forked").touch()
            time.sleep(600)
        time.sleep(600)

    with store.held():
        child = Child(work, tmp_path / "printed")
        assert eventually((tmp_path / "forked").exists)
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    try:
        go_on(store)
        assert store.puts() == ["a.pt", "next.pt"]
    finally:
        os.killpg(child.pid, signal.SIGKILL)


# ---- kill -9 ----


@pytest.mark.leaves_temporaries
def test_next_process_makes_the_uploads_that_a_killed_process_left(store, run, tmp_path):
    def work() -> None:
        for n in range(1000):
            stillframe.async_save(state(n), f"step-{n}.pt", mirror=store.url)
            stillframe.async_save(state(n), "last.pt", mirror=store.url)
            with stillframe.checkpoint("dir", mirror=store.url) as files:
                for name in ("n", "n-again"):
                    Path(files.path, name).write_text(str(n))

    random.seed(20)
    for _ in range(20):
        child = Child(work, tmp_path / "printed")
        time.sleep(random.uniform(0, 0.25))
        child.kill()
        journal.entries(str(run))
        for name in store.names():  # whole objects, old or new
            if name.endswith(".pt"):
                stillframe.load(store.path / "run" / name)
    go_on(store)
    local = {str(each.relative_to(run)) for each in run.rglob("[!.]*") if each.is_file()}
    assert len(local) >= 4  # a slow machine makes few
    assert store.names() == local | {"dir/.stillframe.json"}
    assert all(store.read(name) == (run / name).read_bytes() for name in local)
    assert entries(run) == []


# ---- several processes ----


def test_two_processes_share_a_directory_and_upload_each_file_once(store, run, tmp_path):
    """The uploads of one prefix do not overlap."""

    def work() -> None:
        for n in range(30):
            save(store, f"{os.getpid()}-{n}.pt")
        uploaded()

    children = [Child(work, tmp_path / f"printed-{n}") for n in range(2)]
    assert [each.printed() for each in children] == ["", ""]
    puts = [line.split(" ")[:2] for line in store.lines() if not line.startswith("content")]
    assert len(puts) == 2 * 60 and entries(run) == []
    assert all(
        (begun[0], ended[0], begun[1]) == ("begin", "end", ended[1])
        for begun, ended in zip(puts[::2], puts[1::2], strict=True)
    )
    assert sorted(store.names()) == sorted(os.listdir(run))


def test_other_process_takes_over_the_uploads_of_a_killed_one(store, run, tmp_path):
    def work() -> None:
        save(store, "a.pt")
        time.sleep(600)

    with store.held():
        child = Child(work, tmp_path / "printed")
        store.wait_for("begin", "a.pt")
        save(store, "b.pt")
        stillframe.remove("a.pt")
        stillframe.wait_all()
        assert (run / "a.pt").exists()  # the other process uploads it
        assert store.puts("begin") == ["a.pt"]
        child.kill()
    uploaded()
    assert store.puts() == ["a.pt", "b.pt"] and os.listdir(run) == ["b.pt"]
