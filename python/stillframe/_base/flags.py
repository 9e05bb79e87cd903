"""The check of boolean arguments, for every call that has one."""

from __future__ import annotations


def refuse_unclear(**switches: object) -> None:
    """Refuse unclear values of boolean arguments.

    Raises:
        TypeError: An argument is None or a string.
    """
    for name, value in switches.items():
        if value is None or isinstance(value, str):
            raise TypeError(f"{name} has to be True or False, not {value!r}")
