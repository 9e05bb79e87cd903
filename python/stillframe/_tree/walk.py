"""A tree of containers and tensors: finds its storages, and rebuilds the tree over other storages.

`Tree(root)` walks the tree once and numbers its storages. The caller copies their bytes. Then
`rebuild` walks the tree again and puts tensors over the new storages into new containers. An object
that occurs twice in the old tree occurs twice in the new one, and so does a storage.

The walk enters dicts, lists, tuples and their subclasses, deques, sets, tensors with their
attributes, and storages. NumPy arrays are copied. Every other object is *left whole* (*opaque*):
the new tree has the very same object. So a tree may contain objects that cannot be pickled, such as
process groups.

New tensors are made in one of four ways:
- C code (skeleton/copies.c) makes all plain tensors, as skeleton.py defines them, in one call. It
  also makes the local tensors of DTensors; `rebuild` puts new DTensors around them.
- Other strided tensors are made from offset, size and stride.
- Tensors of wrapper subclasses are taken apart with `__tensor_flatten__` and put together again.
- All others (sparse, quantized, nested, other subclasses) reduce themselves as for `torch.save`.
  The storages in the result are replaced. A tensor is refused if the result has an object that is
  left whole and has tensors inside, as for ShardedTensor: these would keep the old memory.

Garbage collection is paused during both walks. It would scan the whole process repeatedly, which
doubled the time.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.storage import TypedStorage, UntypedStorage
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stillframe import _core
from stillframe._base import device as _device
from stillframe._base.calls import no_garbage_collection
from stillframe._base.distributed import dtensor_class_if_imported
from stillframe._tree import skeleton
from stillframe._tree.rebuild import (
    ATOMS,
    PLAIN,
    Flattened,
    Reduced,
    TreeBuilder,
    attributes_from_state,
    attributes_of,
    find_opaque_object_with_tensors,
    getstate,
    is_array,
    is_atom,
)


def _can_be_flattened(tensor: Tensor) -> bool:
    return bool(is_traceable_wrapper_subclass(tensor))


class Tree:
    """The storages under a tree, and a way to rebuild the tree over other storages.

    Attributes:
        storages: The storages, each once; this object keeps them alive.
        numbers: The storages' numbers, by the addresses of their StorageImpls.
        rows: One ``struct sfr_source`` for each storage, every lane 0. The address is 0 if a
            storage is neither in host memory nor on a CUDA device.
        elsewhere: Numbers of the storages whose address in `rows` is 0. torch copies their bytes.
        devices: Numbers of the CUDA devices that have storages.
        reads_bytes: `rebuild` may read the storages' bytes, so they must be copied before. This is
            so if some tensor has to be made from what its `__reduce_ex__` returns.
        left_whole: Objects that are neither containers nor tensors nor plain values, in the order
            of the walk. The new tree has the same objects.
    """

    def __init__(self, root: object, *, lanes: bool = True) -> None:
        """Walk the tree under `root`. If `lanes` is False, torch has to copy storages on CUDA
        devices too, so they are in `elsewhere`."""
        self._root = root
        self._lanes = lanes
        self.reads_bytes = False
        self.left_whole: list[object] = []
        self._collector: _core.Collector | None = skeleton.tree_collector()
        # How to make each tensor that is not plain, by its id; see `TreeBuilder`.
        self._views: dict[int, int] = {}
        self._others: dict[int, Flattened | Reduced | Tensor] = {}
        self._kept_alive: list[Tensor] = []  # keeps tensors alive, so that their ids stay unique
        self._dtensor_class = dtensor_class_if_imported()
        # id of a DTensor -> (the DTensor, its local tensor)
        self._dtensors: dict[int, tuple[Any, Tensor]] = {}
        # DTensors on which users have set attributes, with these attributes.
        self._with_attributes: list[tuple[Any, dict[str, Any]]] = []
        with torch._C.DisableTorchFunction(), no_garbage_collection():
            self._find(root, self._collector)
            result = self._collector.finish()
        self.storages, self.numbers, self.rows, self.elsewhere, num_exact, self.devices = result
        # The collector has counted the tensors of the types in PLAIN.
        others = [each for each in self._kept_alive if type(each) not in PLAIN]
        self._num_tensors = num_exact + len(others) + len(self._dtensors)
        if self.devices and not lanes:
            self._move_device_storages_elsewhere()

    def _find(self, root: object, collector: _core.Collector) -> None:
        """Walk the tree and find its tensors. The collector, which is C code, handles plain
        containers and plain tensors."""
        seen: set[int] = set()
        stack = self._collect_plain((root,), seen, collector)
        while stack:
            node = stack.pop()
            kind = type(node)
            if kind in ATOMS or id(node) in seen:
                continue
            seen.add(id(node))
            stack += self._collect_plain(self._record_node(node, kind, collector), seen, collector)

    def _collect_plain(
        self, nodes: list[Any] | tuple[Any, ...], seen: set[int], collector: _core.Collector
    ) -> list[Any]:
        """Let the collector walk the nodes. Return the nodes that it does not know as a stack, the
        first one last."""
        unknown = collector.walk(nodes, seen)
        if self._dtensor_class is not None and unknown:
            unknown = self._record_dtensors(unknown, collector)
        unknown.reverse()
        return unknown

    def _record_dtensors(self, nodes: list[Any], collector: _core.Collector) -> list[Any]:
        """Record the DTensors among the nodes. Return the nodes that are still to be walked."""
        dtensors = self._dtensors
        to_walk, local_tensors = [], []
        for node in nodes:
            if type(node) is not self._dtensor_class:
                to_walk.append(node)
            elif id(node) not in dtensors:
                local_tensor = node._local_tensor
                dtensors[id(node)] = node, local_tensor
                local_tensors.append(local_tensor)
                attributes = attributes_of(node)
                if attributes:
                    self._with_attributes.append((node, attributes))
                    to_walk += collector.collect(tuple(attributes.values()))
        if local_tensors:  # `collect` keeps the plain ones, and returns the others
            to_walk += collector.collect(local_tensors)
        return to_walk

    def _record_node(
        self, node: Any, kind: type[Any], collector: _core.Collector
    ) -> list[Any] | tuple[Any, ...]:
        """Record a node that is not plain, and return the objects in it that are to be walked."""
        if isinstance(node, Tensor):
            return self._record_non_plain_tensor(node, collector)
        if isinstance(node, dict):
            return [*node.values(), *attributes_of(node).values()]
        if isinstance(node, (list, tuple)):
            return [*node, *attributes_of(node).values()]
        if isinstance(node, (set, frozenset, deque)):
            return list(node)
        if isinstance(node, (UntypedStorage, TypedStorage)):
            storage = node if isinstance(node, UntypedStorage) else node._untyped_storage
            self._add_storage(storage, _device.device_number_of(storage.device), collector)
        elif not (is_array(node) or is_atom(node) or kind is bytearray):
            self.left_whole.append(node)
        return []

    def _record_non_plain_tensor(self, tensor: Tensor, collector: _core.Collector) -> list[Any]:
        """Record a tensor that is not plain, and return the objects in it that are to be walked."""
        key = id(tensor)
        if key in self._views or key in self._others:
            return []
        self._kept_alive.append(tensor)
        if type(tensor) in PLAIN and tensor.is_meta:
            self._others[key] = tensor  # it has no bytes, so the new tree has the same tensor
            return []
        if (
            type(tensor) in PLAIN
            and tensor.layout is torch.strided
            and not (tensor.is_quantized or tensor.is_nested)
        ):
            device = _device.device_number_of_tensor(tensor)
            self._views[key] = self._add_storage(tensor.untyped_storage(), device, collector)
            return list(attributes_from_state(getstate(tensor)).values())
        if _can_be_flattened(tensor):
            flattened = Flattened(tensor)
            opaque = find_opaque_object_with_tensors([flattened.context], flattened.context)
            if opaque is not None:
                raise TypeError(self._describe_refused_tensor(tensor, opaque))
            self._others[key] = flattened
            # Other parts, such as the device mesh of a DTensor subclass, are not walked.
            inner = [part for part in flattened.inner.values() if isinstance(part, Tensor)]
            return [*inner, *attributes_of(tensor).values()]
        reduced = Reduced(tensor)
        opaque = find_opaque_object_with_tensors([*reduced.args, reduced.state])
        if opaque is not None:
            raise TypeError(self._describe_refused_tensor(tensor, opaque))
        self.reads_bytes = True
        self._others[key] = reduced
        return [*reduced.args, reduced.state]

    def _describe_refused_tensor(self, tensor: Tensor, opaque: object) -> str:
        """Return the message about a tensor with bytes in `opaque`, an object not entered."""
        path = next((path for path, _ in paths(self._root, lambda node: node is tensor)), "")
        kind = type(tensor).__qualname__
        subject = f"{path} is" if path else "there is"
        return (
            f"{subject} a {kind}, whose bytes cannot be copied: they"
            f" are in an object of class {type(opaque).__qualname__} inside of it, which would keep"
            f" its live memory. Take the tensors out of the {kind}, or save it with async_save"
        )

    def _add_storage(self, storage: UntypedStorage, device: int, collector: _core.Collector) -> int:
        """Return the number of a storage, new or known; `device` is as in
        `_device.device_number_of`."""
        if device > 0 and not self._lanes:
            device = -1  # the collector then puts the storage into `elsewhere`
        return collector.add_storage(storage, storage._cdata, device, 0, torch.uint8)

    def _move_device_storages_elsewhere(self) -> None:
        """Move the storages on CUDA devices to `elsewhere`, so that torch copies them."""
        for number in range(len(self.storages)):
            row_offset = number * skeleton.SOURCE.size
            _, nbytes, _, device = skeleton.SOURCE.unpack_from(self.rows, row_offset)
            is_on_device = device != 0
            if is_on_device:
                skeleton.SOURCE.pack_into(self.rows, row_offset, 0, nbytes, 0, 0)
                self.elsewhere.append(number)
        self.devices = ()

    def copy_objects(self) -> dict[int, Any]:
        """Return deep copies of the objects in `left_whole`, by the ids of these objects. An object
        that two of them share is copied once.

        An object that cannot be copied is skipped. When it is pickled later, that raises the error.
        """
        memo: dict[int, Any] = {}
        copies: dict[int, Any] = {}
        for node in self.left_whole:
            with contextlib.suppress(Exception):
                copies[id(node)] = copy.deepcopy(node, memo)
        return copies

    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.sources())

    def sources(self) -> Iterator[tuple[int, int]]:
        """Yield the address and the length in bytes of each storage, as in `rows`."""
        return zip(self._column(0), self._column(1), strict=True)

    def _column(self, number: int) -> memoryview:
        """Return a column of `rows`: the addresses (0) or the lengths in bytes (1)."""
        # A row has three words of 8 bytes: the address, the length, and lane and device.
        return memoryview(self.rows).cast("Q")[number::3]

    def rebuild(
        self,
        memory: Any,
        offsets: list[int],
        *,
        objects: dict[int, Any] | None = None,
    ) -> tuple[Any, int]:
        """Return the tree over new host storages, and the address of `memory`. The address is 0 if
        there are no bytes. Call it once.

        Args:
            memory: An object with the buffer protocol. It holds the bytes of all storages except
                those in `elsewhere`, which torch copies into it now.
            offsets: The offset of each storage in `memory`.
            objects: id of an object in `left_whole` -> the object that replaces it in the new tree.
        """
        collector, self._collector = self._collector, None
        assert collector is not None
        # Inference mode would make tensors that cannot be used outside it.
        with (
            torch._C.DisableTorchFunction(),
            torch.inference_mode(False),
            torch.no_grad(),
            no_garbage_collection(),
        ):
            memo, tensor_of, not_made = collector.copies(memory, offsets, skeleton.make_tensors)
            # C code has not made these tensors, so the builder makes them.
            self._views.update((id(tensor), number) for tensor, number in not_made)
            memo.update(objects or {})
            nbytes = self._column(1)  # of each storage
            builder = TreeBuilder(
                memo, tensor_of, self._views, self._others, self.numbers, memory, offsets, nbytes
            )
            for number in self.elsewhere:
                builder.copy_storage(number, self.storages[number])
            builder.make_dtensors(self._dtensor_class, self._dtensors, self._with_attributes)
            built = builder.build(self._root)
            if self.reads_bytes:
                # torch keeps rebuilt sparse tensors alive in a list until this call.
                torch._utils._validate_loaded_sparse_tensors()  # type: ignore[no-untyped-call]
            return built, builder.address()

    def num_tensors(self) -> int:
        """Return the number of distinct tensors in the tree, including those inside others."""
        return self._num_tensors

    def forget(self) -> None:
        """Release the tree's tensors but not its storages."""
        self._root = None
        self._collector = None
        self._views = {}
        self._others = {}
        self._kept_alive = []
        self._dtensors = {}
        self._with_attributes = []


def paths(root: object, is_match: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Yield the key path (``optimizer_states.0.state``) of each object for which `is_match` returns
    True, and the object. An object that occurs twice has the first path.

    The search enters the containers that `Tree` enters, but no attributes and no matching object.
    """
    seen: set[int] = set()
    stack: list[tuple[str, Any]] = [("", root)]
    while stack:
        path, node = stack.pop()
        if id(node) in seen:
            continue
        if is_match(node):
            seen.add(id(node))
            yield path.removeprefix("."), node
            continue
        if not isinstance(node, (dict, list, tuple, set, frozenset, deque)):
            continue
        seen.add(id(node))
        pairs = node.items() if isinstance(node, dict) else enumerate(node)
        stack.extend(reversed([(f"{path}.{name}", value) for name, value in pairs]))
