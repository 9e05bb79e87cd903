"""Whether the current thread is inside one of our calls already.

A signal handler may save in the middle of another of our calls on its thread. Such a save must not
wait for what only the interrupted call could give back, so it is told that it is nested.
"""

from __future__ import annotations

import threading
from types import TracebackType


class _Depth(threading.local):
    value = 0


_depth = _Depth()


class inside:  # a context manager that reads as a verb
    """`with inside() as nested:` — nested is True when the thread was inside one of our calls
    before."""

    __slots__ = ()

    def __enter__(self) -> bool:
        nested = _depth.value > 0
        _depth.value += 1
        return nested

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _depth.value -= 1
