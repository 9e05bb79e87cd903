"""What autograd saves while parameters are on the device for a moment only.

A node that needs a weight for its backward would keep the weight's memory on the device until then.
So what is saved of a weight is where to find it again: which one, and which view of it. Under
autocast it is a cast of the weight, which is made again: a cast always gives the same bytes.

torch asks the innermost pair of saved-tensor hooks only. What is no weight goes on to the pair
around ours, so `torch.utils.checkpoint` and others work around an offloaded layer as inside it.
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
_MOST_VIEWS = 4  # between a cast weight and what is saved of it


class Use(Protocol):
    """One use of a layer, whose weights come back to the device when backward asks for them."""

    def version(self, number: int) -> int:
        """Of a weight on the device, while the forward runs."""

    def check(self, number: int, version: int) -> None:
        """Raises what autograd does of a weight that was written to since it was saved."""

    def weight(self, number: int) -> Tensor:
        """What the CPU has of it, on the device."""


class View(NamedTuple):
    """Where a tensor lies in another's memory."""

    size: torch.Size
    stride: tuple[int, ...]
    begin: int  # in bytes, from the other's first
    dtype: torch.dtype

    def of(self, tensor: Tensor) -> Tensor:
        begin = tensor.storage_offset() * tensor.itemsize + self.begin
        made = torch.empty(0, dtype=self.dtype, device=tensor.device)
        return made.set_(
            tensor.untyped_storage(), begin // self.dtype.itemsize, self.size, self.stride
        )


class _Weight(NamedTuple):
    """A view of a weight, or of a cast of one."""

    use: Use
    number: int  # among the tensors of its layer
    version: int
    view: View
    cast: bool

    def unpack(self) -> Tensor:
        self.use.check(self.number, self.version)
        weight = self.use.weight(self.number)
        return self.view.of(weight.to(self.view.dtype) if self.cast else weight)


class Kept(NamedTuple):
    """What stays as it is: torch looks at versions only where there are no hooks."""

    tensor: Tensor
    version: int

    def unpack(self) -> Tensor:
        check_version(
            self.tensor, self.version, "one of the variables needed for gradient computation"
        )
        return self.tensor


class _Passed(NamedTuple):
    """What the hooks around ours have made of it."""

    packed: Any
    back: Callable[[Any], Tensor]

    def unpack(self) -> Tensor:
        return self.back(self.packed)


def check_version(tensor: Tensor, version: int, what: str, now: int | None = None) -> None:
    """Says what autograd says of a tensor that was changed before backward has used it.

    Args:
        now: Its version, the tensor's own by default.
    """
    now = tensor._version if now is None else now
    if now != version:
        raise RuntimeError(
            f"{what} has been modified by an inplace operation: a {tuple(tensor.shape)} tensor is"
            f" at version {now}; expected version {version} instead"
        )


class _Held(NamedTuple):
    """A weight on the device, by where it lies in its storage."""

    begin: int
    end: int
    number: int


class Weights:
    """The weights that are on the device, by storage, and the use they are there for."""

    def __init__(self) -> None:
        self._uses: dict[int, tuple[Use, list[_Held]]] = {}

    def add(self, use: Use, tensors: Sequence[Tensor]) -> None:
        """Has views of the tensors saved as such."""
        for index, tensor in enumerate(tensors):
            begin = int(tensor.storage_offset()) * tensor.itemsize
            end = begin + tensor.numel() * tensor.itemsize
            held = self._uses.setdefault(tensor.untyped_storage()._cdata, (use, []))[1]
            held.append(_Held(begin, end, index))

    def drop(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._uses.pop(tensor.untyped_storage()._cdata, None)

    def find(self, tensor: Tensor) -> _Weight | None:
        """What is to be saved for a view, or a cast, of one of them; None for any other."""
        if not self._uses or tensor.layout is not torch.strided or type(tensor) is not Tensor:
            return None
        if tensor.is_conj() or tensor.is_neg():
            return None  # a view that says more than where it lies
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
    """The mark of a function whose outputs are weights on the device (see `layers`), and what its
    nodes have."""

    use: Use
    indices: list[int]


def _cast_of(tensor: Tensor) -> tuple[Use | None, int]:
    """The weight that a tensor is a view of a cast of, as autocast makes them, if it is one."""
    node = tensor.grad_fn
    for _ in range(_MOST_VIEWS):
        if node is None or node.name() not in _VIEWS:
            break
        node = node.next_functions[0][0]
    if node is None or node.name() != "ToCopyBackward0":
        return None, 0
    source, output = node.next_functions[0]
    # A node that a Python function made is of a class of its own, which names the function.
    made: Any = source
    function = getattr(type(made), "_forward_cls", None)
    if function is None or not issubclass(function, Onloading):
        return None, 0
    return made.use, made.indices[output]


def outer() -> Hooks | None:
    """The saved-tensor hooks that are in force."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


class SavedHooks:
    """A pair of saved-tensor hooks: weights are found again, what `take` makes something of is
    that, and the rest is left to the hooks around."""

    def __init__(self, take: Callable[[Tensor], Any] = lambda tensor: None) -> None:
        self._take = take
        self._around: Hooks | None = None
        # Called from the midst of compiled functions, too: nothing of it is for the compiler.
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
        # Detached: an output that its own node holds would never be freed.
        return Kept(tensor.detach(), tensor._version)


@functools.cache
def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compiler.disable(function)  # type: ignore[no-any-return, no-untyped-call]


def _unpack(packed: Any) -> Tensor:
    tensor: Tensor = packed.unpack()
    return tensor
