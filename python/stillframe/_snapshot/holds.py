"""Calls a function when a process or future has ended, so that its hold on memory ends too."""

from __future__ import annotations

import logging
import multiprocessing
import os
import select
import subprocess
import threading
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from stillframe._base import threads

log = logging.getLogger("stillframe")


def call_at_end(process_or_future: Any, function: Callable[[], object]) -> None:
    """Have `function()` called, on any thread, once a process or future has ended.

    Args:
        process_or_future: A started `multiprocessing.Process` of any start method, a
            `subprocess.Popen`, or anything with `add_done_callback`, such as
            `concurrent.futures.Future`.
        function: Called once. It must not raise.

    Raises:
        TypeError: `process_or_future` is none of these.
        ValueError: The process was not started, or was closed.
        OSError: The system refuses the thread that would wait for the process.
    """
    register = getattr(process_or_future, "add_done_callback", None)
    if callable(register):
        register(lambda _: function())
        return
    if isinstance(process_or_future, BaseProcess):
        if process_or_future.exitcode is not None:
            function()
            return
        try:
            # `sentinel` becomes readable when the process ends. Wait for a duplicate of it, because
            # `close()` of the process object closes the sentinel.
            sentinel = os.dup(process_or_future.sentinel)
        except ValueError as error:
            raise ValueError(
                f"{process_or_future!r} has to be started before something is held for it"
            ) from error
        try:
            call_on_thread_after(lambda: _wait_readable_and_close(sentinel), function)
        except BaseException:
            os.close(sentinel)
            raise
        return
    if isinstance(process_or_future, subprocess.Popen):
        if process_or_future.poll() is not None:
            function()
            return
        call_on_thread_after(process_or_future.wait, function)
        return
    raise TypeError(
        "expected a multiprocessing.Process, a subprocess.Popen or a future (with"
        f" add_done_callback), not {type(process_or_future).__name__}"
    )


def is_unforked_process(process: Any) -> bool:
    """Return whether `process` is a process that was not forked."""
    if not isinstance(process, BaseProcess):
        return False
    # Processes of the default start method have None.
    method = getattr(process, "_start_method", None) or multiprocessing.get_start_method()
    return method != "fork"


def _wait_readable_and_close(descriptor: int) -> None:
    """Wait until a descriptor is readable, and close it."""
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while not poll.poll():
            pass
    finally:
        os.close(descriptor)


def call_on_thread_after(wait: Callable[[], object], function: Callable[[], object]) -> None:
    """Start a thread that calls `wait()` and then `function()`, even if `wait()` raises. Raise
    OSError if the system refuses the thread."""

    def run() -> None:
        try:
            wait()
        except Exception:
            log.exception("stillframe: waiting for a process failed; its memory is given back")
        function()

    threads.start(threading.Thread(target=run, name="sf-hold", daemon=True))
