"""`stillframe verify PATH...`: check whether checkpoints are whole.

A torch.save file is whole if its structure is whole, every record matches its CRC, and every record
that the pickle names is there. Nothing in the pickle is imported or called. The safetensors format
has no checksums, so only its structure is checked. `stillframe._check` makes the checks; this
module shows the results.

Exit status; of several paths the largest counts:

    0   every checkpoint is whole
    1   damaged: truncated, empty, wrong bytes
    2   missing, no permission, no checkpoint, a directory without checkpoints, bad usage
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence

from stillframe._base import urls
from stillframe._base.bar import bar, folded, is_stderr_terminal, printable
from stillframe._base.disk import LOCAL, Disk
from stillframe._base.sizes import decimal
from stillframe._check import files
from stillframe._check.files import DAMAGED, GOOD, UNUSABLE, Finding, Progress, reason_of
from stillframe._check.kinds import checkpoints_in
from stillframe._remote import disk as disks
from stillframe._shell import contents
from stillframe.errors import StillframeError

_LONG_NBYTES = 256 << 20  # files from this size on get a progress bar
_NOTHING = "there is no checkpoint in this directory"
_MAX_SHOWN = 8  # bad records of one file that are shown; --json has all


def verify_file(path: str, disk: Disk = LOCAL, progress: Progress | None = None) -> Finding:
    return files.check(path, disk, progress=progress, bound=contents.bounded)


def verify_paths(arguments: Sequence[str], display: _Display) -> list[Finding]:
    """Check files, and the checkpoints in directories, in the order given, and show each result."""
    findings: list[Finding] = []
    for argument in arguments:
        path = urls.shown(argument)
        try:
            disk, path = disks.resolve_disk_and_path(argument)
            with disk:
                for finding in _verify(path, disk, display):
                    findings.append(finding)  # one by one: an error may follow
        except (OSError, ValueError, StillframeError) as error:
            findings.append(display.show(Finding(path, UNUSABLE, reason_of(error))))
    return findings


def _verify(argument: str, disk: Disk, display: _Display) -> Iterator[Finding]:
    """Check a file, or the checkpoints under a directory. Show and yield each result."""
    if not disk.is_directory(argument):
        yield display.verify(argument, disk)
        return
    failures: list[OSError] = []
    has_checkpoint = False
    for path in checkpoints_in(argument, failures, disk):
        yield display.verify(path, disk)
        has_checkpoint = True
    for error in failures:
        path = str(error.filename or argument)
        yield display.show(Finding(path, UNUSABLE, reason_of(error)))
    if not has_checkpoint and not failures:
        yield display.show(Finding(argument, UNUSABLE, _NOTHING))


# ---- showing --------------------------------------------------------------------------------


class _Display:
    """Shows the result of each file (unless `quiet`), and a progress bar for a long file if stderr
    is a terminal."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._on_terminal = is_stderr_terminal()

    def verify(self, path: str, disk: Disk) -> Finding:
        """Check one file, show the result and return it."""
        try:
            nbytes = disk.nbytes(path)
        except (OSError, ValueError):
            nbytes = 0
        if nbytes < _LONG_NBYTES or not self._on_terminal:  # without a progress bar
            return self.show(verify_file(path, disk))
        with bar(path, nbytes) as progress:
            finding = verify_file(path, disk, progress)
        return self.show(finding)

    def show(self, finding: Finding) -> Finding:
        """Print a finding, unless `quiet`, and return it."""
        if not self._quiet:
            _print_finding(finding)
        return finding


def _describe_finding(finding: Finding) -> str:
    """Return the result in words: a line, and a line for each bad record."""
    if finding.ok:
        return "ok"
    is_damaged = finding.status == DAMAGED
    if not is_damaged or not finding.bad_records:
        word = "damaged: " if is_damaged else ""
        return printable(f"{word}{finding.error}")
    shown = [printable(f"{name}: {why}") for name, why in finding.bad_records[:_MAX_SHOWN]]
    rest = finding.num_bad - len(shown)
    lines = [f"damaged: {_records(finding.num_bad)}", *shown]
    if rest > 0:
        lines.append(f"and {rest} more")
    return "\n".join(lines)


def _format_finding_lines(finding: Finding) -> list[str]:
    """Return a line about a path, and a line for each bad record."""
    first, *rest = _describe_finding(finding).split("\n")
    notes = [] if finding.nbytes is None else [decimal(finding.nbytes)]
    if finding.num_records:
        notes.append(_records(finding.num_records))
    if finding.ok:
        notes += _notes_on_unchecked(finding)
    size = f" ({', '.join(notes)})" if notes else ""
    return [f"{printable(finding.path)}: {first}{size}", *rest]


def _notes_on_unchecked(finding: Finding) -> list[str]:
    """Return notes on the parts of a whole checkpoint that were not checked."""
    notes = []
    if without := finding.num_unchecked - finding.num_compressed:
        notes.append(f"{_records(without)} without a checksum")
    if finding.format == "safetensors":
        notes.append("safetensors has none: the structure is good, the bytes are unchecked")
    if finding.num_compressed:
        notes.append(f"{_records(finding.num_compressed)} compressed, bytes not checked")
    if finding.num_trailing:
        notes.append(f"{finding.num_trailing} bytes after the archive, not checked")
    if finding.format == "legacy":
        notes.append("torch's legacy format, which has no checksums")
    return notes


def _records(number: int) -> str:
    return f"{number} record{'' if number == 1 else 's'}"


def _format_summary_line(findings: Sequence[Finding]) -> str:
    """Return the last line of the output, which counts the results."""
    counts = []
    for status, word in ((GOOD, "ok"), (DAMAGED, "damaged"), (UNUSABLE, "not checked")):
        number = len([each for each in findings if each.status == status])
        if number:
            counts.append(f"{number} {word}")
    nbytes = sum(each.nbytes or 0 for each in findings)
    return f"{len(findings)} paths, {decimal(nbytes)}: {', '.join(counts)}"


def _print_finding(finding: Finding) -> None:
    """Print a finding at once, so that a long list can be read while it grows."""
    first, *rest = _format_finding_lines(finding)
    if not sys.stdout.isatty():
        print("\n".join([first, *(f"    {line}" for line in rest)]), flush=True)
        return
    width = shutil.get_terminal_size().columns
    lines = folded(first, width)
    for line in rest:
        lines += folded(f"    {line}", width, indent=" " * 8)
    colour = "32" if finding.ok else "31"
    if os.environ.get("TERM") != "dumb" and "NO_COLOR" not in os.environ:
        lines = [f"\x1b[{colour}m{line}\x1b[m" for line in lines]
    print("\n".join(lines), flush=True)


def run(options: argparse.Namespace) -> int:
    display = _Display(quiet=options.json)
    findings = verify_paths(options.paths, display)
    if options.json:
        print(json.dumps([finding.as_json() for finding in findings], indent=2))
    elif len(findings) > 1:
        print(_format_summary_line(findings))
    return max(finding.status for finding in findings)
