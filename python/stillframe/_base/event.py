"""`Event`: a flag to wait for, which a signal handler may interrupt anywhere.

`threading.Event` holds a lock while it begins and ends a wait. A handler that runs there on the
same thread, and waits for a thread that calls `set`, would wait forever.
"""

from __future__ import annotations

import contextlib
import threading


class Event:
    """A flag that is set once."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[threading.Lock] = []  # one for each thread that waits; its lock is held

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        # Another thread may be in `set` too, and may pop the last lock first.
        with contextlib.suppress(IndexError):
            while True:
                self._waiting.pop().release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the flag is set, and return whether it is.

        Args:
            timeout: The most seconds to wait.
        """
        mine = threading.Lock()
        mine.acquire()
        self._waiting.append(mine)
        try:
            if not self._is_set:
                mine.acquire(timeout=-1 if timeout is None else max(0.0, timeout))
        finally:
            with contextlib.suppress(ValueError):  # `set` has removed it meanwhile
                self._waiting.remove(mine)
        return self._is_set
