"""Finds the plugin's caller: which Trainer it is, and whether a signal handler is running.

Lightning gives a CheckpointIO only the checkpoint and a path. Whether a save may return before it
is durable depends on two facts, and only the call stack tells them:

- *The Trainer.* The strategy that holds the plugin is the `self` of a frame named like the
  plugin's method (`save_checkpoint`, `remove_checkpoint`, `teardown`), and its LightningModule
  knows the Trainer. One plugin may serve several Trainers, and a Fabric besides.
- *A signal handler.* A job that is told to end, for example by SLURM's requeue signal, saves inside
  the handler and ends right after it. So such a save must be durable when it returns. A handler is
  recognised by its code: this module remembers the code of every Python function that it has found
  registered. It looks when a training starts, when an epoch starts, and at every save. It installs
  and wraps no handler. Handlers that restore the default before they save are therefore known too.

`f_locals` is read only of the few frames whose name or code matches. On Python 3.11 and 3.12,
reading it makes a copy, which keeps alive what the frame has dropped since.
"""

from __future__ import annotations

import inspect
import signal
import sys
import threading
from collections.abc import Iterator
from types import CodeType
from typing import Any

from stillframe._base.calls import stack
from stillframe._watch.guard import code_of

_SIGNALS = tuple(sorted(signal.valid_signals()))
_MAX_WRAPPERS = 16  # wrappers around one plugin; more mean a cycle

_handler_codes: set[CodeType] = set()


class Fabric:
    """Represents a caller that is Fabric, which has no Trainer."""


def io_chain(holder: object) -> Iterator[Any]:
    """Yield the CheckpointIO that a strategy holds, then the one that it wraps, and so on."""
    io = holder
    for _ in range(_MAX_WRAPPERS):
        io = getattr(io, "_checkpoint_io", None)
        if io is None:
            return
        yield io


def calling_trainer(plugin: object, method: str) -> Any:
    """Return the Trainer that has called `method` of `plugin`.

    The result is the type `Fabric` for a strategy of Fabric. It is None if no strategy is on the
    stack, as in a direct call or a call by one of Lightning's launchers.
    """
    for frame in stack(sys._getframe(1)):
        code = frame.f_code
        if code.co_name == method and code.co_argcount > 0:
            holder: Any = frame.f_locals.get(code.co_varnames[0])
            # Only a strategy has a rank; a CheckpointIO around the plugin has none.
            if hasattr(type(holder), "is_global_zero") and any(
                io is plugin for io in io_chain(holder)
            ):
                if not hasattr(holder, "lightning_module"):
                    return Fabric
                return getattr(holder.lightning_module, "_trainer", None)
    return None


def meets_others_later(trainer: Any) -> bool:
    """Return whether all ranks meet in a barrier after the current save.

    They do if `trainer.save_checkpoint` is on the call stack.
    """
    return any(
        frame.f_code.co_name == "save_checkpoint"
        and frame.f_code.co_argcount > 0
        and frame.f_locals.get(frame.f_code.co_varnames[0]) is trainer
        for frame in stack(sys._getframe(1))
    )


def note_signal_handlers() -> None:
    """Remember the code of every Python function that is a signal handler now."""
    for number in _SIGNALS:
        handler = signal.getsignal(number)
        if callable(handler):
            code = code_of(handler)
            if code is not None:
                _handler_codes.add(code)


def inside_signal_handler() -> bool:
    """Return whether a signal handler is on this thread's stack.

    A registered function that is called by hand counts too, unless it takes `*args`. Such code may
    belong to a decorator and be on any stack, so there the interrupted frame must be among the
    arguments.
    """
    if threading.current_thread() is not threading.main_thread():
        return False  # Python runs handlers in the main thread only.
    note_signal_handlers()
    for frame in stack(sys._getframe(1)):
        code = frame.f_code
        if code in _handler_codes:
            if not code.co_flags & inspect.CO_VARARGS:
                return True
            name = code.co_varnames[code.co_argcount + code.co_kwonlyargcount]
            interrupted = frame.f_back
            if any(argument is interrupted for argument in frame.f_locals.get(name, ())):
                return True
    return False
