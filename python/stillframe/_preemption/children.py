"""Forked children of a process that handles a preemption.

In a child the signal handlers from before the block are restored. A child never runs the parent's
handlers, which would act on a copy of the parent's state. The signals are blocked during the fork,
so that a child receives none before its handlers are restored.

A daemonic child of multiprocessing, such as a worker of a DataLoader, must stay alive as long as
its parent, because the parent needs it to reach the next boundary. So such a child ignores these
signals unless the parent itself sends them, and ends with the parent (csrc/core/base/signals.c).
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
        # The signals that were blocked before each fork that has begun. It is a stack, in case
        # another fork begins inside the hooks of a fork.
        self.before: list[set[int]] = []
        self.is_main = False  # whether the thread that forks is the parent's main thread


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
    """End what `watch` began. May be called again."""
    if block in _active:
        _active.remove(block)


def _numbers() -> set[int]:
    """Return the signals of all blocks."""
    return {number for block in list(_active) for number in block.signals}


def _block() -> None:
    """Block the signals of all blocks, right before a fork."""
    _masks.is_main = threading.current_thread() is threading.main_thread()
    _masks.before.append({*signal.pthread_sigmask(signal.SIG_BLOCK, _numbers())})


def _unblock() -> None:
    """Restore the signal mask from before the fork."""
    if _masks.before:  # empty if the hooks were installed during this fork
        signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before.pop())


def _in_child() -> None:
    """Restore the handlers, or leave the signals to the parent; then unblock the signals."""
    numbers = _numbers()
    while _active:
        _active.pop().forget()
    if numbers and _serves_its_parent():
        _leave(numbers)
        _leave_again_in_workers(numbers)
    _unblock()


def _leave(numbers: Iterable[int]) -> None:
    """Leave signals to the parent: ignore them unless the parent sends them.

    If the parent's main thread has forked, the kernel kills this process when the parent ends. If
    another thread has forked, the kernel would do that when that thread ends. So in this case the
    kernel is asked for that only when the first signal is ignored.
    """
    for number in numbers:
        _core.leave_signal(number, _masks.is_main)


def _serves_its_parent() -> bool:
    """Return whether multiprocessing is forking a daemonic process."""
    for frame in stack(sys._getframe(1)):
        if frame.f_code is popen_fork.Popen._launch.__code__:  # type: ignore[attr-defined]
            return bool(getattr(frame.f_locals.get("process_obj"), "daemon", False))
    return False


def _leave_again_in_workers(numbers: Iterable[int]) -> None:
    """Have a worker of a DataLoader leave the signals again after it has installed torch's
    handlers. torch's handlers are then called for signals that the parent sends."""
    handling: Any = sys.modules.get("torch.utils.data._utils.signal_handling")
    if handling is None:
        return
    install: Callable[[], object] = handling._set_worker_signal_handlers

    def install_and_leave() -> None:
        install()
        _leave(numbers)

    handling._set_worker_signal_handlers = install_and_leave
