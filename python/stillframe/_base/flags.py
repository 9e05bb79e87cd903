"""Switches, as every call that has one takes them."""

from __future__ import annotations


def refuse_unclear(**switches: object) -> None:
    """
    Raises:
        TypeError: One is None or a string, which do not say what is meant.
    """
    for name, value in switches.items():
        if value is None or isinstance(value, str):
            raise TypeError(f"{name} has to be True or False, not {value!r}")
