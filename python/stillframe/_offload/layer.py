"""Manages one layer whose parameters and buffers live on the CPU and are copied to the device.

While a forward runs, the module has tensors on the device in place of its parameters. An autograd
node (`_Onload` in `layers.py`) makes them from the parameters, which stay leaves on the CPU.
Optimizers, hooks and saves find the parameters there, even after an error.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary

from stillframe._offload.offloader import Offloader
from stillframe._offload.residents import Fingerprint, Group
from stillframe._offload.ticket import Ticket
from stillframe.errors import StillframeError


class TensorRef(NamedTuple):
    """A module's reference to a tensor."""

    module: nn.Module
    entries: dict[str, Any]  # the module's _parameters or _buffers
    name: str
    number: int  # index of the tensor in Layer.tensors


Former = list[tuple[TensorRef, Any]]  # references, each with the tensor that it had before

# CPU tensors whose copies on the device were written to by a forward. For each: the number of
# forwards whose writes are not copied back yet.
_written: MutableMapping[Tensor, int] = WeakIdKeyDictionary()

# The reason why torch must not compile the hooks. torch's error has this text if a layer is
# compiled with fullgraph=True.
_WHY_NOT_COMPILED = (
    "offloaded layers get their weights between compiled graphs: compile them before"
    " offload_layers, or without fullgraph=True"
)


def version_of(tensor: Tensor) -> int:
    """Return the version counter that a tensor would have without offloading.

    A write by a forward on the device counts from the end of that forward on, although it is copied
    back later.
    """
    return tensor._version + _written.get(tensor, 0)


class _Write(NamedTuple):
    """Tensors that a forward has changed on the device, on their way back to the CPU."""

    ticket: Ticket
    targets: list[Tensor]  # the tensors on the CPU
    nr_counted: int  # copying back changes the version of the first `nr_counted` targets only

    def copy_back(self) -> None:
        """Wait for the copies, and write them to the tensors on the CPU."""
        came = self.ticket.tensors()
        with torch.no_grad():
            for number, target in enumerate(self.targets):
                # A write through `.data` does not change the version.
                to = target.detach() if number < self.nr_counted else target.data
                to.copy_(came[number])


