"""rich's console, as the commands use it."""

from __future__ import annotations

import rich.console


class Console(rich.console.Console):
    """A console that leaves the exit status to the program.

    If its reader has gone (`| head`), rich's own ends the process with status 1, which means
    "damaged" here.
    """

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
