"""No call of the extension waits for an engine's lock while it has the interpreter lock.

The owner of an engine's lock may be a niced thread that another process keeps from running. Then
every Python thread would stop.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import stillframe
import torch
from stillframe import _core
from stillframe._save.engine import core_of
from stillframe.testing import held


def _calls(engine: stillframe.Engine, directory: Path) -> dict[str, Callable[[], object]]:
    core = core_of(engine)
    ticket = _core.Ticket(core, os.fsencode(directory), b"b.pt", b"", bytearray(), 0, 0)
    snapshot = _core.Snapshot(core, bytearray(), 0)
    memory = snapshot.lease()
    return {
        "confirm": lambda: ticket.confirm(-1),
        "cancel": ticket.cancel,
        "wait until copied": lambda: ticket.wait(_core.WAIT_COPIED, 0),
        "wait until staged": lambda: ticket.wait(_core.WAIT_STAGED, 0.0),
        "report": ticket.report,
        "stats": engine.stats,
        "error": snapshot.error,
        "hold": snapshot.hold,
        "unhold": snapshot.unhold,
        "leased": snapshot.leased,
        "will_return": snapshot.will_return,
        "wait of a snapshot": lambda: (snapshot.wait(0.0), memory),
    }


def _call_all_under_a_taken_lock(directory: Path) -> None:
    engine = stillframe.Engine(pool_bytes="64MiB")
    calls = _calls(engine, directory)
    state = {"weight": torch.ones(8)}
    # The first save starts the engine's threads and takes its lock.
    saving = threading.Thread(
        target=lambda: stillframe.async_save(state, directory / "a.pt", engine=engine).result()
    )
    with held("thread_create") as injected:
        saving.start()
        while injected.calls("thread_create") == 0:
            time.sleep(0.001)
        threads = {name: threading.Thread(target=call) for name, call in calls.items()}
        for name, thread in threads.items():
            os.write(2, f"under the engine's lock: {name}\n".encode())
            thread.start()
            time.sleep(0.001)  # by now the call was made, and this thread still runs
    for thread in [saving, *threads.values()]:
        thread.join()


def test_no_call_holds_the_interpreter_lock_while_it_waits_for_the_engines_lock(tmp_path):
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(120)  # a thread that waits with the interpreter lock answers no other signal
        status = 1
        try:
            _call_all_under_a_taken_lock(tmp_path)
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
