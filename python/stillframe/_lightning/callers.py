"""Finds and recognises the plugin's caller: Trainer, strategy, and whether a signal handler runs.

Lightning gives a CheckpointIO only the checkpoint and a path. Whether a save may return before it
is durable depends on two facts, which only the call stack shows:

- *Which Trainer calls?* The strategy calls the plugin in a method of the same name, such as
  `save_checkpoint`. The `self` of that frame is the strategy, which knows the Trainer.
- *Does a signal handler run?* A job may save in a handler, and end right after it. So such a save
  must be durable when it returns. This module remembers the code of every function that was a
  signal handler when a training, an epoch or a save started.

`f_locals` is read only if the frame's name or code matches. On Python 3.11 and 3.12, `f_locals` is
a copy, which keeps objects alive that the frame drops later.

Strategies are recognised by the names of their classes, because their modules may not be installed.
"""

from __future__ import annotations

import inspect
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from stillframe._base.calls import stack
from stillframe._watch.guard import code_of

_SIGNALS = tuple(sorted(signal.valid_signals()))
_MAX_WRAPPERS = 16  # a longer chain of wrapped CheckpointIOs must be a cycle

_handler_codes: set[CodeType] = set()  # the code of every signal handler that was found

_XLA = ("XLAStrategy", "SingleDeviceXLAStrategy", "XLAFSDPStrategy")

_warned: set[str] = set()  # the warnings that `warn_if_bypassed` has given


class Fabric:
    """The result of `calling_trainer` for a call by Fabric, which has no Trainer."""


def iter_checkpoint_ios(owner: object) -> Iterator[Any]:
    """Yield the CheckpointIO that `owner` has, then the CheckpointIO that the first one wraps, and
    so on. `owner` is a strategy or a CheckpointIO."""
    io = owner
    for _ in range(_MAX_WRAPPERS):
        io = getattr(io, "_checkpoint_io", None)
        if io is None:
            return
        yield io


def calling_trainer(plugin: object, method: str) -> Any:
    """Return the caller of `method` of `plugin`: a Trainer, or the type `Fabric`.

    Return None if no strategy is on the stack, as in a call by the user or by a launcher.
    """
    for frame in stack(sys._getframe(1)):
        if frame.f_code.co_name != method:
            continue
        strategy = _self_of(frame)
        if not hasattr(type(strategy), "is_global_zero"):
            continue  # not a strategy, but perhaps a CheckpointIO that wraps the plugin
        if not any(io is plugin for io in iter_checkpoint_ios(strategy)):
            continue
        if not hasattr(strategy, "lightning_module"):
            return Fabric
        return getattr(strategy.lightning_module, "_trainer", None)
    return None


def _self_of(frame: FrameType) -> Any:
    """Return the first argument of a frame's function, which is `self` in a method, or None."""
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount > 0 else None


def is_inside_save_checkpoint(trainer: Any) -> bool:
    """Return whether `trainer.save_checkpoint` is on the stack, which ends in a barrier."""
    for frame in stack(sys._getframe(1)):
        if frame.f_code.co_name == "save_checkpoint" and _self_of(frame) is trainer:
            return True
    return False


def note_signal_handlers() -> None:
    """Remember the code of each function that is a signal handler now."""
    for number in _SIGNALS:
        handler = signal.getsignal(number)
        if callable(handler):
            code = code_of(handler)
            if code is not None:
                _handler_codes.add(code)


def inside_signal_handler() -> bool:
    return signal_handler_frame() is not None


def signal_handler_frame() -> FrameType | None:
    """Return the frame of the signal handler that this thread runs, or None.

    A call of a handler by the program itself counts too.
    """
    if threading.current_thread() is not threading.main_thread():
        return None  # Python runs handlers in the main thread only
    note_signal_handlers()
    for frame in stack(sys._getframe(1)):
        if frame.f_code in _handler_codes and _was_called_as_handler(frame):
            return frame
    return None


def _was_called_as_handler(frame: FrameType) -> bool:
    """Return whether a frame with a signal handler's code is a call of that handler.

    Code with `*args` may belong to a decorator, which wraps other functions too. Then the frame
    counts only if an argument is the interrupted frame, which Python passes to handlers.
    """
    code = frame.f_code
    if not code.co_flags & inspect.CO_VARARGS:
        return True
    args_name = code.co_varnames[code.co_argcount + code.co_kwonlyargcount]
    args = frame.f_locals.get(args_name, ())
    return any(argument is frame.f_back for argument in args)


# ---- strategies ----


def refuse_xla_strategy(strategy: Any) -> None:
    """Raise TypeError for a strategy that keeps its state on XLA devices."""
    for cls in type(strategy).__mro__:
        if cls.__name__ in _XLA:
            raise TypeError(
                f"{cls.__name__} cannot save with stillframe: the state on an XLA device has to be"
                " copied to the host by XLA itself, which stops training, and only its own"
                " XLACheckpointIO does that. Leave the plugin out with this strategy."
            )


def warn_if_bypassed(strategy: Any, plugin: str) -> None:
    """Warn once if `strategy` writes its checkpoints without its CheckpointIO."""
    reason = _why_bypassed(strategy)
    if reason is None or reason in _warned:
        return
    _warned.add(reason)
    warnings.warn(
        f"{reason}, so {plugin} does not see its checkpoints: they are saved as if it were not"
        " there, synchronously.",
        UserWarning,
        stacklevel=2,
    )


def sharded_model_key(strategy: Any) -> str | None:
    """Return the key of the model in the sharded checkpoints of `strategy`. Return None if it saves
    no sharded checkpoints, or if its `save_checkpoint` is not Lightning's own."""
    kind = _get_sharded_strategy_name(strategy)
    if kind is None or not _is_lightning_strategy_method(
        getattr(type(strategy), "save_checkpoint", None)
    ):
        return None
    return "model" if kind == "FSDPStrategy" else "state_dict"  # the keys that Lightning uses


def takes_no_urls(strategy: Any) -> bool:
    """Return whether the strategy treats every path of a checkpoint as a local path, as Lightning's
    FSDPStrategy and ModelParallelStrategy do."""
    return _is_lightning_strategy_method(getattr(type(strategy), "save_checkpoint", None))


def _why_bypassed(strategy: Any) -> str | None:
    """Return why `strategy` writes its checkpoints without its CheckpointIO, or None."""
    if any(cls.__name__ == "DeepSpeedStrategy" for cls in type(strategy).__mro__):
        return "DeepSpeedStrategy writes its own checkpoints"
    if _get_sharded_strategy_name(strategy) is not None and sharded_model_key(strategy) is None:
        return f"{type(strategy).__name__} has a save_checkpoint of its own"
    return None


def _get_sharded_strategy_name(strategy: Any) -> str | None:
    """Return the class that makes `strategy` save sharded checkpoints: "FSDPStrategy",
    "ModelParallelStrategy" or None."""
    for cls in type(strategy).__mro__:
        name = cls.__name__
        is_sharded = False
        if name == "FSDPStrategy":
            is_sharded = getattr(strategy, "_state_dict_type", None) == "sharded"
        elif name == "ModelParallelStrategy":
            is_sharded = getattr(strategy, "_save_distributed_checkpoint", False)
        if is_sharded:
            return name
    return None


def _is_lightning_strategy_method(method: Any) -> bool:
    """Return whether Lightning's FSDPStrategy or ModelParallelStrategy defines `method`."""
    module = getattr(method, "__module__", None) or ""
    return module.endswith((".strategies.fsdp", ".strategies.model_parallel"))
