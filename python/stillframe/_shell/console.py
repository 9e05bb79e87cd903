"""rich's console, as the commands use it."""

from __future__ import annotations

import rich.console


class Console(rich.console.Console):
    """rich's own ends the process with status 1, which is "damaged" here, when its reader has
    gone (`| head`): this one leaves the exit status to the program."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
