"""The command line: `stillframe verify PATH...`, `inspect FILE`, `bench DIR` and `demo`.

Exit status of verify, of several paths the largest:

    0   every checkpoint is whole
    1   damaged: truncated, empty, wrong bytes
    2   missing, no permission, no PyTorch checkpoint, a directory without checkpoints, bad usage
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from stillframe import _core
from stillframe._base import looks
from stillframe._shell import bench, inspect

GOOD, DAMAGED, UNUSABLE = 0, 1, 2
INTERRUPTED = 130  # what a shell reports for SIGINT

_SUFFIXES = (".ckpt", ".pt", ".pth")
_LONG_NBYTES = 256 << 20  # from here on a progress display is worth its flicker
_MAX_SHOWN = 8  # bad records of one file in the table; --json has all

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Finding:
    """What verify found out about one path."""

    path: str
    status: int
    error: str | None = None
    nbytes: int | None = None
    num_records: int = 0
    num_unchecked: int = 0
    num_bad: int = 0
    legacy: bool = False
    bad_records: list[tuple[str, str]] = field(default_factory=list)  # name, what is wrong with it

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
    """Checks structure and every CRC of one file. Raises nothing but KeyboardInterrupt.

    Args:
        progress: Called now and then with the bytes done and the file's length.
    """
    try:
        # A pipe without a writer must not keep us waiting.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        return Finding(path, UNUSABLE, _reason(error))
    try:
        found = _core.check(fd, True, progress, True)  # past the page cache
        strange = None if found["ok"] else looks.no_checkpoint(fd, path, found)
    except OSError as error:
        # It is there and may be read, yet its bytes do not come: the disk has lost them.
        status = UNUSABLE if error.errno in (errno.EISDIR, errno.ENOMEM) else DAMAGED
        return Finding(path, status, _reason(error), _size(fd))
    except MemoryError:
        return Finding(path, UNUSABLE, "not enough memory to check it", _size(fd))
    finally:
        os.close(fd)
    status = GOOD if found["ok"] else DAMAGED if strange is None else UNUSABLE
    return Finding(
        path,
        status,
        strange or found["error"],
        found["nbytes"],
        found["num_records"],
        found["num_unchecked"],
        found["num_bad"],
        found["format"] == "legacy",
        found["bad_records"],
    )


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
    """Paths of the checkpoints under a directory, sorted; what cannot be listed goes to `failures`.

    A checkpoint is what has a checkpoint's suffix or begins like one. Left out are hidden files
    (temporaries of saves in flight are among them) and the shards of torch.distributed.checkpoint,
    which are many archives in one file.
    """
    for root, directories, names in os.walk(directory, onerror=failures.append):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        for name in sorted(names):
            path = os.path.join(root, name)
            if name.startswith(".") or name.endswith(".distcp"):
                continue
            if name.endswith(_SUFFIXES) or _begins_like_one(path):
                yield path


def _begins_like_one(path: str) -> bool:
    """Whether a file of another name begins as torch.save's archives do, or its legacy format."""
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
    """Checks files, and the checkpoints in directories, in the order given."""
    findings: list[Finding] = []
    for argument in arguments:
        if not os.path.isdir(argument):
            findings.append(show.verify(argument))
            continue
        failures: list[OSError] = []
        before = len(findings)
        findings.extend(show.verify(path) for path in checkpoints_in(argument, failures))
        findings.extend(
            Finding(str(error.filename or argument), UNUSABLE, _reason(error)) for error in failures
        )
        if len(findings) == before:
            findings.append(Finding(argument, UNUSABLE, _nothing_in(argument)))
    return findings


def _nothing_in(directory: str) -> str:
    if nr := looks.shards_in(directory):
        shards = "1 shard" if nr == 1 else f"{nr} shards"
        return (
            f"it is a torch.distributed.checkpoint directory ({shards}), which verify cannot check"
        )
    return "there is no checkpoint in this directory"


# ---- showing --------------------------------------------------------------------------------


