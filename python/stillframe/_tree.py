"""A tree of containers and tensors: which storages are under it, and the same tree over others.

`Tree(root)` walks the tree once and numbers its storages; `rebuild` walks it again and puts tensors
over new storages into new containers. In between somebody copies the bytes. What belongs together
stays together: a storage is copied once, tensors over one storage are so again, a container or
tensor that stands at two places does so again.

What is walked into: dicts, lists, tuples and their subclasses (namedtuple, OrderedDict with its
attributes, defaultdict), deques, sets; tensors of every kind, storages, attributes of tensors.
NumPy arrays are copied. Every other object is left whole: the very same object is in the new tree.

Plain tensors are described by offset, size and stride. All others (sparse, quantized, nested,
subclasses) reduce themselves as they do for `torch.save`, and the storages in what they reduce to
are exchanged; wrapper subclasses that can be flattened (DTensor) are flattened.
"""

from __future__ import annotations

import array
import contextlib
import gc
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.storage import TypedStorage, UntypedStorage
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stillframe import _device
from stillframe._tree_build import (
    ATOMS,
    PLAIN,
    Builder,
    Flattened,
    Reduced,
    attributes_of,
    dict_of,
    getstate,
    is_array,
    is_atom,
)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Many thousand new objects, none of them garbage, would have the collector of garbage look
    through the whole process again and again: it took twice as long as making them."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _can_be_flattened(tensor: Tensor) -> bool:
    return bool(is_traceable_wrapper_subclass(tensor))


