"""The guard around our bookkeeping in other people's programs.

The hooks around an optimizer's step look at whatever object torch hands them: one that was never
initialised, whose `state` is a property that raises, that has no place for a weak reference. They
also need memory. Nothing of that may end somebody's step: what fails is given up, and what cannot
be watched is copied during the call.

What a signal handler raises is not ours, wherever it came in, and goes on its way.
"""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from types import CodeType
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


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
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _code_of(function: Any) -> CodeType | None:
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    if callable(function) and not hasattr(function, "__code__"):
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None
