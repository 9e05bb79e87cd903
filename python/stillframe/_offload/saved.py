"""Saved-tensor hooks that save references to weights, so that autograd does not keep their memory.

Autograd would keep a weight on the device from forward to backward. So a reference is saved
instead: which weight, and which view of it. If autocast has cast the weight, backward repeats the
cast.

torch calls only the innermost pair of saved-tensor hooks. Our pair passes other tensors on to the
enclosing pair. So an offloaded layer may run inside `torch.utils.checkpoint` or other hooks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

# The names of autograd nodes whose output is a view of their input.
_VIEWS = frozenset(
    f"{name}Backward{number}"
    for name in ("T", "Transpose", "Permute", "View", "Expand", "Squeeze", "Unsqueeze", "Select")
    for number in (0, 1)
)
_MAX_VIEWS = 4  # the most views between a cast of a weight and the saved tensor


class WeightUse(Protocol):
    """One forward of a layer. `index` is the index of a weight in the layer."""

    def version(self, index: int) -> int:
        """Return the version of the weight on the device."""

    def check(self, index: int, version: int) -> None:
        """Raise autograd's error if the weight was written to since it was saved with `version`."""

    def weight(self, index: int) -> Tensor:
        """Bring the weight to the device, and return it there."""


class View(NamedTuple):
    """The position of a tensor in another tensor's memory."""

    size: torch.Size
    stride: tuple[int, ...]
    begin: int  # the offset in bytes from the first byte of the other tensor
    dtype: torch.dtype

    def of(self, tensor: Tensor) -> Tensor:
        """Return the view of `tensor`, which is the other tensor or a copy of it."""
        begin = tensor.storage_offset() * tensor.itemsize + self.begin
        made = torch.empty(0, dtype=self.dtype, device=tensor.device)
        return made.set_(
            tensor.untyped_storage(), begin // self.dtype.itemsize, self.size, self.stride
        )


class _WeightView(NamedTuple):
    """A reference to a view of a weight, or of a cast of a weight."""

    use: WeightUse
    weight_index: int  # in the layer
    version: int  # of the weight on the device, when autograd saved the view
    view: View
    is_cast: bool  # the view is of a cast to the view's dtype

    def unpack(self) -> Tensor:
        self.use.check(self.weight_index, self.version)
        weight = self.use.weight(self.weight_index)
        if self.is_cast:
            weight = weight.to(self.view.dtype)
        return self.view.of(weight)


class Kept(NamedTuple):
    """A tensor that is saved as it is."""

    tensor: Tensor
    version: int  # when it was saved; torch does not check tensors that a hook has packed

    def unpack(self) -> Tensor:
        check_version(
            self.tensor, self.version, "one of the variables needed for gradient computation"
        )
        return self.tensor


class _PackedByOuterHooks(NamedTuple):
    """An object that the enclosing saved-tensor hooks have packed."""

    packed: Any
    unpack_hook: Callable[[Any], Tensor]

    def unpack(self) -> Tensor:
        return self.unpack_hook(self.packed)


def check_version(tensor: Tensor, version: int, what: str, now: int | None = None) -> None:
    """Raise autograd's error if a saved tensor was written to before backward.

    Args:
        version: The version when the tensor was saved.
        what: The tensor's name in the message.
        now: The present version, by default the tensor's own.
    """
    now = tensor._version if now is None else now
    if now != version:
        raise RuntimeError(
            f"{what} has been modified by an inplace operation: a {tuple(tensor.shape)} tensor is"
            f" at version {now}; expected version {version} instead"
        )


class _WeightRange(NamedTuple):
    """A weight on the device."""

    begin: int  # the range of bytes in the storage
    end: int
    weight_index: int  # in the layer


