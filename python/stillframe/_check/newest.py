"""The newest whole checkpoint in a directory.

Candidates are looked at from the newest on, until one is whole, so usually only one is opened.
"Newer" means, in this order:

    1. Names that differ only in a step, an epoch or their one number are one series. In a series
       the highest number is the newest (the step before the epoch), whatever the times are.
    2. Between series, such as last.ckpt beside epoch=1-step=200.ckpt, the modification time
       decides about the newest of each.

A candidate is a file or directory directly in the directory:

    file         with a checkpoint's name, or that begins like one
    directory    of a kind of kinds.py; or with a number in its name and checkpoints in it

Hidden names (temporaries are among them) and parts of Hugging Face checkpoints are no candidates.
Links to a neighbour are none either, since that is one itself. A directory that is a checkpoint of
some kind itself is the only candidate.
"""

from __future__ import annotations

import heapq
import logging
import os
import re
from collections.abc import Callable, Iterator

from stillframe._base.bar import printable
from stillframe._check import files, kinds
from stillframe._check.pickles import Bound, unbounded

_logger = logging.getLogger("stillframe")

_LABELLED = re.compile(
    r"(?P<label>step|iter(?:ation)?|epoch)s?[=_-]?(?P<number>\d+)(?!\d|\.\d)"
    r"|=-?\d+(?:\.\d+)?(?:e-?\d+)?",  # a metric, as Lightning writes it
    re.IGNORECASE,
)


def find(
    directory: str,
    *,
    thorough: bool = False,
    bound: Bound = unbounded,
    incomplete: Callable[[str, list[str]], str | None] = kinds.incomplete,
) -> str | None:
    """Return the path of the newest whole checkpoint, or None. Each one that is passed over is
    logged with the reason.

    Args:
        thorough: Compare every CRC.
        incomplete: Called with a directory and the names in it; returns what it lacks, or None.

    Raises:
        OSError: The directory cannot be listed.
    """
    if kinds.kind_of(directory, os.listdir(directory)) is not None:
        candidates = iter([directory])
    else:
        candidates = _newest_first(directory)
    for path in candidates:
        try:
            wrong = _wrong(path, thorough, bound, incomplete)
        except _NoCheckpointError:
            continue
        if wrong is None:
            return path
        _logger.warning("stillframe: %s is passed over: %s", printable(path), printable(wrong))
    return None


# ---- the order ----------------------------------------------------------------------------


def series_of(name: str) -> tuple[str, int]:
    """Return a name without its number, and the number: names of one series differ only in it.

    A name without one, or with several that nothing tells apart, is a series of its own.
    """
    labelled: dict[str, int] = {}

    def hide(match: re.Match[str]) -> str:
        if match["label"] is not None:
            labelled.setdefault(match["label"][0].lower(), int(match["number"]))
        return "#"

    series = _LABELLED.sub(hide, name)
    for label in "sie":  # step, iteration, epoch
        if label in labelled:
            return series, labelled[label]
    numbers = re.findall(r"\d+", name)
    return (re.sub(r"\d+", "#", name), int(numbers[0])) if len(numbers) == 1 else (name, 0)


def _newest_first(directory: str) -> Iterator[str]:
    """Iterate over the paths of files and directories that may be checkpoints."""
    by_series: dict[str, list[tuple[int, str]]] = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            name = entry.name
            if name.startswith(".") or kinds.PART_NAME.fullmatch(name):
                continue
            if entry.is_symlink() and os.path.dirname(os.readlink(entry.path)) in ("", "."):
                continue
            series, number = series_of(name)
            by_series.setdefault(series, []).append((number, name))
    waiting: list[tuple[float, str, list[tuple[int, str]]]] = []

    def enter(series: list[tuple[int, str]]) -> None:
        """Enter a series with the time of its newest, which nobody asks for if it is alone."""
        path = os.path.join(directory, series[-1][1])
        time = _modified(path) if len(by_series) > 1 else 0.0
        heapq.heappush(waiting, (-time, path, series))

    for members in by_series.values():
        members.sort()
        enter(members)
    while waiting:
        _, path, rest = heapq.heappop(waiting)
        rest.pop()
        yield path
        if rest:
            enter(rest)


def _modified(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


# ---- one candidate ------------------------------------------------------------------------


class _NoCheckpointError(Exception):
    """The error of something that was never meant to be a checkpoint."""


def _wrong(
    path: str, thorough: bool, bound: Bound, incomplete: Callable[[str, list[str]], str | None]
) -> str | None:
    """Return why a candidate is not whole, or None.

    Raises:
        _NoCheckpointError: It is no checkpoint, or it is gone.
    """
    failures: list[OSError] = []
    try:
        if not os.path.isdir(path):
            return _wrong_file(path, thorough, bound)
        names = os.listdir(path)
        if kinds.kind_of(path, names) is None and not _is_checkpoint(path, names):
            raise _NoCheckpointError
        if (wrong := incomplete(path, names)) is not None:
            return wrong
        parts = list(kinds.checkpoints_in(path, failures, looked_at=True))
    except FileNotFoundError:
        raise _NoCheckpointError from None
    except OSError as error:
        return files.reason_of(error)
    if failures:
        return f"{failures[0].filename}: {files.reason_of(failures[0])}"
    for part in parts:
        if not (found := files.check(part, thorough=thorough, bound=bound)).ok:
            return (
                found.reason if part == path else f"{os.path.relpath(part, path)}: {found.reason}"
            )
    return None


def _wrong_file(path: str, thorough: bool, bound: Bound) -> str | None:
    if not os.path.lexists(path) or not kinds.is_checkpoint(path):
        raise _NoCheckpointError
    found = files.check(path, thorough=thorough, bound=bound)
    return None if found.ok else found.reason


def _is_checkpoint(path: str, names: list[str]) -> bool:
    """Return whether a directory of no kind is a checkpoint of several files: it has a number in
    its name, and checkpoints directly in it."""
    return re.search(r"\d", os.path.basename(path)) is not None and any(
        kinds.is_checkpoint(os.path.join(path, name)) for name in names if name[0] != "."
    )
