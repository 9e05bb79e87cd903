"""Key paths of the tensors in a pickle that use a given storage, such as "optim.state.0.exp_avg".

The unpickler here imports nothing and runs no code of the pickled objects, so it is safe on any
data. Each class or function becomes a stub that keeps the arguments of its call.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import IO, Any


class Storage:
    """A storage as a pickle names it; its bytes are in the record ``data/<key>``."""

    __slots__ = ("key", "kind", "location", "numel")

    def __init__(self, kind: str, key: str, location: str, numel: int) -> None:
        self.kind = kind  # the name of the storage's class
        self.key = key
        self.location = location  # torch's tag of the device, such as "cuda:0"
        self.numel = numel


class Stub:
    """A stub for an instance of any class, or for the result of any function."""

    _name = ""  # of the class or function; `_stub_class` sets it

    def __new__(cls, *args: Any, **_kwargs: Any) -> Stub:
        stub = object.__new__(cls)
        stub.args = args
        return stub

    args: tuple[Any, ...]
    state: Any = None
    # Most stubs have no items or elements, so all stubs share these empty ones.
    items: Mapping[Any, Any] = MappingProxyType({})
    elements: Sequence[Any] = ()

    # The unpickler calls these methods, as it would call those of the real object.

    def __call__(self, *args: Any) -> Stub:  # the result of a call is a stub too
        return Stub(self, *args)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    # The first item or element gives a stub a dict or list of its own.

    def __setitem__(self, key: Any, value: Any) -> None:
        vars(self).setdefault("items", {})[key] = value

    def append(self, value: Any) -> None:
        self.extend((value,))

    def extend(self, values: Iterable[Any]) -> None:
        vars(self).setdefault("elements", []).extend(values)


def _stub_class(name: str) -> type[Stub]:
    return type("Stub", (Stub,), {"_name": name})


def _stub_for_attribute(_owner: Any, name: Any) -> type[Stub]:
    """Return a stub for an attribute, in place of getattr. Pickles of protocol 2 call getattr to
    name a nested class."""
    return _stub_class(str(name))


class Reader(pickle.Unpickler):
    """The unpickler that makes stubs.

    Attributes:
        storages: The storages that the pickle has named so far, by key.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.storages: dict[str, Storage] = {}
        self._classes: dict[str, type[Stub]] = {}  # kept, because a class takes 20 us to make

    def find_class(self, module: str, name: str) -> Any:
        if name == "getattr":
            return _stub_for_attribute
        full_name = f"{module}.{name}"
        if full_name not in self._classes:
            self._classes[full_name] = _stub_class(full_name)
        return self._classes[full_name]

    def persistent_load(self, pid: Any) -> Storage:
        _, kind, key, location, numel = pid[:5]
        class_name = getattr(kind, "_name", "")  # `kind` is a stub class, unless the pickle is bad
        storage = Storage(class_name, key, location, numel)
        self.storages.setdefault(str(key), storage)
        return storage


def children(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a node, each with its path relative to the node. The path is "" if users
    know no name or index for the part. The keys of a dict are parts too: they may hold storages."""
    if isinstance(node, dict):
        yield from ((f".{_key(key)}", value) for key, value in node.items())
        yield from (("", key) for key in node)
    elif isinstance(node, (list, tuple)):
        yield from ((f".{index}", value) for index, value in enumerate(node))
    elif isinstance(node, (set, frozenset)):
        yield from (("", value) for value in node)
    elif isinstance(node, Stub):
        for arg in node.args:
            yield from (("", value) for value in _flatten(arg))
        if node.items:
            yield from children(node.items)
        yield from children(node.elements)
        # The state is __dict__, or the tuple (__dict__, slots).
        state = node.state if isinstance(node.state, tuple) else (node.state,)
        yield from (("", part) for part in state)


def _flatten(arg: Any) -> Iterator[Any]:
    """Yield an argument of a call, or its items at any depth if it is a tuple."""
    stack = [arg]
    while stack:
        part = stack.pop()
        if isinstance(part, tuple):
            stack.extend(reversed(part))
        else:
            yield part


def _key(key: Any) -> str:
    """Return a key of a dict as a part of a path."""
    if isinstance(key, tuple):
        return "(" + ", ".join(_key(part) for part in key) + ")"
    if isinstance(key, Stub):
        return "?"
    if isinstance(key, type) and issubclass(key, Stub):
        return key._name
    return str(key)


def tensor_paths_over_storage(data: bytes, key: str) -> list[str]:
    """Return the paths of the tensors (or storage objects) in pickle ``data`` over storage ``key``.

    A path joins dictionary keys, indices and attribute names with dots. The path of the root is
    ``""``. Paths are in tree order. An object with several paths is listed under the first.
    """
    paths: dict[str, None] = {}
    seen: set[int] = set()
    root = Reader(io.BytesIO(data)).load()
    stack: list[tuple[str, Any]] = [("", root)]
    while stack:
        path, node = stack.pop()
        if isinstance(node, Storage):
            if node.key == key:
                paths[path.removeprefix(".")] = None
            continue
        if isinstance(node, (str, bytes, int, float, type, type(None))) or id(node) in seen:
            continue
        seen.add(id(node))
        parts = [(path + suffix, child) for suffix, child in children(node)]
        stack.extend(reversed(parts))
    return list(paths)
