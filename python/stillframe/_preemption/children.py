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


class _ForkState(threading.local):
    """The state of a fork, for the thread that forks."""

    def __init__(self) -> None:
        # The signals that were blocked before each fork: a stack, because a hook may fork too.
        self.blocked_before: list[set[int]] = []
        self.is_main = False  # the parent's main thread forks


_fork_state = _ForkState()
_blocks: list[Watched] = []  # the blocks that are running
_has_fork_hooks = False  # the hooks of os.fork are registered


def watch(block: Watched) -> None:
    """Call `block.forget` in every child that is forked from now on."""
    global _has_fork_hooks
    if not _has_fork_hooks:
        _has_fork_hooks = True
        os.register_at_fork(
            before=_block_signals,
            after_in_parent=_unblock_signals,
            after_in_child=_restore_signals_in_child,
        )
    _blocks.append(block)


def unwatch(block: Watched) -> None:
    if block in _blocks:
        _blocks.remove(block)


def _signals_of_running_blocks() -> set[int]:
    """Return the signals of all running blocks."""
    return {number for block in list(_blocks) for number in block.signals}


def _block_signals() -> None:
    """Block the signals of all blocks before a fork."""
    _fork_state.is_main = threading.current_thread() is threading.main_thread()
    blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, _signals_of_running_blocks())
    _fork_state.blocked_before.append({*blocked_before})


def _unblock_signals() -> None:
    """Unblock the signals after a fork, in the parent and in the child."""
    if _fork_state.blocked_before:  # empty if the hooks were installed during this fork
        signal.pthread_sigmask(signal.SIG_SETMASK, _fork_state.blocked_before.pop())


def _restore_signals_in_child() -> None:
    """Restore the handlers and the signal mask in a forked child. A daemonic child also leaves the
    signals to its parent."""
    numbers = _signals_of_running_blocks()
    while _blocks:
        _blocks.pop().forget()
    if numbers and _is_forking_daemonic_child():
        _ignore_signals_not_from_parent(numbers)
        _patch_dataloader_worker_signals(numbers)
    _unblock_signals()


def _ignore_signals_not_from_parent(numbers: Iterable[int]) -> None:
    """Ignore signals unless the parent sends them, and have the kernel kill this child when the
    parent dies.

    The kernel kills the child when the thread that forked it ends. So if another thread than the
    parent's main thread forked it, the kernel is asked only at the first ignored signal.
    """
    for number in numbers:
        _core.leave_signal(number, _fork_state.is_main)  # True: ask the kernel at once


def _is_forking_daemonic_child() -> bool:
    """Return whether multiprocessing is forking a daemonic process."""
    for frame in stack(sys._getframe(1)):
        if frame.f_code is popen_fork.Popen._launch.__code__:  # type: ignore[attr-defined]
            process = frame.f_locals.get("process_obj")
            return bool(getattr(process, "daemon", False))
    return False


def _patch_dataloader_worker_signals(numbers: Iterable[int]) -> None:
    """Have a DataLoader's worker call `_ignore_signals_not_from_parent` again after it has
    installed torch's handlers. Then torch's handlers get the signals that the parent sends."""
    handling: Any = sys.modules.get("torch.utils.data._utils.signal_handling")
    if handling is None:
        return
    install: Callable[[], object] = handling._set_worker_signal_handlers

    def install_then_ignore_signals() -> None:
        install()
        _ignore_signals_not_from_parent(numbers)

    handling._set_worker_signal_handlers = install_then_ignore_signals
