"""`snapshot(overlap=True)`: copies under the next forward and backward, and the process's exit."""

from __future__ import annotations

import concurrent.futures
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import stillframe
import torch
from fix_holds import held_until_awaited
from fix_processes import run_python
from fix_snapshots import MIB, engine, flat, state_of, step, trained
from fix_waits import leased
from stillframe import _core
from stillframe._save import completion
from stillframe._snapshot.copy import Copy
from stillframe._snapshot.snapshot import call_when_copied
from stillframe.testing import held, slow

__all__ = ["engine"]  # a fixture


# ---- overlap ----


def test_the_next_step_waits_for_the_copy(engine):
    model, optimizer = trained()
    expected = [tensor.clone() for tensor in flat(state_of(model, optimizer))]
    with slow("lane_copy", 0.05):  # or the step copies by itself, if the lane has not begun
        snap = stillframe.snapshot(state_of(model, optimizer), overlap=True, engine=engine)
        step(model, optimizer)
    snap.wait()
    assert all(map(torch.equal, flat(snap.tree), expected))


def test_the_tree_is_complete_when_it_is_asked_for(engine):
    model, optimizer = trained()
    with slow("lane_copy", 0.05):
        snap = stillframe.snapshot(state_of(model, optimizer), overlap=True, engine=engine)
        tree = snap.tree
    assert all(map(torch.equal, flat(tree), flat(state_of(model, optimizer))))


def test_wait_that_takes_too_long_raises_a_timeout(engine):
    model, optimizer = trained()
    with held("lane_copy", sticky=False):
        snap = stillframe.snapshot(state_of(model, optimizer), overlap=True, engine=engine)
        with pytest.raises(TimeoutError):
            snap.wait(timeout=0)
    snap.wait()


def test_no_verdict_is_given_before_the_copy_has_ended(engine):
    model, optimizer = trained()
    with held("lane_copy", sticky=False):
        snap = stillframe.snapshot(state_of(model, optimizer), overlap=True, engine=engine)
        copy = snap._copy
        copy.settle()  # as a notice of another copy would
        assert not copy.is_settled()
        assert copy.sources  # the lane is reading their memory
    snap.wait()
    assert copy.is_settled() and not copy.sources


