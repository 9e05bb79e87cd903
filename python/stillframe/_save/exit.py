"""The end of the process: saves in flight finish, and errors that nobody collected are printed.

The *drain* is the wait for these saves, for removes and for uploads. It runs as an exit handler,
which cannot change the process's exit status.

Children of multiprocessing that were started by fork or forkserver run no exit handlers. But
multiprocessing runs its own finalizers in every child, so the drain is one of them there. A spawned
child drains twice; the second drain finds nothing to do.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable
from multiprocessing import process, util

from stillframe import _core
from stillframe._base.trace import end_trace_at_exit
from stillframe._save import completion, uploads
from stillframe._save.api import close_default_engine, describe_unfinished_saves, settle_ended_saves
from stillframe._save.directory import give_up_open_directories
from stillframe._save.outcome import take_uncollected_failures

log = logging.getLogger("stillframe")

# The priority of the finalizer; higher ones run first. The drain runs before the finalizers of
# multiprocessing's queues (10) and pools (15), which callbacks of the last saves may still use.
_PRIORITY = 100
_QUIET_S = 1.0  # nothing is printed about a shorter wait
_CANCEL_S = 5.0  # the longest wait for cancelled saves


def _announce_wait() -> None:
    """Print what is waited for, unless the log is empty within a second."""
    if _core.log_drain(_QUIET_S):
        return
    handles = [handle for handle in list(completion.in_flight.values()) if not handle.done()]
    if handles:
        names = ", ".join(handle.path for handle in handles)
        _print_line(f"stillframe: waiting for {names} to reach the disk")
    else:
        _print_line("stillframe: waiting for checkpoints to be removed")


def _wait_until_log_is_empty() -> None:
    """Wait until the log is empty; print a line if a file system does not answer."""
    announced = False
    while not _core.log_drain(_QUIET_S):
        if announced:
            continue
        sentence = _core.log_unanswered()
        if sentence:
            announced = True
            _print_line(f"stillframe: {sentence}; Ctrl-C twice leaves it")


def _print_interrupt_hint() -> None:
    """Print what a second Ctrl-C will do."""
    if _core.log_pending() or uploads.left() is None:
        _print_line("stillframe: still writing; Ctrl-C again gives up and leaves the old files")
    else:
        _print_line("stillframe: still uploading; Ctrl-C again leaves the rest to the next run")


def _give_up() -> bool:
    """Cancel all saves and uploads. Return False if a save does not end in time."""
    for handle in list(completion.in_flight.values()):
        handle.cancel()
    uploads.give_up()
    _print_line("stillframe: given up")
    if _core.log_drain(_CANCEL_S):
        return True
    _print_line(
        f"stillframe: left as it is: {_core.log_unanswered() or describe_unfinished_saves()}"
    )
    return False


def _drain(*, threads_go_on: bool = False) -> None:
    """Wait until saves in flight have finished, and print what is waited for.

    The first Ctrl-C prints a line. The second one gives up the rest. Each later one skips the step
    that it interrupts. An error of a step is logged, and the next step runs.

    Args:
        threads_go_on: The program's threads run on after the drain, and may save.
    """
    interrupts = 1 if _was_interrupted() else 0
    # These steps run even if the others are given up.
    final_steps: list[Callable[[], object]] = [
        end_trace_at_exit,
        settle_ended_saves,
        _print_uncollected_errors,
    ]
    steps: list[Callable[[], object]] = [
        lambda: completion.thread.begin_exit(threads_go_on=threads_go_on),
        _announce_wait,
        _wait_until_log_is_empty,
        settle_ended_saves,
        completion.callbacks.finish,
        _wait_until_log_is_empty,  # for saves made by callbacks
        lambda: uploads.finish(_QUIET_S, _print_line),
        _wait_until_log_is_empty,  # for removes that waited for uploads
        # Threads that go on may still need their directories and the engine.
        *([] if threads_go_on else [give_up_open_directories, close_default_engine]),
        _core.log_stop,
        completion.thread.stop,
        # For saves that a thread submitted just before the stop. Later saves wait in their call.
        _wait_until_log_is_empty,
        *final_steps,
    ]

    def give_up() -> None:
        all_saves_have_ended = _give_up()
        if not all_saves_have_ended:
            # Skip the steps that would wait for the save. steps[0] is this function itself.
            steps[1:] = final_steps

    while steps:  # a step is removed when it is done, so an interrupted one runs again
        try:
            steps[0]()
            del steps[0]
        except KeyboardInterrupt:
            interrupts += 1
            if interrupts > 2:
                del steps[0]  # skip the interrupted step
            else:
                steps.insert(0, give_up if interrupts == 2 else _print_interrupt_hint)
        except Exception:
            log.exception("stillframe: the end of the process went wrong")
            del steps[0]


def _was_interrupted() -> bool:
    """Return whether Ctrl-C has ended the program."""
    printed = getattr(sys, "last_value", None)  # the exception that the interpreter has printed
    current = sys.exc_info()[1]
    return isinstance(printed, KeyboardInterrupt) or isinstance(current, KeyboardInterrupt)


def _drain_in_child() -> None:
    _drain(threads_go_on=True)


def _register_drain_in_child(_: object = None) -> None:
    """Have this child of multiprocessing drain when its target has returned or raised."""
    util.Finalize(None, _drain_in_child, exitpriority=_PRIORITY)


def _register_drain_if_child() -> None:
    """Have this process drain if it is a child of multiprocessing, or was forked by one."""
    if process.parent_process() is not None:
        _register_drain_in_child()


def _print_uncollected_errors() -> None:
    """Print the errors that nobody has collected and that were not logged."""
    for failure in take_uncollected_failures(first_only=False):
        if not failure.logged:
            _print_line(f"stillframe: a save failed: {failure.error}")


def _print_line(sentence: str) -> None:
    if sys.stderr is not None:
        print(sentence, file=sys.stderr, flush=True)


def install() -> None:
    """Register the drain. The import of the package calls this once."""
    atexit.register(_drain)
    # At the start of each child, multiprocessing calls the second function with the first.
    util.register_after_fork(_drain_in_child, _register_drain_in_child)
    _register_drain_if_child()  # the first import may be in such a child
    os.register_at_fork(after_in_child=_register_drain_if_child)
