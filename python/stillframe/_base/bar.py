"""A bar on the terminal for what takes its time; nothing where there is no terminal."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Update = Callable[[int, int], object]  # bytes done, and of how many

_QUIET_S = 1.0  # what ends sooner is not worth a bar
_EVERY_S = 0.1


def on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def printable(text: str) -> str:
    """Text that any terminal can take: no control characters, no half characters."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else "?" for letter in text)


@contextmanager
def bar(path: str, nbytes: int) -> Iterator[Update]:
    """A bar for `nbytes` bytes of a file."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
    from rich.progress import TransferSpeedColumn as Speed

    name = printable(os.path.basename(path))
    console = Console(stderr=True)
    columns = [TextColumn("{task.description}"), BarColumn(None), DownloadColumn()]
    if console.width >= 80:
        columns.append(Speed())
    with Progress(*columns, console=console, transient=True, expand=True) as bars:
        task = bars.add_task(escape(name[: console.width // 3]), total=nbytes)
        yield lambda done, total: bars.update(task, completed=done, total=total)


@contextmanager
def watched(done: Callable[[], int], path: str, nbytes: int) -> Iterator[None]:
    """Inside the block, once it has lasted a second, a bar shows how far `done()` is.

    `done` is called by another thread, and ends the bar with a ValueError.
    """
    if not on_terminal():
        yield
        return
    end = threading.Event()

    def show() -> None:
        if end.wait(_QUIET_S):
            return
        try:
            with bar(path, nbytes) as update:
                while not end.wait(_EVERY_S):
                    update(done(), nbytes)
        except ValueError:
            pass

    thread = threading.Thread(target=show, name="sf-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