class _Interrupted:
    """A fake core whose snapshots are interrupted right after their copy has begun."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_core, name)

    def Snapshot(self, *args: Any) -> Any:
        class Started:
            def __init__(self) -> None:
                self.core = _core.Snapshot(*args)

            def __getattr__(self, name: str) -> Any:
                return getattr(self.core, name)

            def start(self, streams: Any) -> None:
                self.core.start(streams)
                raise KeyboardInterrupt

        return Started()


def test_ctrl_c_just_after_the_copy_has_begun_leaves_it_its_sources(engine, monkeypatch):
    model, optimizer = trained()
    with monkeypatch.context() as patched, held("lane_copy"):
        patched.setattr(sys.modules["stillframe._snapshot.snapshot"], "_core", _Interrupted())
        with pytest.raises(KeyboardInterrupt):
            stillframe.snapshot(state_of(model, optimizer), overlap=True, engine=engine)
        (copy,) = completion.copying.values()
        assert isinstance(copy, Copy) and not copy.is_settled()
        assert len(copy.sources) == len({id(each) for each in flat(state_of(model, optimizer))})
        step(model, optimizer)  # waits for no copy, because no caller has the snapshot
    copy.finish()
    assert copy.sources == [] and copy.is_settled()
    del copy
    snap = stillframe.snapshot(state_of(model, optimizer), overlap=True, engine=engine)
    assert all(map(torch.equal, flat(snap.tree), flat(state_of(model, optimizer))))
    snap.release()
    gc.collect()
    assert leased(engine) == 0 and not completion.copying


@pytest.mark.parametrize("through_data", [False, True])
def test_a_change_outside_the_step_is_found_and_named(engine, through_data):
    model, optimizer = trained()
    state = state_of(model, optimizer)
    with held_until_awaited("lane_copy"):
        snap = stillframe.snapshot(state, overlap=True, engine=engine)
        with torch.no_grad():
            weight: Any = model.weight
            (weight.data if through_data else weight).add_(1.0)
        with pytest.raises(stillframe.TornSnapshotError) as caught:
            snap.wait()
    assert caught.value.tensors == ("model.weight",)
    with pytest.raises(stillframe.TornSnapshotError):
        _ = snap.tree
    # From now on that optimizer's state is captured.
    with slow("lane_copy", 1.0) as injected:
        again = stillframe.snapshot(state, overlap=True, engine=engine)
        again.wait()
        assert injected.calls("lane_copy") == 0


def test_verdict_is_given_without_a_wait(engine):
    model, optimizer = trained()
    copied = threading.Event()
    with held("lane_copy"):
        snap = stillframe.snapshot(state_of(model, optimizer), overlap=True, engine=engine)
        call_when_copied(snap, copied.set)
        assert not copied.is_set()
    assert copied.wait(60) and not snap._copy.sources


def test_uncollected_torn_snapshot_is_logged(engine, caplog):
    model, optimizer = trained()
    with held_until_awaited("lane_copy"):
        snap = stillframe.snapshot(state_of(model, optimizer), overlap=True, engine=engine)
        with torch.no_grad():
            model.weight.add_(1.0)
        step(model, optimizer)
    with caplog.at_level(logging.ERROR):
        del snap
        gc.collect()
    assert "model.weight" in caplog.text


def test_snapshot_dropped_during_its_copy_returns_its_memory(engine):
    model, optimizer = trained()
    with slow("lane_copy", 0.05):
        stillframe.snapshot(state_of(model, optimizer), overlap=True, engine=engine).release()
        step(model, optimizer)
        # A request for the whole pool waits for memory that will return.
        stillframe.snapshot(torch.zeros(32 * MIB, dtype=torch.uint8), engine=engine).release()
    assert leased(engine) == 0
    while stillframe._save.completion.copying:  # its notice may not have been taken yet
        time.sleep(0.001)
    engine.close()


def test_closing_an_engine_waits_for_the_copy():
    model, optimizer = trained()
    engine = stillframe.Engine(pool_bytes=32 * MIB)
    expected = [tensor.clone() for tensor in flat(state_of(model, optimizer))]
    with slow("lane_copy", 0.05):
        snap = stillframe.snapshot(state_of(model, optimizer), overlap=True, engine=engine)
        engine.close()
        snap.wait(timeout=0)
    assert all(map(torch.equal, flat(snap.tree), expected))


def test_a_signal_handler_may_take_a_snapshot_while_one_waits(engine):
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    inside, done = threading.Event(), threading.Event()

    def handler(number: int, frame: object) -> None:
        # A second signal may come when the waiting call has taken the whole pool.
        if not inside.is_set():
            inside.set()
            assert stillframe.snapshot([torch.ones(3)], engine=engine).tree[0].sum() == 3
            done.set()

    def poke() -> None:
        # only one signal at a time, because handlers are interrupted too
        while not inside.wait(0.01):
            os.kill(os.getpid(), signal.SIGUSR1)
        done.wait(60)
        future.set_result(None)

    held = stillframe.snapshot([torch.zeros(4 * MIB, dtype=torch.uint8)], engine=engine)
    held.hold_until(future)
    held.release()
    source = torch.zeros(32 * MIB, dtype=torch.uint8)
    thread = threading.Thread(target=poke)
    old = signal.signal(signal.SIGUSR1, handler)
    try:
        thread.start()
        snap = stillframe.snapshot([source], engine=engine)
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert done.is_set()
    assert snap.tree[0].equal(source)


def test_exception_of_a_signal_handler_is_not_taken_for_ours(engine):
    """A handler takes a snapshot that does not fit, during a call that has taken the pool."""
    source = torch.zeros(32 * MIB, dtype=torch.uint8)
    held = stillframe.snapshot([source], engine=engine)
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    held.hold_until(future)
    held.release()

    def handler(number: int, frame: object) -> None:
        stillframe.snapshot([torch.zeros(64 * MIB, dtype=torch.uint8)], engine=engine)

    old = signal.signal(signal.SIGUSR1, handler)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
    try:
        timer.start()
        with pytest.raises(stillframe.PoolExhaustedError, match=r"a snapshot of 67\.1 MB"):
            stillframe.snapshot([source], engine=engine)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, old)
        future.set_result(None)


# ---- the end of the process ----


def run(code: str) -> subprocess.CompletedProcess[str]:
    return run_python("-c", code)


def test_a_process_may_end_with_snapshots_of_every_kind():
    done = run(
        "import torch, stillframe\n"
        "from stillframe.testing import slow\n"
        "model = torch.nn.Linear(300, 300)\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "for _ in range(4):\n"
        "    model(torch.ones(1, 300)).sum().backward(); optimizer.step()\n"
        "keep = stillframe.snapshot([torch.ones(3)])\n"
        "tensor = stillframe.snapshot([torch.ones(3)]).tree[0]\n"
        "blocker = slow('lane_copy', 0.05); blocker.__enter__()\n"
        "late = stillframe.snapshot(model.state_dict(), overlap=True)\n"
        "print('end')\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
