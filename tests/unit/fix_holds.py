"""Stops a system call of a save or snapshot until the test waits for that save or snapshot.

So a test can check the state before the call without guessing a time: the call continues when the
test begins to wait, and not before.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

from stillframe._save import api, ordered
from stillframe._save.core_save import CoreSave
from stillframe._save.external import ExternalSave
from stillframe._snapshot.copy import Copy
from stillframe._snapshot.snapshot import Snapshot
from stillframe.testing import held

_WAITS = {
    CoreSave._wait.__code__,
    CoreSave.gate.__code__,
    ExternalSave._wait_until_ended.__code__,
    Copy.gate.__code__,
    Copy.finish.__code__,
    Snapshot.wait.__code__,
    api.wait_all.__code__,
    ordered._open.__code__,
}


def _is_waiting(frame: FrameType | None) -> bool:
    """Return whether one of the package's waits is on the stack."""
    while frame is not None and frame.f_code not in _WAITS:
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def held_until_awaited(call: str) -> Iterator[None]:
    """Stop every `call` inside the block until this thread waits for a save or a snapshot in one of
    the package's own waits.

    Raises:
        TimeoutError: The test waited in another way for a minute; add that wait to `_WAITS`.
    """
    thread, over = threading.get_ident(), threading.Event()
    hold, timed_out = contextlib.ExitStack(), threading.Event()

    def let_go() -> None:
        end = time.monotonic() + 60
        while not over.wait(0.005) and not _is_waiting(sys._current_frames()[thread]):
            if time.monotonic() > end:
                timed_out.set()
                break
        hold.close()

    hold.enter_context(held(call))
    watcher = threading.Thread(target=let_go)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
    if timed_out.is_set():
        raise TimeoutError(f"no wait of stillframe was seen while {call} was stopped")
