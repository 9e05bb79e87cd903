"""Forked children of a process that handles a preemption.

A child gets the signal handlers from before the block. The signals are blocked during the fork, so
a child receives none before its handlers are restored.

The parent needs its daemonic children, such as a DataLoader's workers, to reach the next boundary.
So such a child ignores the signals unless the parent sends them, and ends with the parent
(csrc/core/base/signals.c).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from multiprocessing import popen_fork
from typing import Any, Protocol

from stillframe import _core
from stillframe._base.calls import stack


class Watched(Protocol):
    """A block that has installed signal handlers."""

    signals: tuple[int, ...]

    def forget(self) -> None:
        """Restore the handlers in a forked child."""


class _Masks(threading.local):
    """The state of a fork, for the thread that forks."""

    def __init__(self) -> None:
        # The signals that were blocked before each fork: a stack, because a hook may fork too.
        self.before: list[set[int]] = []
        self.is_main = False  # whether the parent's main thread forks


_masks = _Masks()
_active: list[Watched] = []  # the blocks that are running
_installed = False  # whether the hooks of os.fork are registered


def watch(block: Watched) -> None:
    """Call `block.forget` in every child that is forked from now on."""
    global _installed
    if not _installed:
        _installed = True
        os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_in_child)
    _active.append(block)


def unwatch(block: Watched) -> None:
    if block in _active:
        _active.remove(block)


def _numbers() -> set[int]:
    return {number for block in list(_active) for number in block.signals}


def _block() -> None:
    _masks.is_main = threading.current_thread() is threading.main_thread()
    _masks.before.append({*signal.pthread_sigmask(signal.SIG_BLOCK, _numbers())})


def _unblock() -> None:
    if _masks.before:  # empty if the hooks were installed during this fork
        signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before.pop())


def _in_child() -> None:
    numbers = _numbers()
    while _active:
        _active.pop().forget()
    if numbers and _is_daemonic():
        _leave_to_parent(numbers)
        _leave_to_parent_in_worker(numbers)
    _unblock()


def _leave_to_parent(numbers: Iterable[int]) -> None:
    """Ignore signals unless the parent sends them, and end with the parent.

    The kernel ends a child with the thread that forked it. If that is not the main thread, this
    begins only with the first ignored signal.
    """
    for number in numbers:
        _core.leave_signal(number, _masks.is_main)


def _is_daemonic() -> bool:
    """Return whether multiprocessing is forking a daemonic process."""
    for frame in stack(sys._getframe(1)):
        if frame.f_code is popen_fork.Popen._launch.__code__:  # type: ignore[attr-defined]
            return bool(getattr(frame.f_locals.get("process_obj"), "daemon", False))
    return False


def _leave_to_parent_in_worker(numbers: Iterable[int]) -> None:
    """Have a DataLoader's worker call `_leave_to_parent` again after it has installed torch's
    handlers. Then torch's handlers get the signals that the parent sends."""
    handling: Any = sys.modules.get("torch.utils.data._utils.signal_handling")
    if handling is None:
        return
    install: Callable[[], object] = handling._set_worker_signal_handlers

    def install_and_leave() -> None:
        install()
        _leave_to_parent(numbers)

    handling._set_worker_signal_handlers = install_and_leave
