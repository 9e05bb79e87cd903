"""Checks of arguments that many calls have: booleans and timeouts."""

from __future__ import annotations

import math
import numbers


def check_booleans(**arguments: object) -> None:
    """Raise TypeError if an argument is None or a string. Other values count by their truth."""
    for name, value in arguments.items():
        if value is None or isinstance(value, str):
            raise TypeError(f"{name} has to be True or False, not {value!r}")


def seconds(timeout: object) -> float | None:
    """Return `timeout` as a float, or None for an endless wait.

    Raises:
        TypeError: `timeout` is neither a number nor None.
        ValueError: `timeout` is NaN.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise TypeError(
            f"timeout has to be a number of seconds, or None to wait for ever, not {timeout!r}"
        )
    value = float(timeout)
    if math.isnan(value):
        raise ValueError("timeout has to be a number of seconds, not nan")
    return value
