"""The check of timeouts, for every call that waits."""

from __future__ import annotations

import math
import numbers


def seconds(timeout: object) -> float | None:
    """Return a timeout in seconds, checked before the wait begins; None waits forever.

    Raises:
        TypeError: It is neither a number nor None.
        ValueError: It is NaN.
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
