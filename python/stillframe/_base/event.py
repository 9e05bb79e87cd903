"""`Event`: a flag to wait for, which a signal handler may interrupt anywhere.

`threading.Event` holds a lock while it begins and ends a wait. At that moment a signal handler may
run on the same thread and wait for a thread that calls `set`. Both would wait forever. The class
here has no such lock.
"""

from __future__ import annotations

import contextlib
import threading


class Event:
    """A flag that is set once."""

    def __init__(self) -> None:
        self._is_set = False
        # One lock for each thread that waits. The thread acquires its lock twice. The second time
        # blocks until `set` releases the lock.
        self._waiting: list[threading.Lock] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        # Not `while self._waiting`: another thread in `set` may pop the last lock first.
        with contextlib.suppress(IndexError):
            while True:
                self._waiting.pop().release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds until the flag is set. Return whether it is set."""
        mine = threading.Lock()
        mine.acquire()
        self._waiting.append(mine)
        try:
            # Checked after the append: either `set` finds the lock, or the flag is set already.
            if not self._is_set:
                mine.acquire(timeout=-1 if timeout is None else max(0.0, timeout))
        finally:
            with contextlib.suppress(ValueError):  # `set` has removed the lock already
                self._waiting.remove(mine)
        return self._is_set
