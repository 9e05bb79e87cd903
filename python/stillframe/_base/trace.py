"""`stillframe.trace(path)`: a timeline of saves and training steps that opens in Perfetto.

A span is an action with its begin and end. The core records the spans of each thread in a buffer.
A separate thread writes them to the file (csrc/core/trace). This module starts and ends traces.
"""

from __future__ import annotations

import errno
import logging
import os
import threading

from stillframe import _core
from stillframe._base import cpus
from stillframe.errors import BusyError, StillframeError

__all__ = ["trace"]

log = logging.getLogger("stillframe")


class trace:  # a context manager that reads as a verb
    """Write a timeline of every save and optimizer step of this process while the block runs.

        with stillframe.trace("timeline.json"):
            train()

    The file is Trace Event JSON: open it at https://ui.perfetto.dev or in chrome://tracing. The
    topmost row shows training steps. A step lasts from the end of one optimizer step to the end of
    the next, and the optimizer's part is shown inside. Below, each thread has a row with:

    - the call, with planning and the copies made in it (`capture`);
    - the wait before the optimizer step (`gate`);
    - later copies, checksums, writes, syncs and commits, each with its save's number and its bytes.

    A save that has ended is also a slice of its own (`save`, with file name and outcome), from the
    call to the end.

    A trace is cheap enough to leave on: about 0.1 µs a span, written by a separate thread ten times
    a second. If a thread records more than 8,192 spans between two writes, some are dropped. They
    are reported in the timeline, in `dropped`, and as a warning in the log.

    After each write the file is a complete document. If the process dies inside the block, the file
    lacks at most the last 0.1 s. Spans that end after the block are left out: call `wait_all()`
    inside the block to have whole saves. A process has one trace at a time; blocks cannot be
    nested. A forked child writes nothing into its parent's trace and may begin its own.

    Args:
        path: The file to write; an existing one is replaced.

    Attributes:
        path: The same, as a string.
        events: Spans written, known when the block has ended; 0 before.
        dropped: Spans lost, known when the block has ended; 0 before.
        error: The OSError that ended the writing, if any. It is logged and not raised. The file
            has what was written before.

    Raises:
        TypeError, ValueError: `path` is not a path.
        OSError: (on entering) The file cannot be created.
        StillframeError: (on entering) Another trace is being written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fsdecode(path)
        if not self.path or "\0" in self.path:
            raise ValueError(f"{self.path!r} cannot be the path of a trace")
        self.events = 0
        self.dropped = 0
        self.error: OSError | None = None
        # The fork generation of the process that writes the trace; -1 outside the block.
        self._generation = -1

    def __enter__(self) -> trace:
        global _current
        cpus.spread()
        try:
            _core.trace_start(os.fsencode(self.path))
        except BusyError:
            other = _current.path if _current is not None else "another file"
            raise StillframeError(
                f"a trace is being written to {other} already: one at a time in a process"
            ) from None
        except ValueError:  # a pipe or a device has this path
            raise OSError(errno.EINVAL, "a trace needs a regular file", self.path) from None
        except OSError as error:
            text = f"the trace cannot be written here: {error.strerror}"
            raise OSError(error.errno, text, self.path) from None
        self.events, self.dropped, self.error = 0, 0, None
        self._generation = _core.fork_generation()
        _current = self
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def _end(self) -> None:
        """End the trace, once. A forked child does nothing, because the trace is its parent's."""
        global _current
        generation, self._generation = self._generation, -1  # a second call finds -1
        if generation != _core.fork_generation():
            return
        for thread in threading.enumerate():
            if thread.native_id is not None and thread is not threading.main_thread():
                name = thread.name.encode(errors="replace")
                _core.trace_name_thread(thread.native_id, name.replace(b"\0", b"?"))
        result = _core.trace_stop()
        _current = None
        if result is None:  # no trace was running
            return
        self.events, self.dropped, code = result
        if code:
            self.error = OSError(code, os.strerror(code), self.path)
            log.error("stillframe: the trace is not complete: %s", self.error)
        if self.dropped:
            log.warning("stillframe: %s: %d events were dropped", self.path, self.dropped)


_current: trace | None = None  # the trace that is being written


def end_trace_at_exit() -> None:
    """End a trace whose block still runs at the interpreter's exit, as in a daemon thread."""
    if _current is not None:
        _current._end()


def _reset_in_forked_child() -> None:
    global _current
    _current = None


os.register_at_fork(after_in_child=_reset_in_forked_child)
