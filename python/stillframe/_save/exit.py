"""The end of the process: saves in flight finish, and what failed is said.

The process's exit status stays what the program made it: Python lets no exit handler change it.
Who wants it to tell of a failed save ends with `stillframe.wait_all()`, which raises.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable

from stillframe import _core
from stillframe._base.trace import end_at_exit
from stillframe._save import completion
from stillframe._save.api import close_default, settle_all, under_way
from stillframe._save.outcome import take_failures

_QUIET_S = 1.0  # a wait shorter than that is not worth a line
_GIVEN_UP_S = 5.0  # in which what is cancelled ends, if its file system answers


def _announce_wait() -> None:
    if _core.log_drain(_QUIET_S):
        return
    handles = [handle for handle in list(completion.in_flight.values()) if not handle.done()]
    if handles:
        names = ", ".join(handle.path for handle in handles)
        _say(f"stillframe: waiting for {names} to reach the disk")
    else:
        _say("stillframe: waiting for checkpoints to be removed")


def _wait_for_log() -> None:
    told = False
    while not _core.log_drain(_QUIET_S):
        if not told and (sentence := _core.log_unanswered()):
            told = True
            _say(f"stillframe: {sentence}; Ctrl-C twice leaves it")


def _warn_once() -> None:
    _say("stillframe: still writing; Ctrl-C again gives up and leaves the old files")


def _give_up() -> bool:
    """False where something does not end all the same."""
    for handle in list(completion.in_flight.values()):
        handle.cancel()
    _say("stillframe: given up")
    if _core.log_drain(_GIVEN_UP_S):
        return True
    _say(f"stillframe: left as it is: {_core.log_unanswered() or under_way()}")
    return False


def _drain() -> None:
    """Saves in flight finish. Says what is waited for; a second Ctrl-C gives the rest up, and goes
    without what cannot be given up, each later one without what it interrupts."""
    interrupts = 1 if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt) else 0
    steps: list[Callable[[], object]] = [
        completion.completion.begin_exit,
        _announce_wait,
        _wait_for_log,
        settle_all,
        completion.callbacks.finish,
        _wait_for_log,  # what the callbacks saved
        close_default,
        _core.log_stop,
        completion.completion.stop,
        *(last := [end_at_exit, settle_all, _say_what_failed]),  # saves are still in the timeline
    ]

    def give_up() -> None:
        if not _give_up():
            steps[1:] = last  # to close the engine, or to stop a thread, would wait for it

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


def _say_what_failed() -> None:
    for failure in take_failures(first_only=False):
        if not failure.logged:
            _say(f"stillframe: a save failed: {failure.error}")


def _say(sentence: str) -> None:
    if sys.stderr is not None:
        print(sentence, file=sys.stderr, flush=True)


def install() -> None:
    """Once, when the package is imported."""
    atexit.register(_drain)
