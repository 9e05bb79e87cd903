"""`stillframe verify PATH...`: whether checkpoints are whole.

A torch.save file is whole if its structure is, if every record matches its CRC, and if every record
that its pickle names is there. The pickle is only read: nothing in it is imported or called.

Exit status; of several paths the largest counts:

    0   every checkpoint is whole
    1   damaged: truncated, empty, wrong bytes
    2   missing, no permission, no PyTorch checkpoint, a directory without checkpoints, bad usage
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from stillframe import _core
from stillframe._base import file_kinds
from stillframe._base.bar import bar, folded, on_terminal, printable
from stillframe._base.sizes import decimal
from stillframe._shell import contents, safetensors
from stillframe.errors import CorruptCheckpointError

GOOD, DAMAGED, UNUSABLE = 0, 1, 2

# The names of checkpoints. Other programs have .bin files too, so these are listed in full.
_NAMES = re.compile(
    r".*\.(ckpt|pt|pth|safetensors|safetensors\.index\.json)"
    r"|(.*pytorch_model.*|adapter_model|training_args)\.bin"
)
_LONG_NBYTES = 256 << 20  # files from this size on get a progress display
_NOTHING = "there is no checkpoint in this directory"
_MAX_SHOWN = 8  # bad records of one file in the table; --json has all

Progress = Callable[[int, int], object]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of verify for one path."""

    path: str
    status: int
    error: str | None = None
    nbytes: int | None = None
    num_records: int = 0
    num_unchecked: int = 0
    num_compressed: int = 0  # among the unchecked
    num_behind: int = 0  # bytes after the archive's end
    num_bad: int = 0
    legacy: bool = False
    bad_records: list[tuple[str, str]] = field(default_factory=list)  # name, error

    @property
    def ok(self) -> bool:
        return self.status == GOOD

    def as_json(self) -> dict[str, object]:
        return {
            "path": self.path,
            "ok": self.ok,
            "error": self.error,
            "nbytes": self.nbytes,
            "num_records": self.num_records,
            "bad_records": [name for name, _ in self.bad_records],
        }


# ---- verify: one file ------------------------------------------------------------------


def verify_file(path: str, progress: Progress | None = None) -> Finding:
    """Check structure and every CRC of one file. Raise nothing but KeyboardInterrupt.

    Args:
        progress: Called now and then with the bytes done and the file's length.
    """
    try:
        # O_NONBLOCK: opening a pipe without a writer must not wait.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        return Finding(path, UNUSABLE, _reason(error))
    try:
        found = _core.check(fd, True, progress, True)  # bypassing the page cache
        reason = None if found["ok"] else file_kinds.no_checkpoint(fd, path, found)
        lacking = contents.lacking(fd) if found["ok"] else []
    except OSError as error:
        # The file exists and is readable, but its bytes are not: the disk has lost them.
        status = UNUSABLE if error.errno in (errno.EISDIR, errno.ENOMEM) else DAMAGED
        return Finding(path, status, _reason(error), _size(fd))
    except MemoryError:
        return Finding(path, UNUSABLE, "not enough memory to check it", _size(fd))
    finally:
        os.close(fd)
    bad = lacking or found["bad_records"]
    status = GOOD if found["ok"] and not bad else DAMAGED if reason is None else UNUSABLE
    return Finding(
        path,
        status,
        reason or found["error"],
        found["nbytes"],
        found["num_records"],
        found["num_unchecked"],
        num_compressed=found["num_compressed"],
        num_behind=found["num_behind"],
        num_bad=len(lacking) or found["num_bad"],
        legacy=found["format"] == "legacy",
        bad_records=bad,
    )


