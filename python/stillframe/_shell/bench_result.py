"""The result of `stillframe bench`: figures, the table, and advice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import rich.console

from stillframe._base.sizes import decimal
from stillframe._shell import bench_raw as raw

_SLOW_SHARE = 0.6  # a save with less than this share of the raw write's speed is slow
_BUSY_SHARE = 0.1  # a machine is busy if other processes take this share of it


@dataclass
class BenchResult:
    """The medians of one run. Times are in seconds, sizes in bytes.

    Attributes:
        raw_direct: The raw write and read bypassed the page cache.
        memcpy_s, write_s, read_s: The raw limits.
        call_s, staged_s, durable_s: From the call of `async_save` until it returned, until every
            byte was copied, and until the file was durable.
        first_durable_s: `durable_s` of the first save, during which the pool takes its memory.
        load_s: `stillframe.load` of a file that is not in the page cache.
        io_mode, fallbacks: From the last save's report.
        pool_bytes: The pool's cap in an engine with default options.
        others: The share of the machine that other processes took during the run.
    """

    directory: str
    file_system: str
    nbytes: int
    rounds: int
    raw_direct: bool
    memcpy_s: float
    write_s: float
    read_s: float
    call_s: float
    staged_s: float
    durable_s: float
    first_durable_s: float
    load_s: float
    io_mode: str
    pool_bytes: int
    others: float = 0.0
    fallbacks: list[str] = field(default_factory=list)

    def shares(self) -> dict[str, float]:
        """Return the speed of stillframe as a share of each raw limit; 1 is as fast."""
        return {
            "copy": self.memcpy_s / self.staged_s,
            "save": self.write_s / self.durable_s,
            "load": self.read_s / self.load_s,
        }

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "shares": self.shares(), "advice": advice(self)}


# ---- advice ----------------------------------------------------------------------------------


def advice(result: BenchResult) -> list[str]:
    """Return sentences for the user, the most important first; never empty."""
    sentences = []
    if result.file_system in raw.MEMORY:
        sentences.append(
            f"{result.directory} is on {result.file_system}, which is memory: nothing there"
            " survives a reboot, and files take memory from the training. Save to a disk."
        )
    elif raw.is_network(result.file_system):
        sentences.append(
            f"{result.directory} is on {result.file_system}, a network file system: what a sync"
            " promises is up to its server, and other machines share its speed. If there is a local"
            " disk, save there and copy finished files."
        )
    if result.io_mode == "buffered" and result.file_system not in raw.MEMORY:
        reason = result.fallbacks[0] if result.fallbacks else "the file system has no O_DIRECT"
        sentences.append(
            f"Saves go through the page cache ({_as_clause(reason)}): that costs a copy and memory."
            " A file system with O_DIRECT (ext4, xfs) is faster."
        )
    if result.pool_bytes < result.nbytes:
        sentences.append(
            f"The pool ({decimal(result.pool_bytes)}) is smaller than this state"
            f" ({decimal(result.nbytes)}), so optimizer steps wait for the disk. Give it more with"
            f" STILLFRAME_POOL_BYTES or stillframe.configure(pool_bytes=...)."
        )
    shares = result.shares()
    if result.others >= _BUSY_SHARE:
        sentences.append(
            f"Other processes took {result.others:.0%} of this machine meanwhile, and every figure"
            " here suffers from it: measure again when it is quiet."
        )
    if shares["save"] < _SLOW_SHARE and not sentences:
        sentences.append(
            f"A save takes {1 / shares['save']:.1f} times as long as the raw write: something else"
            " is using the disk or the cores. stillframe.trace shows what the save waits for."
        )
    if not sentences:
        rate = result.nbytes / result.durable_s
        sentences.append(
            f"Nothing to mend: 10 GB would be durable here {10e9 / rate:.0f} s after the call,"
            " while training goes on."
        )
    return sentences


def _as_clause(sentence: str) -> str:
    text = sentence.rstrip(". ")
    return text[:1].lower() + text[1:]


# ---- showing ---------------------------------------------------------------------------------


def _format_time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


class Console(rich.console.Console):
    """A console that leaves the exit status to the program. If the reader of stdout has gone
    (`| head`), rich's console would end the process with status 1, which means "damaged" here."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def show(result: BenchResult) -> None:
    """Print the table, and the advice below it, on stdout."""
    from rich.table import Table
    from rich.text import Text

    how = "O_DIRECT" if result.raw_direct else "page cache"
    shares = result.shares()
    rows: list[tuple[str, float, str]] = [
        ("raw memcpy, one thread", result.memcpy_s, ""),
        ("  save: the call returns after", result.call_s, ""),
        (
            "  save: every byte is copied after",
            result.staged_s,
            f"{shares['copy']:.0%} of raw memcpy",
        ),
        (f"raw write + sync, {how}", result.write_s, ""),
        (
            f"  save: durable after ({result.io_mode})",
            result.durable_s,
            f"{shares['save']:.0%} of raw write",
        ),
        ("  the first save, pool cold: durable after", result.first_durable_s, ""),
        (f"raw read, {how}", result.read_s, ""),
        ("  load", result.load_s, f"{shares['load']:.0%} of raw read"),
    ]
    console = Console()
    if not console.is_terminal:  # wide enough that no line is broken
        console = Console(width=max(100, len(result.directory) + 80))
    rounds = "one round" if result.rounds == 1 else f"medians of {result.rounds} rounds"
    head = Text(
        f"{decimal(result.nbytes)} in {result.directory} ({result.file_system}), {rounds};"
        f" pool of at most {decimal(result.pool_bytes)}"
    )
    console.print(head, soft_wrap=not console.is_terminal)
    table = Table(box=None, pad_edge=False)
    for column in ("", "time", "rate", "share"):
        justify: Literal["left", "right"] = "left" if column in ("", "share") else "right"
        table.add_column(column, justify=justify, overflow="fold")
    for name, seconds, share in rows:
        rate = f"{decimal(result.nbytes / seconds)}/s"
        if name.endswith("the call returns after"):  # the call copies only some of the bytes
            rate = ""
        table.add_row(Text(name), _format_time(seconds), rate, share)
    console.print(table)
    for sentence in advice(result):
        console.print(Text(sentence), soft_wrap=not console.is_terminal)
