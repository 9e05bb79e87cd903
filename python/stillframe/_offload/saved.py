"""Saved-tensor hooks that save references to weights, so that autograd does not keep their memory.

An autograd node that needs a weight for its backward would keep the weight's memory on the device
until then. So a reference is saved instead: which weight, and which view of it. Under autocast the
node needs a cast of the weight. Backward then repeats the cast, which gives the same bytes.

torch calls only the innermost pair of saved-tensor hooks. Our pair passes tensors that are not
weights on to the enclosing pair. So `torch.utils.checkpoint` and other users of such hooks work
around an offloaded layer as well as inside it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

# Nodes whose output is a view of their input.
_VIEWS = frozenset(
    f"{name}Backward{number}"
    for name in ("T", "Transpose", "Permute", "View", "Expand", "Squeeze", "Unsqueeze", "Select")
    for number in (0, 1)
)
# A view of a cast of a weight is recognised behind at most this many nodes of `_VIEWS`.
_MOST_VIEWS = 4


class WeightUse(Protocol):
    """One forward of a layer, whose weights return to the device when backward asks for them."""

    def version(self, number: int) -> int:
        """Return the version of the weight with this index in its layer, on the device."""

    def check(self, number: int, version: int) -> None:
        """Raise autograd's error if the weight was written to since it was saved with `version`."""

    def weight(self, number: int) -> Tensor:
        """Return the weight on the device, with the value that it has on the CPU."""


class View(NamedTuple):
    """The position of a tensor in another tensor's memory."""

    size: torch.Size
    stride: tuple[int, ...]
    begin: int  # its first byte, counted from the first byte of the other tensor
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
    number: int  # the weight's index in its layer's tensors
    version: int  # of the weight on the device, when autograd saved the view
    view: View
    cast: bool  # the view is of a cast to the view's dtype

    def unpack(self) -> Tensor:
        self.use.check(self.number, self.version)
        weight = self.use.weight(self.number)
        return self.view.of(weight.to(self.view.dtype) if self.cast else weight)


class Kept(NamedTuple):
    """A tensor that is saved as it is. Its version is saved too, because torch checks only the
    versions of tensors that no hook has packed."""

    tensor: Tensor
    version: int

    def unpack(self) -> Tensor:
        check_version(
            self.tensor, self.version, "one of the variables needed for gradient computation"
        )
        return self.tensor


class _Passed(NamedTuple):
    """An object that the enclosing saved-tensor hooks have packed."""

    packed: Any
    back: Callable[[Any], Tensor]  # the unpack hook of the same pair

    def unpack(self) -> Tensor:
        return self.back(self.packed)


def check_version(tensor: Tensor, version: int, what: str, now: int | None = None) -> None:
    """Raise autograd's error if a saved tensor was written to before backward has used it.

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
    """A weight on the device: its range of bytes in its storage, and its index in the layer."""

    begin: int
    end: int
    number: int


class Weights:
    """The weights that are on the device while their layers' forwards run."""

    def __init__(self) -> None:
        # By the address of a StorageImpl, the forward that uses it and the weights in it.
        self._uses: dict[int, tuple[WeightUse, list[_WeightRange]]] = {}

    def add(self, use: WeightUse, tensors: Sequence[Tensor]) -> None:
        """Have views of these tensors saved as references, until `drop`.

        Args:
            tensors: The tensors of the use's layer on the device, in the layer's order.
        """
        for index, tensor in enumerate(tensors):
            begin = int(tensor.storage_offset()) * tensor.itemsize
            end = begin + tensor.numel() * tensor.itemsize
            _, ranges = self._uses.setdefault(tensor.untyped_storage()._cdata, (use, []))
            ranges.append(_WeightRange(begin, end, index))

    def drop(self, tensors: Sequence[Tensor]) -> None:
        """Undo `add`."""
        for tensor in tensors:
            self._uses.pop(tensor.untyped_storage()._cdata, None)

    def find(self, tensor: Tensor) -> _WeightView | None:
        """Return the reference to save for a view or a cast of a weight; None for other tensors."""
        if not self._uses or tensor.layout is not torch.strided or type(tensor) is not Tensor:
            return None
        if tensor.is_conj() or tensor.is_neg():
            return None  # its values differ from those of the weight's bytes
        begin = int(tensor.storage_offset()) * tensor.itemsize
        use, ranges = self._uses.get(tensor.untyped_storage()._cdata, (None, []))
        for each in ranges:
            if use is not None and each.begin <= begin < each.end:
                view = _view(tensor, begin - each.begin)
                return _WeightView(use, each.number, tensor._version, view, cast=False)
        use, number = _cast_of(tensor)
        if use is None:
            return None
        return _WeightView(use, number, use.version(number), _view(tensor, begin), cast=True)


def _view(tensor: Tensor, begin: int) -> View:
    return View(tensor.shape, tensor.stride(), begin, tensor.dtype)


weights = Weights()


class Onloading:
    """The base class of the autograd function whose outputs are weights on the device (see
    `layers.py`). Each of its nodes has these attributes."""

    use: WeightUse  # the forward that the weights are for
    indices: list[int]  # output i is the weight with index `indices[i]` in its layer


def _cast_of(tensor: Tensor) -> tuple[WeightUse | None, int]:
    """Return the use and the index of a weight, if the tensor is autocast's cast of it, or a view
    of the cast. Otherwise return None and 0."""
    node = tensor.grad_fn
    for _ in range(_MOST_VIEWS):
        if node is None or node.name() not in _VIEWS:
            break
        node = node.next_functions[0][0]
    if node is None or node.name() != "ToCopyBackward0":
        return None, 0
    source, output = node.next_functions[0]
    # The node of a Python autograd function has a class of its own, which refers to the function.
    made: Any = source
    function = getattr(type(made), "_forward_cls", None)
    if function is None or not issubclass(function, Onloading):
        return None, 0
    return made.use, made.indices[output]


def innermost() -> Hooks | None:
    """Return the innermost pair of saved-tensor hooks in force on this thread; None without any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


class SavedHooks:
    """A pair of saved-tensor hooks.

    Weights are saved as references. Any other tensor is passed to `take`, which may return an
    object to save instead. If it returns None, the tensor is passed on to the enclosing hooks.
    """

    def __init__(self, take: Callable[[Tensor], Any] = lambda tensor: None) -> None:
        self._take = take
        self._around: Hooks | None = None
        # Compiled functions call this too; the compiler must not trace it.
        pack = functools.partial(_uncompiled(SavedHooks._pack), self)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, _unpack)

    def enter(self) -> None:
        self._around = innermost()
        self._hooks.__enter__()

    def leave(self) -> None:
        self._hooks.__exit__()

    def _pack(self, tensor: Tensor) -> Any:
        """Return the object that autograd saves in place of a tensor; its `unpack` returns it."""
        taken = weights.find(tensor)
        if taken is None:
            taken = self._take(tensor)
        if taken is not None:
            return taken
        if self._around is not None:
            pack, unpack = self._around
            return _Passed(pack(tensor), unpack)
        # Detached, because a node that saves its own output would never be freed.
        return Kept(tensor.detach(), tensor._version)


@functools.cache
def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as one that torch's compiler does not trace."""
    return torch.compiler.disable(function)  # type: ignore[no-any-return, no-untyped-call]


def _unpack(packed: Any) -> Tensor:
    tensor: Tensor = packed.unpack()
    return tensor
