"""State for the duration of a call: whether the thread is inside a call, and garbage collection.

A signal handler may save in the middle of another of our calls on its thread. Such a save is
*nested*: it must not wait for anything that only the interrupted call could release.

Ctrl-C may come after `__enter__` and before the block begins. Then `__exit__` never runs. So each
call is recorded by the stack frame that entered it. The next call drops the records whose frames
have left the stack.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from types import FrameType


class _ThreadFrames(threading.local):
    """The records of one thread."""

    def __init__(self) -> None:
        self.calls: list[FrameType] = []  # frames that are inside a call
        self.no_garbage_collection: list[
            FrameType
        ] = []  # frames that turned garbage collection off


_frames = _ThreadFrames()


def stack(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame, its caller, the caller's caller, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _remove_ended_frames(frames: list[FrameType]) -> bool:
    """Remove the frames that have left this thread's stack. Return whether there were any."""
    living = set(stack(sys._getframe(1)))  # from the caller's frame on
    ended = [each for each in frames if each not in living]
    for each in ended:
        frames.remove(each)
    return bool(ended)


def _remove_frame(frames: list[FrameType], frame: FrameType) -> None:
    if frame in frames:  # not if an interrupt came before the frame was added
        frames.remove(frame)


class inside_call:  # lower case, because it is used like a function
    """Mark the thread as inside a call of this package: `with inside_call() as nested:`. `nested`
    is True if the thread was inside such a call already."""

    __slots__ = ()

    def __enter__(self) -> bool:
        calls = _frames.calls
        if calls:
            _remove_ended_frames(calls)
        nested = bool(calls)
        calls.append(sys._getframe(1))  # the frame of the `with` statement
        return nested

    def __exit__(self, *error: object) -> None:
        _remove_frame(_frames.calls, sys._getframe(1))


class no_garbage_collection:  # lower case for the same reason
    """Turn garbage collection off inside the block.

    For blocks that make many objects that all stay alive. Collections would find nothing, and take
    longer than the rest of the block.
    """

    __slots__ = ("_was_enabled",)

    def __enter__(self) -> None:
        frames = _frames.no_garbage_collection
        # Ctrl-C may have kept an earlier block from turning collection on again. This one does it.
        was_left_off = bool(frames) and _remove_ended_frames(frames)
        self._was_enabled = gc.isenabled() or was_left_off
        if self._was_enabled:
            frames.append(sys._getframe(1))
            gc.disable()

    def __exit__(self, *error: object) -> None:
        if self._was_enabled:
            gc.enable()
            _remove_frame(_frames.no_garbage_collection, sys._getframe(1))


def do_nothing() -> None:
    """Do nothing: the default of an optional callback."""
