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
from stillframe._save.api import close_default, settle_all
from stillframe._save.outcome import take_failures

_QUIET_S = 1.0  # a wait shorter than that is not worth a line


def _announce_wait() -> None:
    if _core.log_drain(_QUIET_S):
        return
    handles = [handle for handle in list(completion.in_flight.values()) if not handle.done()]
    if handles:
        names = ", ".join(handle.path for handle in handles)
        _say(f"stillframe: waiting for {names} to reach the disk")
    else:
        _say("stillframe: waiting for checkpoints to be removed")


def _warn_once() -> None:
    _say("stillframe: still writing; Ctrl-C again gives up and leaves the old files")


def _give_up() -> None:
    for handle in list(completion.in_flight.values()):
        handle.cancel()
    _say("stillframe: given up")


def _drain() -> None:
    """Saves in flight finish. Says what is waited for; a second Ctrl-C gives the rest up."""
    interrupts = 1 if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt) else 0
    steps: list[Callable[[], object]] = [
        completion.completion.begin_exit,
        _announce_wait,
        lambda: _core.log_drain(None),
        settle_all,
        completion.callbacks.finish,
        lambda: _core.log_drain(None),  # what the callbacks saved
        close_default,
        _core.log_stop,
        completion.completion.stop,
        end_at_exit,  # saves that finish here are still in the timeline
        settle_all,
        _say_what_failed,
    ]
    while steps:
        try:
            steps[0]()
            del steps[0]
        except KeyboardInterrupt:
            interrupts += 1
            steps.insert(0, _give_up if interrupts > 1 else _warn_once)


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
