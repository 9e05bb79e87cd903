"""The guard around our bookkeeping in other people's programs.

The hooks around an optimizer's step look at whatever object torch hands them: one that was never
initialised, whose `state` is a property that raises, that has no place for a weak reference. They
also need memory. Nothing of that may end somebody's step: what fails is given up, and what cannot
be watched is copied during the call.

What a signal handler raises is not ours, wherever it came in, and goes on its way.
"""

from __future__ import annotations

import functools
import inspect
import signal
import threading
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_MAX_WRAPPERS = 16  # of one handler; more is a cycle


def guarded(
    give_up: Callable[[Any, Exception], object],
) -> Callable[[Callable[Concatenate[T, P], R]], Callable[Concatenate[T, P], R | None]]:
    """Makes a function return None where it would raise, and calls `give_up(its first argument,
    the error)` then."""

    def guard(function: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R | None]:
        @functools.wraps(function)
        def bookkeeping(subject: T, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
            try:
                return function(subject, *args, **kwargs)
            except Exception as error:
                if _is_of_a_handler(error):
                    raise
                try:
                    give_up(subject, error)
                except Exception as second:  # no memory to do even that
                    if _is_of_a_handler(second):
                        raise
                return None

        return bookkeeping

    return guard


def _is_of_a_handler(error: BaseException) -> bool:
    """Whether a signal handler raised it: one of its traceback's frames is a handler's. Handlers
    run on the main thread, between any two lines."""
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = {code_of(signal.getsignal(number)) for number in signal.valid_signals()}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def code_of(handler: Any) -> CodeType | None:
    """The code that runs first when `handler` is called; None where that is not Python code."""
    for _ in range(_MAX_WRAPPERS):
        if isinstance(handler, FunctionType):
            return handler.__code__
        if isinstance(handler, MethodType):
            handler = handler.__func__
        elif isinstance(handler, functools.partial):
            handler = handler.func
        elif hasattr(handler, "__wrapped__"):
            handler = handler.__wrapped__
        else:
            handler = inspect.getattr_static(type(handler), "__call__", None)
    return None
