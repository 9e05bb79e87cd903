"""The key path of an object that cannot be pickled, for a note on the pickler's error.

The search starts at the root and descends into the first part that cannot be pickled on its own.
Tensors count as picklable, because their bytes are saved outside the pickle.
"""

from __future__ import annotations

import _pickle
import io
from collections.abc import Iterator
from typing import Any

import torch

_MOST_DEPTH = 100  # the search enters no more levels of containers than this
_PROTOCOL = 2  # as in `skeleton`


def note(error: BaseException, root: object) -> None:
    """Add the key path of the object that cannot be pickled to `error`, as a note. Add nothing if
    that object is not found, or is `root` itself."""
    try:
        path, node = _find(root)
    except Exception:  # an object in the tree raised
        return
    if path:
        error.add_note(f"stillframe: that is the {type(node).__name__} at {path!r} of the object")


def _find(root: object) -> tuple[str, object]:
    """Return the key path of the innermost object that cannot be pickled, and the object."""
    path, node = "", root
    above = [root]  # the objects from the root down to `node`
    while len(above) < _MOST_DEPTH:
        bad = next(_unpicklable_parts(node, above), None)
        if bad is None:
            break
        suffix, node = bad
        path += suffix
        above.append(node)
    return path.removeprefix("."), node


def _unpicklable_parts(node: object, above: list[object]) -> Iterator[tuple[str, object]]:
    """Yield the parts of `node` that cannot be pickled and are not in `above`."""
    for suffix, part in _parts(node):
        is_above = any(part is each for each in above)
        if not is_above and not _can_be_pickled(part):
            yield suffix, part


def _parts(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a node, each with its component of the key path."""
    if isinstance(node, dict):
        yield from ((f".{key}", value) for key, value in node.items())
    elif isinstance(node, (list, tuple)):
        yield from ((f".{index}", value) for index, value in enumerate(node))
    elif isinstance(node, (set, frozenset)):
        yield from ((".{}", value) for value in node)  # an element has neither key nor index
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
    """A pickler that writes 0 in place of every tensor and storage."""

    def persistent_id(self, obj: object) -> int | None:
        return 0 if isinstance(obj, (torch.Tensor, torch.UntypedStorage)) else None