class Tree:
    """The storages under a tree, and a way to make the tree again over others.

    Attributes:
        storages: The storages, each once; they are alive as long as this object.
        identities: Addresses of their StorageImpls.
        rows: One ``struct sfr_source`` for each, every lane 0. The address is 0 where a storage is
            neither in host memory nor on a CUDA device.
        elsewhere: Numbers of those.
        devices: Numbers of the CUDA devices that storages live on.
        reads_bytes: Whether making the tree anew looks at the copied bytes: what reduces itself
            may check them.
        left_whole: Objects that are neither containers nor tensors nor plain values, in the order
            in which they were met.
    """

    def __init__(self, root: object, *, lanes: bool = True) -> None:
        """With `lanes` False, storages on CUDA devices are "elsewhere" too."""
        self._root = root
        self._lanes = lanes
        self._places: set[int] = set()
        self.reads_bytes = False
        self.storages: list[UntypedStorage] = []
        self.elsewhere: list[int] = []
        self.left_whole: list[object] = []
        self._number_of: dict[int, int] = {}  # by identity, in the order of the numbers
        self._nbytes: list[int] = []
        self._words: list[int] = []  # of the rows
        # By id of the tensor: the number of a plain one's storage, or what another is made from. An
        # int is no work for the collector of garbage, of which there may be many thousand.
        self._tensors: dict[int, Any] = {}
        self._held: list[Tensor] = []  # an id is a tensor's as long as that lives
        with torch._C.DisableTorchFunction(), _no_collections():
            self._find(root)
        self.identities = list(self._number_of)
        self.rows = bytearray(array.array("Q", self._words))
        self._words.clear()
        self.devices = tuple(sorted(place - 1 for place in self._places if place > 0))

    def _find(self, root: object) -> None:
        seen: set[int] = set()
        stack: list[Any] = [root]
        atoms, plain = ATOMS, PLAIN
        while stack:
            node = stack.pop()
            kind = type(node)
            if kind in plain:
                self._meet((node,), stack)
                continue
            if kind in atoms or id(node) in seen:
                continue
            seen.add(id(node))
            children = self._children(node, kind)
            inner = self._meet(children, stack)
            inner.reverse()  # in the order of the tree: what was made so is copied so
            stack.extend(inner)

    def _meet(self, nodes: Collection[Any], stack: list[Any]) -> list[Any]:
        """Enters those that are plain tensors, and returns the others. What hangs on a tensor goes
        onto the stack."""
        tensors, held, number_of, words = self._tensors, self._held, self._number_of, self._words
        plain, strided, on_host, others = PLAIN, torch.strided, _device.on_host, []
        for node in nodes:
            if type(node) not in plain:
                others.append(node)
                continue
            key = id(node)
            if key in tensors:
                continue
            if (
                not (node.layout is strided and on_host(node))
                or node.is_quantized
                or node.is_nested
            ):
                stack.extend(self._meet_other(node))
                continue
            # What `_enter` does, without the call.
            held.append(node)
            storage = node.untyped_storage()
            number = number_of.setdefault(storage._cdata, len(number_of))
            if number == len(self.storages):
                nbytes = storage.nbytes()
                self.storages.append(storage)
                self._nbytes.append(nbytes)
                words += (storage.data_ptr() if nbytes else 0, nbytes, 0)
            tensors[key] = number
            state = getstate(node)  # asking for __dict__ would make one
            if state is not None:
                stack.extend(dict_of(state).values())
        return others

    def _children(self, node: Any, kind: type[Any]) -> Collection[Any]:
        if kind is dict:
            return tuple(node.values())
        if kind is list or kind is tuple:
            return tuple(node)
        if isinstance(node, Tensor):
            return self._meet_other(node)
        if isinstance(node, dict):
            return [*node.values(), *attributes_of(node).values()]
        if isinstance(node, (list, tuple)):
            return [*node, *attributes_of(node).values()]
        if isinstance(node, (set, frozenset, deque)):
            return list(node)
        if isinstance(node, (UntypedStorage, TypedStorage)):
            storage = node if isinstance(node, UntypedStorage) else node._untyped_storage
            self._enter(storage, _device.place_of(storage.device))
        elif not (is_array(node) or is_atom(node) or kind is bytearray):
            self.left_whole.append(node)
        return []

    def _meet_other(self, tensor: Tensor) -> list[Any]:
        """Enters a tensor of any kind, and returns what else it leads to."""
        key = id(tensor)
        if key in self._tensors:
            return []
        self._held.append(tensor)
        if type(tensor) in PLAIN and tensor.is_meta:
            self._tensors[key] = tensor  # it has no bytes
            return []
        if (
            type(tensor) in PLAIN
            and tensor.layout is torch.strided
            and not (tensor.is_quantized or tensor.is_nested)
        ):
            place = _device.place_of_tensor(tensor)
            self._tensors[key] = self._enter(tensor.untyped_storage(), place)
            return list(dict_of(getstate(tensor)).values())
        if _can_be_flattened(tensor):
            flattened = Flattened(tensor)
            self._tensors[key] = flattened
            return [*flattened.inner.values(), *attributes_of(tensor).values()]
        reduced = Reduced(tensor)
        self.reads_bytes = True
        self._tensors[key] = reduced
        return [*reduced.args, reduced.state]

    def _enter(self, storage: UntypedStorage, place: int) -> int:
        """The number of a storage, new or known; `place` as `_device.place_of` says it."""
        number = self._number_of.setdefault(storage._cdata, len(self._number_of))
        if number == len(self.storages):
            nbytes = storage.nbytes()
            self.storages.append(storage)
            self._nbytes.append(nbytes)
            if place > 0:
                if not self._lanes:
                    place = -1
                elif nbytes:
                    self._places.add(place)
            # struct sfr_source: addr, nbytes, and a lane (0) and a device of four bytes each
            addr = storage.data_ptr() if place >= 0 and nbytes else 0
            self._words += (addr, nbytes, max(place, 0) << 32)
            if place < 0:
                self.elsewhere.append(number)
        return number

    def nbytes(self) -> int:
        """Bytes of all storages."""
        return sum(self._nbytes)

    def sources(self) -> Iterator[tuple[int, int]]:
        """Address (0 where it is not in host memory) and bytes of each storage."""
        return zip(memoryview(self.rows).cast("Q")[::3], self._nbytes, strict=True)

    def rebuild(
        self, memory: Any, offsets: list[int], *, identities: bool = False
    ) -> tuple[Any, list[int]]:
        """The tree over new host storages, and the addresses of their StorageImpls if wanted.

        Args:
            memory: An object with the buffer protocol that holds their bytes.
            offsets: Where each begins.

        Storages elsewhere are copied here, by torch.
        """
        # Inference mode would make tensors that cannot be used outside it.
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch._C.DisableTorchFunction(),
            _no_collections(),
        ):
            builder = Builder(self._tensors, self._number_of, memory, offsets, self._nbytes)
            for number in self.elsewhere:
                builder.fetch(number, self.storages[number])
            built = builder.build(self._root)
            if self.reads_bytes:
                # torch lists sparse tensors that were made anew, which would keep the memory.
                torch._utils._validate_loaded_sparse_tensors()  # type: ignore[no-untyped-call]
            return built, builder.identities() if identities else []

    def num_tensors(self) -> int:
        """Distinct tensors of the tree; those inside others count too."""
        return len(self._tensors)

    def forget(self) -> None:
        """Lets go of the tree's tensors; the storages stay."""
        self._root = None
        self._tensors = {}
        self._held = []


def paths(root: object, wanted: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Key paths (``optimizer_states.0.state``) of the objects in a tree that are `wanted`, each at
    its first place, with the object. Containers are walked as `Tree` does."""
    seen: set[int] = set()
    stack: list[tuple[str, Any]] = [("", root)]
    while stack:
        path, node = stack.pop()
        if wanted(node) and id(node) not in seen:
            seen.add(id(node))
            yield path.removeprefix("."), node
            continue
        if not isinstance(node, (dict, list, tuple, set, frozenset, deque)) or id(node) in seen:
            continue
        seen.add(id(node))
        pairs = node.items() if isinstance(node, dict) else enumerate(node)
        stack.extend(reversed([(f"{path}.{name}", value) for name, value in pairs]))