class Layer:
    """One of the modules that are offloaded, with its tensors.

    Args:
        name: The layer's name in messages.
        dtype: The type that floating-point parameters have on the device; None for their own.

    Attributes:
        tensors: The parameters, then the buffers, each once.
        nr_parameters: How many of `tensors` are parameters.
        references: Every reference of the layer's modules to one of `tensors`.
        changing: Indices of tensors that forwards in training mode change without a change of
            version.
        partners: Layers that share buffers or modules with this one. Their forwards may change the
            shared buffers, so a layer with partners is neither prefetched nor kept.
        relatives: Layers that share any tensor with this one.
        uses: The `LayerUse` of each forward whose backward may still run.
    """

    def __init__(self, module: nn.Module, name: str, dtype: torch.dtype | None) -> None:
        self.module = module
        self.name = name
        self.partners: list[Layer] = []
        self.relatives: list[Layer] = []
        self._dtype = dtype
        self._sources: list[Tensor] | None = None  # what `sources` returned last
        self._writes: list[_Write] = []  # not copied back yet, oldest first
        self.uses: weakref.WeakSet[Any] = weakref.WeakSet()
        self.find_tensors()

    # ---- the layer's tensors ----

    def find_tensors(self) -> None:
        """Find the module's tensors. Called again after other code has replaced one of them."""
        self._sources = None
        indices: dict[int, int] = {}
        self.tensors: list[Tensor] = []
        self.references: list[TensorRef] = []
        self.changing: set[int] = set()
        modules = list(self.module.modules())
        for module in modules:
            self._add_tensors_of(module, module._parameters, indices)
        self.nr_parameters = len(self.tensors)
        for module in modules:
            self._add_tensors_of(module, module._buffers, indices)
            # A forward in training mode writes to these without a change of version.
            if isinstance(module, _NormBase) and module.track_running_stats:
                for name in ("running_mean", "running_var", "num_batches_tracked"):
                    if module._buffers.get(name) is not None:
                        self.changing.add(indices[id(module._buffers[name])])

    def _add_tensors_of(
        self, module: nn.Module, entries: dict[str, Any], indices: dict[int, int]
    ) -> None:
        """Add the tensors in `entries`, each once, and every reference to them. `indices` has the
        index in `tensors` of each tensor found so far, by its id."""
        for name, tensor in entries.items():
            if tensor is None:
                continue
            self._check(tensor, name)
            index = indices.setdefault(id(tensor), len(self.tensors))
            if index == len(self.tensors):
                self.tensors.append(tensor)
            self.references.append(TensorRef(module, entries, name, index))

    def _check(self, tensor: Tensor, name: str) -> None:
        """Raise TypeError or StillframeError if a tensor cannot be offloaded."""
        what = f"{self.name}: {name}"
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise TypeError(f"{what} has no shape yet: run the lazy module once before")
        if type(tensor) not in (Tensor, Parameter, nn.Buffer) or tensor.layout is not torch.strided:
            raise TypeError(
                f"{what} is a {type(tensor).__name__} of layout {tensor.layout}: only plain, dense"
                " tensors can be offloaded, not those of FSDP, tensor parallelism or quantisation"
            )
        if tensor.device.type != "cpu":
            raise StillframeError(
                f"{what} is on {tensor.device}: the parameters and buffers of offloaded layers live"
                " on the CPU. Move the module there, and let offload_layers do the rest"
            )

    def parameters(self) -> list[Parameter]:
        return self.tensors[: self.nr_parameters]  # type: ignore[return-value]

    def name_of(self, index: int) -> str:
        """Return the key path of a tensor, for messages."""
        reference = next(each for each in self.references if each.number == index)
        inner = next(name for name, each in self.module.named_modules() if each is reference.module)
        return ".".join(part for part in (self.name, inner, reference.name) if part)

    def sources(self, fresh: bool) -> Sequence[Tensor]:
        """Return the tensors to copy to the device: `tensors`, with parameters converted to
        `dtype`. Without `fresh`, they may be those that the last call returned."""
        self.settle()
        # Find the tensors again if other code has replaced one of them.
        if any(
            reference.entries.get(reference.name) is not self.tensors[reference.number]
            for reference in self.references
        ):
            self.find_tensors()
        for index, tensor in enumerate(self.tensors):
            if tensor.device.type != "cpu":
                self._check(tensor, self.name_of(index))
        if self._sources is None or fresh:
            with torch.no_grad():
                self._sources = [self.lowered(i, t) for i, t in enumerate(self.tensors)]
        return self._sources

    def fingerprint(self) -> Fingerprint:
        """Return a fingerprint of the tensors that the modules refer to now."""
        self.settle()
        return Fingerprint([reference.entries[reference.name] for reference in self.references])

    def lowered(self, index: int, tensor: Tensor) -> Tensor:
        """Return a tensor as it is copied to the device: a parameter converted to `dtype`."""
        if self._dtype is None or index >= self.nr_parameters or not tensor.is_floating_point():
            return tensor.detach()
        return tensor.detach().to(self._dtype)

    # ---- replacing the CPU's tensors by the device's ----

    def swap(self, values: Sequence[Tensor]) -> Former:
        """Replace the layer's tensors in its modules by `values`. Return the references with the
        tensors that they had before."""
        former: Former = []
        for reference in self.references:
            former.append((reference, reference.entries[reference.name]))
            reference.entries[reference.name] = values[reference.number]
        self._renew_rnn_weights()
        return former

    def swap_back(self, former: Former, values: Sequence[Tensor]) -> Former:
        """Undo `swap`. Return the references that other code has changed meanwhile, with the
        tensors that it has put there."""
        moved: Former = []
        for reference, tensor in former:
            found = reference.entries.get(reference.name)
            if found is not values[reference.number]:
                moved.append((reference, found))
            reference.entries[reference.name] = tensor
        self._renew_rnn_weights()
        return moved

    def _renew_rnn_weights(self) -> None:
        """Make the list of weights again that torch's RNN modules keep besides their parameters."""
        for reference in self.references:
            if isinstance(reference.module, nn.RNNBase):
                reference.module._flat_weights = [
                    getattr(reference.module, name, None)
                    for name in reference.module._flat_weights_names
                ]

    # ---- copying changes of a forward back ----

    def write_back(self, group: Group, offloader: Offloader, *, stays: bool) -> None:
        """Start to copy back the tensors that a forward has changed on the device.

        Args:
            group: The layer's tensors on the device.
            stays: The group stays on the device. A repeated forward may write to it again, so a
                copy of it is offloaded.

        Raises:
            StillframeError: The changed tensor has a lower precision on the device.
        """
        # Indices of the tensors that were changed: `counted` with a change of version, `silent`
        # without one.
        counted = [index for index in range(len(self.tensors)) if group.changed(index)]
        silent = [
            index
            for index in sorted(self.changing.difference(counted))
            if any(p.module.training for p in self.references if p.number == index)
        ]
        changed = counted + silent
        if not changed:
            return
        lowered = [i for i in changed if group.tensors[i].dtype != self.tensors[i].dtype]
        if lowered:
            raise StillframeError(
                f"{self.name_of(lowered[0])} was changed by its module's forward, on a copy of"
                " low precision: such a layer cannot be offloaded with dtype="
            )
        tensors = [group.tensors[index] for index in changed]
        if stays:
            tensors = [tensor.detach().clone() for tensor in tensors]
        targets = [self.tensors[index] for index in changed]
        self._writes.append(_Write(offloader.offload(tensors), targets, len(counted)))
        for target in targets[: len(counted)]:
            _written[target] = _written.get(target, 0) + 1
        group.note_versions()  # later, only new changes are copied back

    def settle(self) -> None:
        """Wait until the tensors on the CPU have every change that a forward has made, also changes
        by other layers that share them."""
        for layer in (self, *self.relatives):
            if layer is self or layer._writes_to(self.tensors):
                layer._settle()

    def _writes_to(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether a change that is not copied back yet concerns one of these tensors."""
        targets = {id(target) for write in self._writes for target in write.targets}
        return bool(targets) and not targets.isdisjoint(map(id, tensors))

    def _settle(self) -> None:
        """Copy the changes of forwards back to the CPU's tensors, oldest first."""
        while self._writes:
            write = self._writes.pop(0)
            for target in write.targets[: write.nr_counted]:
                _written[target] -= 1
                if not _written[target]:
                    del _written[target]
            write.copy_back()

    # ---- moving to the pool and back ----

    def to_pool(self, offloader: Offloader) -> None:
        """Move the tensors into the pool, whose pinned memory the device can read directly."""
        own = [tensor for tensor in self.tensors if _has_memory_of_its_own(tensor)]
        for tensor, copy in zip(own, offloader.adopt(own).tensors(), strict=True):
            tensor.data = copy

    def to_ordinary(self) -> None:
        """Move the tensors out of the pool into ordinary memory."""
        self._sources = None
        for tensor in self.tensors:
            if _has_memory_of_its_own(tensor):
                tensor.data = tensor.detach().clone()


class Hook:
    """A hook of an offloaded module, which calls `function(layer, *args)`. In a copy of the module,
    or a pickle, a function that does nothing takes its place."""

    def __init__(self, function: Any, layer: Layer) -> None:
        self._function = torch.compiler.disable(function, reason=_WHY_NOT_COMPILED)  # type: ignore[no-untyped-call]
        self._layer = layer

    def __call__(self, *args: Any) -> None:
        self._function(self._layer, *args)

    def __deepcopy__(self, memo: Any) -> Any:
        return _nothing

    def __reduce__(self) -> Any:
        return _no_hook, ()


class ApplyGuard:
    """Replaces `_apply` of an offloaded module, so that moving the model leaves the layer alone.

    A copy of the module gets the `_apply` of its class back.
    """

    def __init__(self, layer: Layer) -> None:
        self._layer = layer

    def __call__(self, function: Any, recurse: bool = True) -> nn.Module:
        made = function(torch.empty(1))  # shows to which dtype it converts tensors
        if made.dtype != torch.float32:
            raise StillframeError(
                f"{self._layer.name} is offloaded: its parameters cannot be made {made.dtype}."
                " Convert them before, or give offload_layers a dtype"
            )
        return self._layer.module

    def __deepcopy__(self, memo: Any) -> Any:
        copy = memo[id(self._layer.module)]  # the copy of the module is there already
        return copy.__class__._apply.__get__(copy)

    def __reduce__(self) -> Any:
        return getattr, (self._layer.module, "_apply")


def _no_hook() -> Any:
    """Return the function that replaces a pickled hook when it is unpickled."""
    return _nothing


def _nothing(*args: Any) -> None:
    """Do nothing, in place of the hooks in a copy of a module."""


def _has_memory_of_its_own(tensor: Tensor) -> bool:
    """Return whether no other tensor is known to share the tensor's memory, so that it can be
    replaced."""
    storage = tensor.untyped_storage()
    nbytes = tensor.numel() * tensor.element_size()
    # Two references: the tensor's, and that of the storage object made here.
    return storage.nbytes() == nbytes > 0 and torch._C._storage_Use_Count(storage._cdata) <= 2