def verify_directory(path: str) -> Finding:
    """Check a checkpoint of torch.distributed.checkpoint.

    Every item is checked, and whether the files are those that its metadata names.
    """
    from stillframe._dcp import check

    try:
        found = check.check(path, contents.read)
    except CorruptCheckpointError as error:
        return Finding(path, DAMAGED, str(error))
    except MemoryError:
        return Finding(path, UNUSABLE, "not enough memory to check it")
    except OSError as error:
        return Finding(path, UNUSABLE, _reason(error))
    return Finding(
        path,
        DAMAGED if found.bad else GOOD,
        f"{len(found.bad)} of its {found.nr_items} items are bad" if found.bad else None,
        found.nbytes,
        found.nr_items,
        found.nr_unchecked,
        num_bad=len(found.bad),
        bad_records=found.bad,
    )


def verify_safetensors(path: str) -> Finding:
    """Check that a safetensors file, or an index of several, is whole: there are no checksums."""
    try:
        if path.endswith(safetensors.INDEX_SUFFIX):
            return Finding(path, GOOD, num_records=safetensors.check_index(path))
        nbytes, number = safetensors.check_file(path)
    except safetensors.Damaged as error:
        return Finding(path, DAMAGED, str(error))
    except OSError as error:
        return Finding(path, UNUSABLE, _reason(error))
    except MemoryError:
        return Finding(path, UNUSABLE, "not enough memory to check it")
    return Finding(path, GOOD, None, nbytes, number, num_unchecked=number)


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, PermissionError):
        return "no permission to read it"
    return getattr(error, "strerror", None) or str(error)


def _size(fd: int) -> int | None:
    try:
        return os.fstat(fd).st_size
    except OSError:
        return None


# ---- verify: which files ----------------------------------------------------------------


def checkpoints_in(directory: str, failures: list[OSError]) -> Iterator[str]:
    """Iterate over the paths of checkpoints under a directory, sorted.

    A file counts if it has a checkpoint's suffix, begins like a checkpoint, or has the name of a
    Hugging Face checkpoint. A directory counts if torch.distributed.checkpoint has saved to it.
    Hidden files are left out (temporaries of saves in flight are among them), and so are the shards
    in such directories.

    Args:
        failures: Gets an error for each directory that cannot be listed.
    """
    for root, directories, names in os.walk(directory, onerror=failures.append):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        if file_kinds.is_sharded(names):
            yield root
        for name in sorted(names):
            path = os.path.join(root, name)
            if name.startswith(".") or name.endswith(".distcp"):
                continue
            if _NAMES.fullmatch(name) or _begins_like_one(path):
                yield path


