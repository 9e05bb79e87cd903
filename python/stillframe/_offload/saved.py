"""Keeps autograd from saving weights that are on the device only while their layer runs.

A node that needs a weight for its backward would keep the weight's memory on the device until then.
So a reference is saved instead: which weight, and which view of it. Under autocast the node needs a
cast of the weight; backward repeats the cast, which gives the same bytes.

torch calls only the innermost pair of saved-tensor hooks. Tensors that are not weights are passed
to the pair around ours, so `torch.utils.checkpoint` and others work around an offloaded layer as
well as inside it.
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
_MOST_VIEWS = 4  # between a cast of a weight and the tensor that is saved


class WeightUse(Protocol):
    """One forward of a layer, whose weights return to the device when backward asks for them."""

    def version(self, number: int) -> int:
        """Return the version of a weight on the device."""

    def check(self, number: int, version: int) -> None:
        """Raise autograd's error if a weight was written to since it was saved."""

    def weight(self, number: int) -> Tensor:
        """Return the CPU's value of a weight, on the device."""


class View(NamedTuple):
    """The position of a tensor in another tensor's memory."""

    size: torch.Size
    stride: tuple[int, ...]
    begin: int  # in bytes, from the other tensor's first
    dtype: torch.dtype

    def of(self, tensor: Tensor) -> Tensor:
        begin = tensor.storage_offset() * tensor.itemsize + self.begin
        made = torch.empty(0, dtype=self.dtype, device=tensor.device)
        return made.set_(
            tensor.untyped_storage(), begin // self.dtype.itemsize, self.size, self.stride
        )


class _Weight(NamedTuple):
    """A reference to a view of a weight, or of a cast of a weight."""

    use: WeightUse
    number: int  # index in its layer's tensors
    version: int
    view: View
    cast: bool

    def unpack(self) -> Tensor:
        self.use.check(self.number, self.version)
        weight = self.use.weight(self.number)
        return self.view.of(weight.to(self.view.dtype) if self.cast else weight)


class Kept(NamedTuple):
    """A tensor that is saved as it is, with its version.

    torch checks versions only of tensors that no hook has packed.
    """

    tensor: Tensor
    version: int

    def unpack(self) -> Tensor:
        check_version(
            self.tensor, self.version, "one of the variables needed for gradient computation"
        )
        return self.tensor


class _Passed(NamedTuple):
    """The result of the saved-tensor hooks around ours."""

    packed: Any
    back: Callable[[Any], Tensor]

    def unpack(self) -> Tensor:
        return self.back(self.packed)


def check_version(tensor: Tensor, version: int, what: str, now: int | None = None) -> None:
    """Raise autograd's error for a tensor that was changed before backward has used it.

    Args:
        now: The version to check, by default the tensor's own.
    """
    now = tensor._version if now is None else now
    if now != version:
        raise RuntimeError(
            f"{what} has been modified by an inplace operation: a {tuple(tensor.shape)} tensor is"
            f" at version {now}; expected version {version} instead"
        )


class _Held(NamedTuple):
    """A weight on the device, as a range of bytes in its storage."""

    begin: int
    end: int
    number: int


class Weights:
    """The weights that are on the device, by storage, each with its current use."""

    def __init__(self) -> None:
        self._uses: dict[int, tuple[WeightUse, list[_Held]]] = {}

    def add(self, use: WeightUse, tensors: Sequence[Tensor]) -> None:
        """Make views of the tensors be saved as references."""
        for index, tensor in enumerate(tensors):
            begin = int(tensor.storage_offset()) * tensor.itemsize
            end = begin + tensor.numel() * tensor.itemsize
            held = self._uses.setdefault(tensor.untyped_storage()._cdata, (use, []))[1]
            held.append(_Held(begin, end, index))

    def drop(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._uses.pop(tensor.untyped_storage()._cdata, None)

    def find(self, tensor: Tensor) -> _Weight | None:
        """Return the reference to save for a view or a cast of a weight; None for other tensors."""
        if not self._uses or tensor.layout is not torch.strided or type(tensor) is not Tensor:
            return None
        if tensor.is_conj() or tensor.is_neg():
            return None  # the view differs in values, not only in position
        begin = int(tensor.storage_offset()) * tensor.itemsize
        use, held = self._uses.get(tensor.untyped_storage()._cdata, (None, []))
        for each in held:
            if use is not None and each.begin <= begin < each.end:
                view = _view(tensor, begin - each.begin)
                return _Weight(use, each.number, tensor._version, view, cast=False)
        use, number = _cast_of(tensor)
        if use is None:
            return None
        return _Weight(use, number, use.version(number), _view(tensor, begin), cast=True)


def _view(tensor: Tensor, begin: int) -> View:
    return View(tensor.shape, tensor.stride(), begin, tensor.dtype)


weights = Weights()


class Onloading:
    """Base class of the autograd function whose outputs are weights on the device (see `layers`).

    Its nodes have these attributes.
    """

    use: WeightUse
    indices: list[int]


def _cast_of(tensor: Tensor) -> tuple[WeightUse | None, int]:
    """Return the use and index of the weight if a tensor is a view of autocast's cast of one."""
    node = tensor.grad_fn
    for _ in range(_MOST_VIEWS):
        if node is None or node.name() not in _VIEWS:
            break
        node = node.next_functions[0][0]
    if node is None or node.name() != "ToCopyBackward0":
        return None, 0
    source, output = node.next_functions[0]
    # The node of a Python function has a class of its own, which refers to the function's class.
    made: Any = source
    function = getattr(type(made), "_forward_cls", None)
    if function is None or not issubclass(function, Onloading):
        return None, 0
    return made.use, made.indices[output]


def outer() -> Hooks | None:
    """Return the saved-tensor hooks that are in force."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


class SavedHooks:
    """A pair of saved-tensor hooks.

    Weights are saved as references. Of other tensors, `take` may return what to save instead; if
    it returns None, the tensor is passed to the hooks around these.
    """

    def __init__(self, take: Callable[[Tensor], Any] = lambda tensor: None) -> None:
        self._take = take
        self._around: Hooks | None = None
        # Compiled functions call this too; the compiler must not trace it.
        pack = functools.partial(_uncompiled(SavedHooks._pack), self)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, _unpack)

    def enter(self) -> None:
        self._around = outer()
        self._hooks.__enter__()

    def leave(self) -> None:
        self._hooks.__exit__()

    def _pack(self, tensor: Tensor) -> Any:
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
    return torch.compiler.disable(function)  # type: ignore[no-any-return, no-untyped-call]


def _unpack(packed: Any) -> Tensor:
    tensor: Tensor = packed.unpack()
    return tensor
