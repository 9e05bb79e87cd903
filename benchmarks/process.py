"""A separate process for each measured way, and the parent's handle on it.

Memory, allocator and thread pools of one way never appear in the figures of another. The process
answers one request at a time and sleeps in between.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from common import BenchError

GIVE_UP_S = 660.0  # a request that takes longer has hung


def _serve(connection: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Call methods of the object that `make` made until the parent ends: the main of the child."""
    # on Ctrl-C the parent ends this process and removes the files
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        measured = make(*arguments)
        connection.send((True, None))
        while True:
            name, values, named = connection.recv()
            connection.send((True, getattr(measured, name)(*values, **named)))
    except (EOFError, BrokenPipeError):
        return
    except BaseException as error:
        with contextlib.suppress(OSError):
            text = f"{type(error).__name__}: {error}"
            connection.send((False, (text, traceback.format_exc())))


class Worker:
    """An object `make(*arguments)` in a fresh process (spawned, never forked); a context
    manager."""

    def __init__(
        self, name: str, make: Callable[..., Any], *arguments: Any, limit_s: float = GIVE_UP_S
    ) -> None:
        self.name = name
        self._limit_s = limit_s  # the longest that one request may take
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def ready(self) -> Worker:
        """Wait until the object is made."""
        self._answer()
        return self

    def call(self, method: str, *values: Any, **named: Any) -> Any:
        """Call a method there and return its result.

        Raise BenchError with the child's traceback if the method raises.
        """
        with contextlib.suppress(BrokenPipeError):  # the answer says why
            self._connection.send((method, values, named))
        return self._answer()

    def _answer(self) -> Any:
        try:
            if not self._connection.poll(self._limit_s):
                text = f"{self.name}: took more than {self._limit_s:.0f} s and was ended"
                raise BenchError(text)
            went, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            raise BenchError(
                f"{self.name}: its process died (exit code {self._process.exitcode})"
            ) from None
        if not went:
            raise BenchError(f"{self.name}: {value[0]}\n{value[1]}")
        return value

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._connection.close()
        self._process.join(30 if kind is None else 0)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
