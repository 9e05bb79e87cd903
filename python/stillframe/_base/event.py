"""`Event`: a flag to wait for, which a signal handler may interrupt anywhere.

`threading.Event` holds a lock while it begins and ends a wait. A signal handler may run on the
same thread at that moment. If the handler waits for a thread that calls `set`, it waits forever.
Here `set` and `wait` share no lock that could be held at that moment.
"""

from __future__ import annotations

import contextlib
import threading


class Event:
    """A flag that is set once."""

    def __init__(self) -> None:
        self._is_set = False
        # One lock for each thread that waits. The thread acquires its lock twice. The second time
        # it waits until `set` releases the lock.
        self._waiting: list[threading.Lock] = []

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
            timeout: The most seconds to wait; None waits forever.
        """
        mine = threading.Lock()
        mine.acquire()
        self._waiting.append(mine)
        try:
            # This check comes after the append: `set` either finds the lock, or has set the flag.
            if not self._is_set:
                mine.acquire(timeout=-1 if timeout is None else max(0.0, timeout))
        finally:
            with contextlib.suppress(ValueError):  # `set` has removed it meanwhile
                self._waiting.remove(mine)
        return self._is_set
