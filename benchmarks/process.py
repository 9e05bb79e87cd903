"""A separate process for each measured way, and the parent's handle on it.

The memory, allocator and thread pools of one way then cannot affect the figures of another way. The
process answers one request at a time and sleeps in between.
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
    """Make the object and call the methods that the parent names, until the parent closes the pipe.

    This is the main function of the child. Each answer is (True, result), or (False, (error,
    traceback)), after which the child ends.
    """
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
    """A new process, which calls `make(*arguments)` and then methods of the object returned.

    It is a context manager, which ends the process. The constructor does not wait for `make`;
    `ready` does.
    """

    def __init__(
        self, name: str, make: Callable[..., Any], *arguments: Any, limit_s: float = GIVE_UP_S
    ) -> None:
        self.name = name
        self._limit_s = limit_s  # the longest that one request may take
        context = multiprocessing.get_context("spawn")
        self._connection, child_end = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(child_end, make, arguments), daemon=True
        )
        self._process.start()
        child_end.close()  # now only the child has it, so the end of the child closes the pipe

    def ready(self) -> Worker:
        """Wait until the object is made."""
        self._answer()
        return self

    def call(self, method: str, *values: Any, **named: Any) -> Any:
        """Call a method of the object in the process; return its result.

        Raises:
            BenchError: The method raised, and the text has the child's traceback; or the process
                ended, or took longer than `limit_s`.
        """
        with contextlib.suppress(BrokenPipeError):  # `_answer` says why the process is gone
            self._connection.send((method, values, named))
        return self._answer()

    def _answer(self) -> Any:
        """Wait for the result of the last request, and return it; raise as `call` does."""
        try:
            if not self._connection.poll(self._limit_s):
                text = f"{self.name}: took more than {self._limit_s:.0f} s and was ended"
                raise BenchError(text)
            succeeded, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            raise BenchError(
                f"{self.name}: its process died (exit code {self._process.exitcode})"
            ) from None
        if not succeeded:
            raise BenchError(f"{self.name}: {value[0]}\n{value[1]}")
        return value

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self._connection.close()
        # After an error the process may be in a long call, so it is killed at once.
        self._process.join(30 if error_type is None else 0)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