def _begins_like_one(path: str) -> bool:
    """Return whether a file begins like torch.save's archives, or like its legacy format."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return False
        head = os.pread(fd, 1024, 0)
    except OSError:
        return False
    finally:
        os.close(fd)
    if head.startswith(b"PK\3\4") and len(head) >= 30:
        name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
        return name.partition(b"/")[2] == b"data.pkl"
    return b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19." in head[:32]


def verify_paths(arguments: Sequence[str], show: _Display) -> list[Finding]:
    """Check files, and the checkpoints in directories, in the order given."""
    findings: list[Finding] = []
    for argument in arguments:
        if not os.path.isdir(argument):
            findings.append(show.verify(argument))
            continue
        failures: list[OSError] = []
        before = len(findings)
        findings.extend(
            show.verify(path, in_directory=True) for path in checkpoints_in(argument, failures)
        )
        findings.extend(
            show.found(Finding(str(error.filename or argument), UNUSABLE, _reason(error)))
            for error in failures
        )
        if len(findings) == before:
            findings.append(show.found(Finding(argument, UNUSABLE, _NOTHING)))
    return findings


# ---- showing --------------------------------------------------------------------------------


class _Display:
    """The output of verify: a result as each file is done, and the progress of a long one.

    Progress is shown only where stderr is a terminal.
    """

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._on_terminal = on_terminal()

    def verify(self, path: str, *, in_directory: bool = False) -> Finding:
        """Check one path. Given by itself, a safetensors file is not a PyTorch checkpoint."""
        if os.path.isdir(path):
            return self.found(verify_directory(path))
        if in_directory and path.endswith((safetensors.SUFFIX, safetensors.INDEX_SUFFIX)):
            return self.found(verify_safetensors(path))
        try:
            nbytes = os.stat(path).st_size
        except (OSError, ValueError):
            nbytes = 0
        if nbytes < _LONG_NBYTES or not self._on_terminal:
            return self.found(verify_file(path))
        with bar(path, nbytes) as progress:
            finding = verify_file(path, progress)
        return self.found(finding)

    def found(self, finding: Finding) -> Finding:
        if not self._quiet:
            _print(finding)
        return finding


def _result(finding: Finding) -> str:
    """Return the result: one line, and one more for each bad record."""
    if finding.ok:
        return "ok"
    if finding.status != DAMAGED or not finding.bad_records:
        word = "damaged: " if finding.status == DAMAGED else ""
        return printable(f"{word}{finding.error}")
    shown = [printable(f"{name}: {why}") for name, why in finding.bad_records[:_MAX_SHOWN]]
    rest = finding.num_bad - len(shown)
    lines = [f"damaged: {_records(finding.num_bad)}", *shown]
    return "\n".join([*lines, f"and {rest} more"] if rest > 0 else lines)


def _lines_about(finding: Finding) -> list[str]:
    """Return the lines about a path: one, and one more for each bad record."""
    first, *rest = _result(finding).split("\n")
    notes = [] if finding.nbytes is None else [decimal(finding.nbytes)]
    if finding.num_records:
        notes.append(_records(finding.num_records))
    if finding.ok:
        notes += _left_unchecked(finding)
    size = f" ({', '.join(notes)})" if notes else ""
    return [f"{printable(finding.path)}: {first}{size}", *rest]


def _left_unchecked(finding: Finding) -> list[str]:
    """Return notes on the parts of a whole checkpoint that were not checked."""
    notes = []
    if without := finding.num_unchecked - finding.num_compressed:
        notes.append(f"{_records(without)} without a checksum")
    if finding.num_compressed:
        notes.append(f"{_records(finding.num_compressed)} compressed, bytes not checked")
    if finding.num_behind:
        notes.append(f"{finding.num_behind} bytes behind the archive, not checked")
    if finding.legacy:
        notes.append("torch's legacy format, which has no checksums")
    return notes


def _records(number: int) -> str:
    return f"{number} record{'' if number == 1 else 's'}"


def _total(findings: Sequence[Finding]) -> str:
    words = {GOOD: "ok", DAMAGED: "damaged", UNUSABLE: "not checked"}
    counts = [
        f"{number} {word}"
        for status, word in words.items()
        if (number := sum(each.status == status for each in findings))
    ]
    nbytes = sum(each.nbytes or 0 for each in findings)
    return f"{len(findings)} paths, {decimal(nbytes)}: {', '.join(counts)}"


def _print(finding: Finding) -> None:
    """Print a finding at once, so that a long list can be read while it grows."""
    first, *rest = _lines_about(finding)
    if not sys.stdout.isatty():
        print("\n".join([first, *(f"    {line}" for line in rest)]), flush=True)
        return
    width = shutil.get_terminal_size().columns
    lines = folded(first, width)
    for line in rest:
        lines += folded(f"    {line}", width, indent=" " * 8)
    colour = "32" if finding.ok else "31"
    dressed = os.environ.get("TERM") != "dumb" and "NO_COLOR" not in os.environ
    print(
        "\n".join(f"\x1b[{colour}m{each}\x1b[m" if dressed else each for each in lines), flush=True
    )


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    found = _Display(quiet=options.json)
    findings = verify_paths(options.paths, found)
    if options.json:
        print(json.dumps([finding.as_json() for finding in findings], indent=2))
    elif len(findings) > 1:
        print(_total(findings))
    return max(finding.status for finding in findings)
