"""Sizes as people write and read them, such as "300 MB"."""

from __future__ import annotations

import argparse
import operator
import re
from collections.abc import Callable

# Half of the address space that Linux gives a process. Larger sizes would overflow in the core.
MOST_BYTES = 1 << 46

_SIZE = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(?:([kmgt])(i?))?b?", re.IGNORECASE)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


def parse(value: object, name: str, *, least: int = 1) -> int:
    """Return a number of bytes from an int or a string such as "300MB" (1000²) or "4GiB" (1024³).

    Args:
        name: The argument's name, for messages.
        least: The smallest valid number of bytes.

    Raises:
        TypeError: `value` is neither an int nor a string.
        ValueError: `value` is not a size, or out of bounds.
    """
    nbytes = _parse_size_text(value, name) if isinstance(value, str) else require_int(value, name)
    return bounded(nbytes, name, least, MOST_BYTES, shown=value)


def argparse_size_type(*, least: int = 1) -> Callable[[str], int]:
    """Return a parser for the `type=` of argparse."""

    def size(text: str) -> int:
        try:
            return parse(text, "the size", least=least)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return size


def _parse_size_text(text: str, name: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"{name}={text!r} is not a size: give bytes, or a number with a unit, as in"
            " '300MB' (of 1000) or '4GiB' (of 1024)"
        )
    number, prefix, binary = match.groups()
    base = 1024 if binary else 1000
    unit = base ** _POWERS[prefix.lower()] if prefix else 1
    return round(float(number) * unit) if "." in number else int(number) * unit


def require_int(value: object, name: str) -> int:
    """Return `value` as an int; NumPy's ints are accepted. Raise TypeError for a bool and anything
    else. The message has the argument's `name`."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} has to be an int, not {type(value).__name__}") from None


def bounded(number: int, name: str, least: int, most: int, *, shown: object = None) -> int:
    """Return `number`, or raise ValueError if it is out of bounds. The message has `shown` instead
    of the number, if `shown` is given."""
    shown = number if shown is None else shown
    if number < least:
        raise ValueError(f"{name} has to be at least {least}, not {shown}")
    if number > most:
        raise ValueError(f"{name} has to be at most {most}, not {shown}")
    return number


def decimal(nbytes: float) -> str:
    """Format bytes in units of 1000: "300 MB", "1.52 GB"."""
    return _format_size(nbytes, 1000, ("B", "kB", "MB", "GB", "TB"))


def binary(nbytes: float) -> str:
    """Format bytes in units of 1024, as for pools and blocks: "16 MiB", "1.5 GiB"."""
    return _format_size(nbytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def _format_size(nbytes: float, base: int, units: tuple[str, ...]) -> str:
    step = 0
    # 999.5 would be shown as 1000, so the value gets the next unit.
    while nbytes >= 0.9995 * base and step < len(units) - 1:
        nbytes /= base
        step += 1
    has_no_fraction = step == 0 or nbytes >= 99.95  # in three digits
    digits = f"{nbytes:.0f}" if has_no_fraction else f"{nbytes:.3g}"
    return f"{digits} {units[step]}"
