"""The guard that keeps errors of stillframe's bookkeeping about optimizers out of user programs.

An optimizer may be uninitialised, have a `state` property that raises, or refuse weak references.
The hooks around its step may also run out of memory. None of this may end the user's step.
Bookkeeping that fails is given up, and saves capture the storages.

An exception that a signal handler raised always propagates.
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

_MAX_WRAPPERS = 16  # around one signal handler; more of them mean a cycle


def guarded(
    give_up: Callable[[Any, Exception], object],
) -> Callable[[Callable[Concatenate[T, P], R]], Callable[Concatenate[T, P], R | None]]:
    """Return a decorator for functions whose exceptions must not propagate. After an exception,
    `give_up(first argument, error)` is called and the function returns None."""

    def guard(function: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R | None]:
        @functools.wraps(function)
        def bookkeeping(subject: T, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
            try:
                return function(subject, *args, **kwargs)
            except Exception as error:
                if _came_from_signal_handler(error):
                    raise
                try:
                    give_up(subject, error)
                except Exception as second:  # `give_up` may run out of memory too
                    if _came_from_signal_handler(second):
                        raise
                return None

        return bookkeeping

    return guard


def _came_from_signal_handler(error: BaseException) -> bool:
    """Return whether a signal handler raised the error, by the frames of the traceback."""
    # Handlers run on the main thread only.
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
    """Return the code that runs first when `handler` is called; None if it is not Python code."""
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
