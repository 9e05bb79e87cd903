"""Saves that have to be durable by a given moment, because the process is killed soon after it.

The time of a save is estimated from the process's last saves. If there is not enough time for all,
the newest save is chosen first, and then the older saves that fit. The other saves are given up:
their old files stay, and a line in the log says why. A save without an estimate is tried.

An integration calls `finish` where its framework ends after a signal. Moments are those of
`time.monotonic()`.
"""

from __future__ import annotations

import logging
import numbers
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError

from stillframe import _core
from stillframe._base import sizes
from stillframe._base.calls import inside_call
from stillframe._save import completion, uploads
from stillframe._save.api import engine_or_default, settle_ended_saves
from stillframe._save.completion import InFlightHandle
from stillframe._save.engine import Path, submit
from stillframe._save.options import SaveOptions
from stillframe._save.report import SaveReport, measured
from stillframe._tree import skeleton

log = logging.getLogger("stillframe")

# Saves that were given up, and may not have ended yet.
_given_up: weakref.WeakSet[InFlightHandle] = weakref.WeakSet()
# A measured save gives an estimate for saves that are at most this many times as large.
_MAX_SCALE = 4


def save(make_state: Callable[[], object], path: Path, until: float) -> SaveReport | None:
    """Save the object that `make_state` returns, and wait for the save until the moment `until`.
    Return None if the save was given up or has failed: the log says why, and the old file stays.
    """
    try:
        state = make_state()
        under_way = _saves_under_way()
        if under_way:
            tree = skeleton.build(state)  # to learn how many bytes the save writes
            nbytes = len(tree.data) + sum(each.nbytes() for each in tree.storages)
            del tree
            has_time = _give_up_saves_without_time(under_way, until, new=(str(path), nbytes))
            if not has_time:
                return None
        options = SaveOptions(overlap=False, wait_for_slot=True)
        handle = submit(engine_or_default(None), state, path, options)
        try:
            report: SaveReport = handle.result(max(0.0, until - time.monotonic()))
            return report
        except TimeoutError:
            _give_up(handle, _too_late_reason(handle))
    except CancelledError:
        pass  # the thread that cancelled the save has logged why
    except Exception as error:
        log.error("stillframe: %s was not saved: %s", path, error, exc_info=error)
    return None


def finish(until: float) -> None:
    """Wait for all saves and removes under way. At the moment `until`, give up the saves that have
    not ended. The exit of the process waits for uploads until then, too."""
    uploads.set_exit_deadline(until)
    with inside_call():
        _give_up_saves_without_time(_saves_under_way(), until)
        if not _core.log_drain(max(0.0, until - time.monotonic())):  # not all have ended
            give_up()
        settle_ended_saves()


def give_up() -> bool:
    """Give up the saves under way, because time is up. Return False if there were none."""
    under_way = _saves_under_way()
    for handle in under_way:
        _give_up(handle, _too_late_reason(handle))
    return bool(under_way)


def is_given_up(handle: object) -> bool:
    """Return whether a save was given up, and so has a line in the log."""
    return handle in _given_up


def checked_deadline(deadline: object) -> float:
    """Return a deadline in seconds. Raise TypeError or ValueError if it is no positive number."""
    if isinstance(deadline, bool) or not isinstance(deadline, numbers.Real):
        raise TypeError(f"deadline has to be a number of seconds, not {deadline!r}")
    most_s = float(deadline)
    if not 0 < most_s < threading.TIMEOUT_MAX:
        raise ValueError(f"deadline has to be a positive number of seconds, not {deadline!r}")
    return most_s


def chosen(needs_s: Sequence[float], left_s: float) -> list[bool]:
    """Return for each save whether to finish it, in `left_s` seconds for all. If none fits, choose
    the shortest. `needs_s`: the seconds for each save, the newest save first."""
    kept = []
    spent_s = 0.0
    for need_s in needs_s:
        fits = spent_s + need_s <= left_s
        kept.append(fits)
        if fits:
            spent_s += need_s
    if kept and not any(kept):
        shortest = needs_s.index(min(needs_s))
        kept[shortest] = True
    return kept


def estimate_save_seconds(nbytes: int) -> float | None:
    """Return how many seconds a save of `nbytes` probably takes; None without an estimate."""
    durations = []
    for size, took_s in measured:
        if size * _MAX_SCALE >= nbytes:
            scale = max(1.0, nbytes / size)
            durations.append(took_s * scale)
    return statistics.median(durations) if durations else None


def _saves_under_way() -> list[InFlightHandle]:
    """Return the saves that have neither ended nor been given up, oldest first."""
    return [
        handle
        for handle in list(completion.in_flight.values())
        if not handle.done() and handle not in _given_up
    ]


def _give_up_saves_without_time(
    under_way: list[InFlightHandle], until: float, new: tuple[str, int] | None = None
) -> bool:
    """Give up the saves for which there is not enough time until the moment `until`. Return whether
    there is time for the new save, if any.

    Args:
        under_way: The saves under way, oldest first.
        new: The path and the bytes of a save that is about to be made.
    """
    left_s = until - time.monotonic()
    # Newest first: a save, or the path of the new save, and the bytes that are still to be written.
    candidates: list[tuple[InFlightHandle | str, int]] = [] if new is None else [new]
    for handle in reversed(under_way):
        written, total = handle.progress()
        candidates.append((handle, total - written))
    # A save without an estimate is tried: it counts as 0 seconds.
    needs_s = [estimate_save_seconds(nbytes) or 0.0 for _, nbytes in candidates]
    kept = chosen(needs_s, left_s)
    for (save_or_path, nbytes), need_s, keep in zip(candidates, needs_s, kept, strict=True):
        if not keep:
            why = (
                f"{sizes.decimal(nbytes)} need about {need_s:.2g} s,"
                f" and {max(0.0, left_s):.2g} s are left for everything"
            )
            _give_up(save_or_path, why)
    return new is None or kept[0]  # the new save is the first candidate


def _too_late_reason(handle: InFlightHandle) -> str:
    """Return the reason for giving up a save when time is up."""
    written, total = handle.progress()
    return f"{sizes.decimal(written)} of {sizes.decimal(total)} were written when time was up"


def _give_up(save: InFlightHandle | str, why: str) -> None:
    """Cancel a save and log why. A string is the path of a save that is not made at all."""
    if isinstance(save, str):
        path = save
    else:
        path = save.path
        _given_up.add(save)
        if not save.cancel():
            if not save.done():  # the rename has begun, or the writing code cannot be stopped
                log.warning("stillframe: %s was not durable when time was up: %s", path, why)
            return
    log.warning("stillframe: %s is given up, and the old file stays: %s", path, why)
