"""Runs several steps that must all be attempted, even if some of them fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def run_all(steps: Iterable[Callable[[], object]], error: BaseException | None = None) -> None:
    """Run each step, even if earlier steps have raised. Then raise the first error, with the other
    errors as notes. `error`, if given, counts as the first error."""
    errors = [] if error is None else [error]
    for step in steps:
        try:
            step()
        except BaseException as raised:
            errors.append(raised)
    if not errors:
        return
    try:
        for other in dict.fromkeys(map(repr, errors[1:])):  # each message once
            if other != repr(errors[0]):
                errors[0].add_note(f"and then: {other}")
        raise errors[0]
    finally:
        errors.clear()  # breaks a reference cycle: tracebacks refer to this frame
