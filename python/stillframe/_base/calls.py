"""What holds for the length of one of our calls: the thread is inside, garbage is not collected.

A signal handler may save in the middle of another of our calls on its thread. Such a save must not
wait for what only the interrupted call could give back, so it is told that it is nested.

Ctrl-C may come before any line, also between a context manager's work and the block it guards. So
each keeps the frame that entered it, and one whose frame is gone from the stack counts no more.
(Until then that frame's variables live on.)
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from types import FrameType


class _Frames(threading.local):
    def __init__(self) -> None:
        self.calls: list[FrameType] = []
        self.no_collection: list[FrameType] = []


_frames = _Frames()


def stack(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame, the one that called it, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _drop_ended(frames: list[FrameType]) -> bool:
    """Takes out frames that this thread is not in any more; whether there was one."""
    living = set(stack(sys._getframe(1)))
    ended = [each for each in frames if each not in living]
    for each in ended:
        frames.remove(each)
    return bool(ended)


def _leave(frames: list[FrameType], frame: FrameType) -> None:
    if frame in frames:  # not where an interrupt came before it was noted
        frames.remove(frame)


class inside:  # a context manager that reads as a verb
    """`with inside() as nested:` — nested is True when the thread was inside one of our calls
    before."""

    __slots__ = ()

    def __enter__(self) -> bool:
        calls = _frames.calls
        if calls:
            _drop_ended(calls)
        nested = bool(calls)
        calls.append(sys._getframe(1))
        return nested

    def __exit__(self, *error: object) -> None:
        _leave(_frames.calls, sys._getframe(1))


class no_collection:  # likewise
    """No garbage collection inside.

    Planning a save, loading and making a tree again make many thousand objects that all stay, so
    collections of them find nothing; and each looks through much of the process, which takes longer
    than all else.
    """

    __slots__ = ("_enabled",)

    def __enter__(self) -> None:
        frames = _frames.no_collection
        interrupted = bool(frames) and _drop_ended(frames)
        self._enabled = gc.isenabled() or interrupted
        if self._enabled:
            frames.append(sys._getframe(1))
            gc.disable()

    def __exit__(self, *error: object) -> None:
        if self._enabled:
            gc.enable()
            _leave(_frames.no_collection, sys._getframe(1))
