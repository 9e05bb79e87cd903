"""The newest whole checkpoint in a directory.

Candidates are checked from the newest on, until one is whole. These rules give their order:

    1. Names that differ only in a step, in an epoch, or in their only number are one series. In a
       series the highest number is the newest, whatever the times are.
    2. Between series, such as last.ckpt and epoch=1-step=200.ckpt, the modification times of their
       newest members decide.

Candidates are directly in the directory:

    file         has a checkpoint's name, or begins like a checkpoint
    directory    is of a kind in kinds.py; or has a number in its name and checkpoints in it, and in
                 a store also the marker

Hidden names, parts of checkpoints, and symbolic links to a name in the same directory are not
candidates. If the directory itself is a checkpoint of some kind, it is the only candidate.
"""

from __future__ import annotations

import errno
import heapq
import logging
import os
import re
from collections.abc import Callable, Iterator

from stillframe._base.bar import printable
from stillframe._base.disk import LOCAL, Disk
from stillframe._base.file_kinds import MARKER
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
    incomplete: Callable[[str, list[str], Disk], str | None] = kinds.incomplete,
    disk: Disk = LOCAL,
) -> str | None:
    """Return the path of the newest whole checkpoint, or None. For each checkpoint that is passed
    over, log the reason.

    Args:
        thorough: Compare every CRC.
        bound: Limits the memory for each pickle that is read.
        incomplete: Called with a directory, the names in it and the disk; returns a sentence about
            what the directory lacks, or None.

    Raises:
        OSError: The directory cannot be listed, or the store does not answer.
    """
    if kinds.checkpoint_kind_of(directory, disk.names(directory)) is not None:
        candidates = iter([directory])
    else:
        candidates = _iter_candidates_newest_first(directory, disk)
    for path in candidates:
        try:
            problem = _why_not_whole(path, thorough, bound, incomplete, disk)
        except _NoCheckpointError:
            continue
        if problem is None:
            return path
        _logger.warning("stillframe: %s is passed over: %s", printable(path), printable(problem))
    return None


# ---- the order ----------------------------------------------------------------------------


def split_series_and_number(name: str) -> tuple[str, int]:
    """Return the series of a name (the name with "#" in place of numbers), and the name's number. A
    name without a number, or with several unlabelled ones, is a series of its own: its number is 0.
    """
    labelled: dict[str, int] = {}  # the first number with each label, by the label's first letter

    def replace_number(match: re.Match[str]) -> str:
        if match["label"] is not None:
            labelled.setdefault(match["label"][0].lower(), int(match["number"]))
        return "#"

    series = _LABELLED.sub(replace_number, name)
    for label in "sie":  # step, iteration, epoch
        if label in labelled:
            return series, labelled[label]
    numbers = re.findall(r"\d+", name)
    if len(numbers) != 1:
        return name, 0
    return re.sub(r"\d+", "#", name), int(numbers[0])


def _iter_candidates_newest_first(directory: str, disk: Disk = LOCAL) -> Iterator[str]:
    """Yield the paths of files and directories that may be checkpoints, newest first."""
    by_series: dict[str, list[tuple[int, str]]] = {}
    for name in disk.names_without_local_links(directory):
        if name.startswith(".") or kinds.PART_NAME.fullmatch(name):
            continue
        series, number = split_series_and_number(name)
        by_series.setdefault(series, []).append((number, name))
    # An entry for each series: (the newest member's time, negative so that the newest series is
    # popped first; this member's path; the members that are left).
    heap: list[tuple[float, str, list[tuple[int, str]]]] = []

    def push(members: list[tuple[int, str]]) -> None:
        _, newest = members[-1]
        path = os.path.join(directory, newest)
        time = disk.modified_s(path) if len(by_series) > 1 else 0.0  # only to compare series
        heapq.heappush(heap, (-time, path, members))

    for members in by_series.values():
        members.sort()  # the newest last
        push(members)
    while heap:
        _, path, members = heapq.heappop(heap)
        members.pop()
        yield path
        if members:
            push(members)


# ---- one candidate ------------------------------------------------------------------------


class _NoCheckpointError(Exception):
    """The candidate is no checkpoint, or does not exist any more."""


def _why_not_whole(
    path: str,
    thorough: bool,
    bound: Bound,
    incomplete: Callable[[str, list[str], Disk], str | None],
    disk: Disk,
) -> str | None:
    """Return why a candidate is not whole, or None.

    Raises:
        _NoCheckpointError: The candidate is no checkpoint, or does not exist any more.
        OSError: The store does not answer. Then no older checkpoint may be returned instead.
    """
    failures: list[OSError] = []
    try:
        if not disk.is_directory(path):
            return _why_file_is_bad(path, thorough, bound, disk)
        names = disk.names(path)
        if kinds.checkpoint_kind_of(path, names) is None:
            if not _is_numbered_checkpoint_directory(path, names, disk):
                raise _NoCheckpointError
            if disk.is_remote and MARKER not in names:
                return f"it has no {MARKER}, which is written last"
        problem = incomplete(path, names, disk)
        if problem is not None:
            return problem
        parts = list(kinds.checkpoints_in(path, failures, disk, is_complete=True))
    except FileNotFoundError:
        raise _NoCheckpointError from None
    except OSError as error:
        if disk.is_remote:
            raise  # the store does not answer, so the checkpoint may be whole
        return files.reason_of(error)
    if failures and disk.is_remote:
        raise failures[0]
    if failures:
        return f"{failures[0].filename}: {files.reason_of(failures[0])}"
    for part in parts:
        found = _check(part, thorough, bound, disk)
        if not found.ok:
            where = "" if part == path else f"{os.path.relpath(part, path)}: "
            return f"{where}{found.reason}"
    return None


def _why_file_is_bad(path: str, thorough: bool, bound: Bound, disk: Disk) -> str | None:
    """Return the result of `_why_not_whole` for a candidate that is a file."""
    is_there = disk.exists(path) or os.path.islink(path)  # also a link to a missing file
    if not is_there or not kinds.is_checkpoint(path, disk):
        raise _NoCheckpointError
    found = _check(path, thorough, bound, disk)
    return None if found.ok else found.reason


def _check(path: str, thorough: bool, bound: Bound, disk: Disk) -> files.Finding:
    """Check one path; check it again if a save has replaced it meanwhile. Raise an error only if
    the store does not answer."""
    found = files.check(path, disk, thorough=thorough, bound=bound)
    # A store reports ESTALE if the object was replaced after its size was looked up.
    if isinstance(found.cause, OSError) and found.cause.errno == errno.ESTALE:
        disk.forget(path)
        found = files.check(path, disk, thorough=thorough, bound=bound)
    is_gone = isinstance(found.cause, FileNotFoundError)
    if disk.is_remote and found.cause is not None and not is_gone:
        raise found.cause
    return found


def _is_numbered_checkpoint_directory(path: str, names: list[str], disk: Disk) -> bool:
    """Return whether a directory without a kind (`kinds.checkpoint_kind_of`) counts as a
    checkpoint: it has a number in its name, and checkpoints in it."""
    if re.search(r"\d", os.path.basename(path)) is None:
        return False
    visible = [name for name in names if not name.startswith(".")]
    return any(kinds.is_checkpoint(os.path.join(path, name), disk) for name in visible)
