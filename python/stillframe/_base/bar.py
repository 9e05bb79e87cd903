"""Text on the terminal: printable text, folded lines, and a progress bar for slow work."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Update = Callable[[int, int], object]  # moves a bar: update(bytes done, bytes in all)

_QUIET_S = 1.0  # shorter work shows no bar
_UPDATE_EVERY_S = 0.1


def is_stderr_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def printable(text: str) -> str:
    """Return text that any terminal can show: no control characters, no lone surrogates."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else "?" for letter in text)


@contextmanager
def bar(path: str, nbytes: int) -> Iterator[Update]:
    """Show a bar for `nbytes` bytes of a file; yield the function that moves it."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
    from rich.progress import TransferSpeedColumn as Speed

    name = printable(os.path.basename(path))
    console = Console(stderr=True)
    # BarColumn(None) takes the rest of the line.
    columns = [TextColumn("{task.description}"), BarColumn(None), DownloadColumn()]
    if console.width >= 80:
        columns.append(Speed())
    with Progress(*columns, console=console, transient=True, expand=True) as bars:
        task = bars.add_task(escape(name[: console.width // 3]), total=nbytes)
        yield lambda done, total: bars.update(task, completed=done, total=total)


@contextmanager
def watched(done: Callable[[], int], path: str, nbytes: int) -> Iterator[None]:
    """Show a bar of the block's progress on a terminal, once the block has lasted a second.

    `done` is called on another thread and returns how many of the `nbytes` bytes are done. If it
    raises ValueError, the bar ends.
    """
    if not is_stderr_terminal():
        yield
        return
    end = threading.Event()

    def show() -> None:
        if end.wait(_QUIET_S):
            return
        try:
            with bar(path, nbytes) as update:
                while not end.wait(_UPDATE_EVERY_S):
                    update(done(), nbytes)
        except ValueError:  # from `done`
            pass

    thread = threading.Thread(target=show, name="sf-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def folded(text: str, width: int, indent: str = "    ", break_after: str = " /") -> list[str]:
    """Break `text` into lines of at most `width` letters.

    A line breaks only after one of the letters in `break_after`. A wider part gets its own line.
    `indent` begins every line but the first.
    """
    lines: list[str] = []
    line = ""
    # Each part reaches to a letter to break after and the spaces that follow, or to the end.
    for part in re.findall(rf"[^{break_after}]*(?:[{break_after}]\s*|$)", text):
        if line.strip() and len(line) + len(part.rstrip()) > width:
            lines.append(line.rstrip())
            line = indent
        line += part
    return [*lines, line.rstrip()] if line.strip() else lines