class Weights:
    """The weights on the device whose layers' forwards run now."""

    def __init__(self) -> None:
        # For each storage, by the address of its StorageImpl: the forward that uses it, and the
        # weights in it.
        self._uses: dict[int, tuple[WeightUse, list[_WeightRange]]] = {}

    def add(self, use: WeightUse, tensors: Sequence[Tensor]) -> None:
        """Until `drop`, have autograd save a reference in place of each view of a layer's tensors
        on the device. `use` is the forward that runs."""
        for index, tensor in enumerate(tensors):
            begin = int(tensor.storage_offset()) * tensor.itemsize
            end = begin + tensor.numel() * tensor.itemsize
            _, ranges = self._uses.setdefault(tensor.untyped_storage()._cdata, (use, []))
            ranges.append(_WeightRange(begin, end, index))

    def drop(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._uses.pop(tensor.untyped_storage()._cdata, None)

    def find(self, tensor: Tensor) -> _WeightView | None:
        """Return the reference to save for a view or a cast of a weight; None for other tensors."""
        if not self._uses or tensor.layout is not torch.strided or type(tensor) is not Tensor:
            return None
        if tensor.is_conj() or tensor.is_neg():
            return None
        begin = int(tensor.storage_offset()) * tensor.itemsize
        use, ranges = self._uses.get(tensor.untyped_storage()._cdata, (None, []))
        for each in ranges:
            if use is not None and each.begin <= begin < each.end:
                view = _describe_view(tensor, begin - each.begin)
                return _WeightView(use, each.weight_index, tensor._version, view, is_cast=False)
        use, index = _find_weight_behind_cast(tensor)
        if use is None:
            return None
        return _WeightView(
            use, index, use.version(index), _describe_view(tensor, begin), is_cast=True
        )


def _describe_view(tensor: Tensor, begin: int) -> View:
    return View(tensor.shape, tensor.stride(), begin, tensor.dtype)


weights = Weights()


class OnloadFunctionBase:
    """The base class of the autograd function whose outputs are weights on the device. Each node
    has these attributes."""

    use: WeightUse  # the forward that uses the weights
    indices: list[int]  # output i is the weight with index `indices[i]` in its layer


def _find_weight_behind_cast(tensor: Tensor) -> tuple[WeightUse | None, int]:
    """Return the use and the index of a weight if the tensor is autocast's cast of the weight, or a
    view of the cast. Otherwise return None and 0."""
    node = tensor.grad_fn
    for _ in range(_MAX_VIEWS):
        if node is None or node.name() not in _VIEWS:
            break
        node = node.next_functions[0][0]
    if node is None or node.name() != "ToCopyBackward0":
        return None, 0
    # The cast's input is an output of the node before it: a node of `OnloadFunctionBase` for a
    # weight.
    input_node: Any
    input_node, output_index = node.next_functions[0]
    # The class of an autograd function's node has `_forward_cls`, which is the function.
    function = getattr(type(input_node), "_forward_cls", None)
    if function is None or not issubclass(function, OnloadFunctionBase):
        return None, 0
    return input_node.use, input_node.indices[output_index]


def innermost() -> Hooks | None:
    """Return the innermost pair of saved-tensor hooks of this thread, if any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


class SavedTensorHooks:
    """A pair of saved-tensor hooks.

    Weights are saved as references. Other tensors are passed to `replace`, which returns an object
    to save instead. If `replace` returns None, the tensor is passed on to the enclosing hooks.
    """

    def __init__(self, replace: Callable[[Tensor], Any] = lambda tensor: None) -> None:
        self._replace = replace
        self._outer: Hooks | None = None  # the enclosing pair
        # The compiler must not trace the hook.
        pack = functools.partial(_exclude_from_compilation(SavedTensorHooks._pack), self)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, _unpack)

    def enter(self) -> None:
        self._outer = innermost()
        self._hooks.__enter__()

    def leave(self) -> None:
        self._hooks.__exit__()

    def _pack(self, tensor: Tensor) -> Any:
        """Return the object that autograd saves in place of a tensor. The object has a method
        `unpack`, which returns the tensor."""
        replacement = weights.find(tensor)
        if replacement is None:
            replacement = self._replace(tensor)
        if replacement is not None:
            return replacement
        if self._outer is not None:
            pack, unpack = self._outer
            return _PackedByOuterHooks(pack(tensor), unpack)
        # Detached: otherwise a node that saves its own output would never be freed.
        return Kept(tensor.detach(), tensor._version)


@functools.cache
def _exclude_from_compilation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of the function that torch's compiler does not trace. Make it only once."""
    return torch.compiler.disable(function)  # type: ignore[no-any-return, no-untyped-call]


def _unpack(packed: Any) -> Tensor:
    tensor: Tensor = packed.unpack()
    return tensor
