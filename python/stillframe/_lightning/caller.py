"""Who is calling the plugin: which Trainer, and is it a signal handler?

Lightning hands a CheckpointIO the checkpoint and a path, nothing more. Two facts decide whether
a save may return before it is durable, and both stand on the call stack only:

- *The Trainer.* The strategy that holds the plugin is the `self` of a frame named like the
  plugin's method (`save_checkpoint`, `remove_checkpoint`, `teardown`), and its LightningModule
  knows the Trainer. One plugin may serve several Trainers, and a Fabric besides.
- *A signal handler.* A job that is asked to go (SLURM's requeue signal, say) saves inside the
  handler and is gone right after it, so such a save has to be on the disk when it returns. A
  handler is recognised by its code: the code of every Python function that was seen registered,
  looked at when a training starts, when an epoch starts, and at every save. No handler is
  installed or wrapped for this. Handlers that put the default back before they save are
  therefore known too.

Frames are read without touching `f_locals`, but for those few whose name or code matches: on
Python 3.11 and 3.12 reading it makes a copy that keeps everything alive that the frame has let
go of since.
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
_MAX_WRAPPERS = 16  # of one plugin; more is a cycle

_handler_codes: set[CodeType] = set()


class Fabric:
    """Stands for a caller that is Fabric's: there is no Trainer, and never was."""


def io_chain(holder: object) -> Iterator[Any]:
    """The CheckpointIO that a strategy holds, then the one wrapped by it, and so on."""
    io = holder
    for _ in range(_MAX_WRAPPERS):
        io = getattr(io, "_checkpoint_io", None)
        if io is None:
            return
        yield io


def calling_trainer(plugin: object, method: str) -> Any:
    """The Trainer on whose behalf `method` of `plugin` runs now.

    The type `Fabric` for a strategy of Fabric; None where no strategy is on the stack: a direct
    call, or one of Lightning's launchers.
    """
    for frame in stack(sys._getframe(1)):
        code = frame.f_code
        if code.co_name == method and code.co_argcount > 0:
            holder: Any = frame.f_locals.get(code.co_varnames[0])
            # Only a strategy has a rank: a CheckpointIO around the plugin has not.
            if hasattr(type(holder), "is_global_zero") and any(
                io is plugin for io in io_chain(holder)
            ):
                if not hasattr(holder, "lightning_module"):
                    return Fabric
                return getattr(holder.lightning_module, "_trainer", None)
    return None


def meets_others_later(trainer: Any) -> bool:
    """Whether all ranks meet in a barrier behind the save that is being made: where it is asked
    for by `trainer.save_checkpoint`."""
    return any(
        frame.f_code.co_name == "save_checkpoint"
        and frame.f_code.co_argcount > 0
        and frame.f_locals.get(frame.f_code.co_varnames[0]) is trainer
        for frame in stack(sys._getframe(1))
    )


def note_signal_handlers() -> None:
    """Remembers the code of every Python function that is a signal handler at this moment."""
    for number in _SIGNALS:
        handler = signal.getsignal(number)
        if callable(handler):
            code = code_of(handler)
            if code is not None:
                _handler_codes.add(code)


def inside_signal_handler() -> bool:
    """Whether a signal handler is on this thread's stack.

    A registered function that somebody calls by hand counts as well, unless it takes `*args`:
    the code of such a one may be a decorator's and stand on any stack, so there the interrupted
    frame has to be among the arguments.
    """
    if threading.current_thread() is not threading.main_thread():
        return False  # Python runs its handlers in the main thread only.
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
