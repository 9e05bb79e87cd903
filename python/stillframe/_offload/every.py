"""Several things that all have to happen, whatever becomes of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def every(steps: Iterable[Callable[[], object]], error: BaseException | None = None) -> None:
    """Takes each step, whatever those before it have raised. Then raises the first error: what the
    later ones were stands in its notes.

    Args:
        error: One that came before them all.
    """
    errors = [] if error is None else [error]
    for step in steps:
        try:
            step()
        except BaseException as error:
            errors.append(error)
    if not errors:
        return
    try:
        for other in dict.fromkeys(map(repr, errors[1:])):
            if other != repr(errors[0]):
                errors[0].add_note(f"and then: {other}")
        raise errors[0]
    finally:
        errors.clear()  # they refer to this frame
