"""The end of the process: saves in flight finish, and errors that nobody collected are printed.

The process's exit status is not changed, because Python lets no exit handler change it. A program
that ends with `stillframe.wait_all()` fails if a save failed.

Children of multiprocessing (started by fork or forkserver) end by `os._exit` and run no exit
handlers. But multiprocessing runs its own finalizers in every child, so the drain is one of them
there. A spawned child runs both, and the second finds nothing to do. The main process has only the
exit handler.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable
from multiprocessing import process, util

from stillframe import _core
from stillframe._base.trace import end_at_exit
from stillframe._save import completion, uploads
from stillframe._save.api import close_default, settle_all, under_way
from stillframe._save.directory import give_up_open_directories
from stillframe._save.outcome import take_failures

log = logging.getLogger("stillframe")

# Higher than multiprocessing's own queues (10) and pools (15), because callbacks of the last saves
# may still use these.
_PRIORITY = 100
_QUIET_S = 1.0  # a shorter wait is not announced
_GIVEN_UP_S = 5.0  # enough for cancelled saves to end, if the file system answers


def _announce_wait() -> None:
    if _core.log_drain(_QUIET_S):
        return
    handles = [handle for handle in list(completion.in_flight.values()) if not handle.done()]
    if handles:
        names = ", ".join(handle.path for handle in handles)
        _print_line(f"stillframe: waiting for {names} to reach the disk")
    else:
        _print_line("stillframe: waiting for checkpoints to be removed")


def _wait_for_log() -> None:
    announced = False
    while not _core.log_drain(_QUIET_S):
        if not announced and (sentence := _core.log_unanswered()):
            announced = True
            _print_line(f"stillframe: {sentence}; Ctrl-C twice leaves it")


def _warn_once() -> None:
    if _core.log_pending() or uploads.left() is None:
        _print_line("stillframe: still writing; Ctrl-C again gives up and leaves the old files")
    else:
        _print_line("stillframe: still uploading; Ctrl-C again leaves the rest to the next run")


def _give_up() -> bool:
    """Cancel all saves; return False if something does not end nevertheless."""
    for handle in list(completion.in_flight.values()):
        handle.cancel()
    uploads.give_up()
    _print_line("stillframe: given up")
    if _core.log_drain(_GIVEN_UP_S):
        return True
    _print_line(f"stillframe: left as it is: {_core.log_unanswered() or under_way()}")
    return False


def _drain(*, threads_go_on: bool = False) -> None:
    """Wait until saves in flight have finished, and print what is waited for.

    A second Ctrl-C gives up the rest. Each later one leaves the step that it interrupts. A step
    that raises is logged, and the next one runs.

    Args:
        threads_go_on: The program's threads run on after the drain, and may save.
    """
    interrupts = 1 if _interrupted() else 0
    steps: list[Callable[[], object]] = [
        lambda: completion.completion.begin_exit(threads_go_on=threads_go_on),
        _announce_wait,
        _wait_for_log,
        settle_all,
        completion.callbacks.finish,
        _wait_for_log,  # saves made by callbacks
        lambda: uploads.finish(_QUIET_S, _print_line),
        _wait_for_log,  # removes that waited for uploads
        *([] if threads_go_on else [give_up_open_directories, close_default]),
        _core.log_stop,
        completion.completion.stop,
        _wait_for_log,  # saves a thread submitted just before; later ones wait in their call
        *(last := [end_at_exit, settle_all, _say_what_failed]),  # the trace first: it shows saves
    ]

    def give_up() -> None:
        if not _give_up():
            steps[1:] = last  # closing the engine or stopping a thread would wait for that save

    while steps:
        try:
            steps[0]()
            del steps[0]
        except KeyboardInterrupt:
            interrupts += 1
            if interrupts > 2:
                del steps[0]
            else:
                steps.insert(0, give_up if interrupts == 2 else _warn_once)
        except Exception:
            log.exception("stillframe: the end of the process went wrong")
            del steps[0]


def _interrupted() -> bool:
    """Return whether the program is ending because of Ctrl-C."""
    return isinstance(getattr(sys, "last_value", None), KeyboardInterrupt) or isinstance(
        sys.exc_info()[1], KeyboardInterrupt
    )


def _drain_child() -> None:
    _drain(threads_go_on=True)


def _finish_child(_: object = None) -> None:
    """Make this child of multiprocessing drain when its work has returned or raised."""
    util.Finalize(None, _drain_child, exitpriority=_PRIORITY)


def _finish_inner_child() -> None:
    """Do the same where a child of multiprocessing calls os.fork: it may end by `os._exit` too."""
    if process.parent_process() is not None:
        _finish_child()


def _say_what_failed() -> None:
    for failure in take_failures(first_only=False):
        if not failure.logged:
            _print_line(f"stillframe: a save failed: {failure.error}")


def _print_line(sentence: str) -> None:
    if sys.stderr is not None:
        print(sentence, file=sys.stderr, flush=True)


def install() -> None:
    """Register the drain; called once, when the package is imported."""
    atexit.register(_drain)
    util.register_after_fork(_drain_child, _finish_child)  # by every start method, in each child
    _finish_inner_child()  # imported by the work of a child
    os.register_at_fork(after_in_child=_finish_inner_child)
