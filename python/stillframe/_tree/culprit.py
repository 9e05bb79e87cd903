"""Where in a tree the object sits that cannot be pickled: for a note on the error that says so.

Only after an error, so the search may cost as much again: of the parts of a container, the first
that fails alone is gone into. Tensors are not looked at: they have a road of their own.
"""

from __future__ import annotations

import _pickle
import io
from collections.abc import Iterator
from typing import Any

import torch

_MOST_DEPTH = 100
_PROTOCOL = 2


def note(error: BaseException, root: object) -> None:
    """Adds the key path of what cannot be pickled to `error`; nothing where it is not found, or is
    the whole object."""
    try:
        path, node = _find(root)
    except Exception:  # an object that fails in another way when it is asked again
        return
    if path:
        error.add_note(f"stillframe: that is the {type(node).__name__} at {path!r} of the object")


def _find(root: object) -> tuple[str, object]:
    path, node = "", root
    above = [root]
    while len(above) < _MOST_DEPTH:
        for suffix, part in _parts(node):
            if not (any(part is each for each in above) or _can_be_pickled(part)):
                path, node = path + suffix, part
                above.append(part)
                break
        else:
            break
    return path.removeprefix("."), node


def _parts(node: Any) -> Iterator[tuple[str, Any]]:
    """What a node is made of, as `keypaths` names it."""
    if isinstance(node, dict):
        yield from ((f".{key}", value) for key, value in node.items())
    elif isinstance(node, (list, tuple)):
        yield from ((f".{index}", value) for index, value in enumerate(node))
    elif isinstance(node, (set, frozenset)):
        yield from ((".{}", value) for value in node)
    if not isinstance(node, type):
        attributes = getattr(node, "__dict__", None)
        if isinstance(attributes, dict):
            yield from ((f".{name}", value) for name, value in attributes.items())


def _can_be_pickled(node: object) -> bool:
    try:
        _Pickler(io.BytesIO(), _PROTOCOL).dump(node)
    except Exception:
        return False
    return True


class _Pickler(_pickle.Pickler):
    def persistent_id(self, obj: object) -> int | None:
        return 0 if isinstance(obj, (torch.Tensor, torch.UntypedStorage)) else None