class _Display:
    """Verifies files and, where stderr is a terminal, shows how far a long one is."""

    def __init__(self) -> None:
        self._on_terminal = sys.stderr is not None and sys.stderr.isatty()

    def verify(self, path: str) -> Finding:
        try:
            nbytes = os.stat(path).st_size
        except (OSError, ValueError):
            nbytes = 0
        if nbytes < _LONG_NBYTES or not self._on_terminal:
            return verify_file(path)
        with self._bar(path, nbytes) as progress:
            return verify_file(path, progress)

    @contextmanager
    def _bar(self, path: str, nbytes: int) -> Iterator[Progress]:
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
        from rich.progress import Progress as Bars

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
        )
        with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
            task = bars.add_task(escape(_printable(os.path.basename(path))), total=nbytes)

            def progress(done: int, total: int) -> None:
                bars.update(task, completed=done, total=total)

            yield progress


def _printable(text: str) -> str:
    """Text that any terminal can take: no control characters, no half characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _result(finding: Finding) -> str:
    """The result column: one line, and one more for each bad record."""
    if finding.ok:
        if finding.legacy:
            return "ok (torch's legacy format: it has no checksums)"
        if finding.num_unchecked:
            return f"ok ({finding.num_unchecked} records without a checksum)"
        return "ok"
    if not finding.bad_records:
        word = "damaged: " if finding.status == DAMAGED else ""
        return _printable(f"{word}{finding.error}")
    shown = [_printable(f"{name}: {why}") for name, why in finding.bad_records[:_MAX_SHOWN]]
    rest = finding.num_bad - len(shown)
    noun = "record" if finding.num_bad == 1 else "records"
    lines = [f"damaged: {finding.num_bad} {noun}", *shown]
    return "\n".join([*lines, f"and {rest} more"] if rest > 0 else lines)


def _print_table(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        # A file or a pipe has no width: make lines as long as they are.
        widest = max(len(part) for f in findings for part in (f.path, *_result(f).splitlines()))
        console = Console(width=max(80, 2 * widest + 60))
    table = Table(box=None, pad_edge=False)
    table.add_column("path", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("records", justify="right", no_wrap=True)
    table.add_column("result", overflow="fold")
    for finding in findings:
        table.add_row(
            Text(_printable(finding.path)),
            "-" if finding.nbytes is None else decimal(finding.nbytes),
            str(finding.num_records) if finding.num_records else "-",
            Text(_result(finding), style="green" if finding.ok else "bold red"),
        )
    console.print(table)


# ---- the program ------------------------------------------------------------------------------


def _verify(options: argparse.Namespace) -> int:
    findings = verify_paths(options.paths, _Display())
    if options.json:
        print(json.dumps([finding.as_json() for finding in findings], indent=2))
    else:
        _print_table(findings)
    return max(finding.status for finding in findings)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stillframe", description="Saves PyTorch training state without stopping training."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    verify = commands.add_parser(
        "verify",
        help="check that checkpoints are whole: their structure and the CRC of every record",
        description="Checks the structure of checkpoints and the CRC of every record in them.",
        epilog="Exit status: 0 all good; 1 damaged; 2 missing, unreadable or no checkpoint there.",
    )
    verify.add_argument("paths", nargs="+", metavar="PATH", help="a file, or a directory of files")
    verify.add_argument("--json", action="store_true", help="print a list of objects, not a table")
    verify.set_defaults(run=_verify)
    bench.add_arguments(
        commands.add_parser(
            "bench",
            help="measure a disk: what it can do, and what saves and loads make of it",
            description="Half a minute: raw memcpy, write and read; save and load as shares of"
            " them; and advice. Its files go to a directory of their own in DIR and are removed.",
            epilog="Exit status: 0 measured; 2 DIR cannot be measured, bad usage.",
        )
    )
    inspect.add_arguments(
        commands.add_parser(
            "inspect",
            help="show what is in a checkpoint, without loading it",
            description="Tensors by name, shape, type, device and bytes, and other values by type."
            " The file's pickle is read, and never obeyed.",
            epilog="Exit status: 0 shown; 1 damaged, and shown as far as it goes; 2 missing,"
            " unreadable or no checkpoint.",
        )
    )
    # Its options are its own: main hands them over unread.
    commands.add_parser("demo", add_help=False, help="train a small model and compare two plugins")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status.

    Args:
        argv: The arguments behind the program's name; `sys.argv[1:]` by default.

    Raises:
        SystemExit: (status 2) Wrong usage; (status 0) `--help`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["demo"]:
        from stillframe._shell import demo

        return demo.main(arguments[1:])
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone (`| head`). Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNUSABLE
    return status
