"""Shows what a long wait is for.

After one second of waiting, a progress bar appears on stderr if that is a terminal, else one plain
line. A thread of its own draws it, because the waiting thread is inside waits that answer signals.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from stillframe._save.completion import start_once

if TYPE_CHECKING:
    from stillframe._save.handle import SaveHandle

DELAY_S = 1.0
_REDRAW_S = 0.1


class WaitingLine:
    """A context manager around a wait for `handles` and for their owner's links and removes."""

    def __init__(self, handles: Sequence[SaveHandle]) -> None:
        self._handles = [handle for handle in handles if not handle.done()]
        self._over = threading.Event()
        self._runs = False
        self._thread = threading.Thread(target=self._run, name="sf-waiting", daemon=True)

    def __enter__(self) -> WaitingLine:
        with contextlib.suppress(OSError):  # without a thread, or at exit, there is no line
            self._runs = start_once(self._thread)
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._runs:
            self._thread.join()

    def _run(self) -> None:
        if self._over.wait(DELAY_S) or sys.stderr is None:
            return
        stream = sys.stderr
        if stream.isatty():
            self._draw(stream)
        else:
            done, total = self._bytes()
            stream.write(f"{self._what()} ({done / 1e6:.0f} of {total / 1e6:.0f} MB written)\n")
            stream.flush()

    def _draw(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TransferSpeedColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
        )
        with Progress(*columns, console=Console(file=stream)) as progress:
            done, total = self._bytes()
            task = progress.add_task(self._what(), completed=done, total=total)
            while not self._over.wait(_REDRAW_S):
                done, total = self._bytes()
                progress.update(task, completed=done, total=total, description=self._what())
            done, total = self._bytes()
            progress.update(task, completed=done, total=total, description=self._what())

    def _what(self) -> str:
        waiting = sum(not handle.done() for handle in self._handles)
        if waiting == 0:
            return "stillframe: waiting for checkpoints to be removed"
        noun = "checkpoint" if waiting == 1 else "checkpoints"
        return f"stillframe: waiting for {waiting} {noun} to reach the disk"

    def _bytes(self) -> tuple[int, int]:
        pairs = [handle.progress() for handle in self._handles]
        return sum(done for done, _ in pairs), sum(total for _, total in pairs)
