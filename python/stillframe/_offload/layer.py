"""Manages one layer whose parameters and buffers live on the CPU and are copied to the device.

While a forward runs, the module has tensors on the device in place of its own tensors. An autograd
node (`_OnloadFunction` in `layers.py`) makes them from the parameters, which stay leaves on the
CPU.
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


class ModuleTensorReference(NamedTuple):
    """A module's reference to a tensor."""

    module: nn.Module
    entries: dict[str, Any]  # the module's _parameters or _buffers
    name: str
    tensor_index: int  # in Layer.tensors


Replaced = list[
    tuple[ModuleTensorReference, Any]
]  # references, each with the tensor that it had before

# The number of forwards whose writes to a tensor's copy on the device are not copied back yet.
_nr_pending_writes: MutableMapping[Tensor, int] = WeakIdKeyDictionary()

# A part of torch's error if a layer is compiled with fullgraph=True.
_WHY_NOT_COMPILED = (
    "offloaded layers get their weights between compiled graphs: compile them before"
    " offload_layers, or without fullgraph=True"
)


def version_with_pending_writes(tensor: Tensor) -> int:
    """Return the version counter that a tensor would have without offloading. Writes on the device
    count before they are copied back."""
    return tensor._version + _nr_pending_writes.get(tensor, 0)


class _PendingWrite(NamedTuple):
    """Tensors that a forward has changed on the device, on their way back to the CPU."""

    ticket: Ticket
    targets: list[Tensor]  # the tensors on the CPU
    nr_versioned: int  # the first `nr_versioned` targets get a new version, the others keep theirs

    def copy_back(self) -> None:
        """Wait for the copies, and write them to the tensors on the CPU."""
        values = self.ticket.tensors()
        with torch.no_grad():
            for index, target in enumerate(self.targets):
                is_versioned = index < self.nr_versioned
                # A write through `.data` does not change the version.
                alias = target.detach() if is_versioned else target.data
                alias.copy_(values[index])


class Layer:
    """One of the modules that are offloaded, with its tensors."""

    def __init__(self, module: nn.Module, name: str, dtype: torch.dtype | None) -> None:
        self.module = module
        self.name = name  # for messages
        # Layers that share buffers or modules with this layer. Their forwards may change the
        # buffers, so this layer is then neither prefetched nor kept on the device.
        self.shares_buffers_with: list[Layer] = []
        self.shares_tensors_with: list[Layer] = []  # layers that share any tensor with this layer
        self._dtype = dtype  # of floating-point parameters on the device; None: as on the CPU
        self._sources: list[Tensor] | None = None  # the last result of `sources`
        self._pending_writes: list[_PendingWrite] = []  # not copied back yet, oldest first
        # The `LayerUse` of each forward whose backward may still run.
        self.uses: weakref.WeakSet[Any] = weakref.WeakSet()
        self.record_module_tensors()

    # ---- the layer's tensors ----

    def record_module_tensors(self) -> None:
        """Find the module's tensors. Called again after other code has replaced a tensor."""
        self._sources = None
        indices: dict[int, int] = {}
        self.tensors: list[Tensor] = []  # the parameters, then the buffers, each once
        self.references: list[ModuleTensorReference] = []  # of the layer's modules to `tensors`
        # Indices of tensors that forwards in training mode may change without a new version.
        self.written_unversioned: set[int] = set()  # the statistics of batch norm
        modules = list(self.module.modules())
        for module in modules:
            self._register_tensors(module, module._parameters, indices)
        self.nr_parameters = len(self.tensors)
        for module in modules:
            self._register_tensors(module, module._buffers, indices)
            if isinstance(module, _NormBase) and module.track_running_stats:
                # Batch norm writes its statistics without a new version.
                for name in ("running_mean", "running_var", "num_batches_tracked"):
                    if module._buffers.get(name) is not None:
                        self.written_unversioned.add(indices[id(module._buffers[name])])

    def _register_tensors(
        self, module: nn.Module, named_tensors: dict[str, Any], indices: dict[int, int]
    ) -> None:
        """Add the tensors in `named_tensors` and the references to them. `indices`: the index in
        `tensors` of each tensor found so far, by id."""
        for name, tensor in named_tensors.items():
            if tensor is None:
                continue
            self._check(tensor, name)
            index = indices.setdefault(id(tensor), len(self.tensors))
            if index == len(self.tensors):  # found for the first time
                self.tensors.append(tensor)
            self.references.append(ModuleTensorReference(module, named_tensors, name, index))

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
        reference = next(each for each in self.references if each.tensor_index == index)
        inner = next(name for name, each in self.module.named_modules() if each is reference.module)
        return ".".join(part for part in (self.name, inner, reference.name) if part)

    def sources(self, fresh: bool) -> Sequence[Tensor]:
        """Return the tensors to copy to the device: `tensors`, with parameters converted to
        `dtype`. Without `fresh`, the last result may be returned again."""
        self.finish_writes()
        is_replaced = any(
            reference.entries.get(reference.name) is not self.tensors[reference.tensor_index]
            for reference in self.references
        )
        if is_replaced:
            self.record_module_tensors()
        for index, tensor in enumerate(self.tensors):
            if tensor.device.type != "cpu":
                self._check(tensor, self.name_of(index))  # raises
        if self._sources is None or fresh:
            with torch.no_grad():
                self._sources = [self.convert_for_device(i, t) for i, t in enumerate(self.tensors)]
        return self._sources

    def fingerprint(self) -> Fingerprint:
        """Return a fingerprint of the tensors that the modules refer to now."""
        self.finish_writes()
        return Fingerprint([reference.entries[reference.name] for reference in self.references])

    def convert_for_device(self, index: int, tensor: Tensor) -> Tensor:
        """Return a tensor as it is copied to the device: a parameter is converted to `dtype`."""
        if self._dtype is None or index >= self.nr_parameters or not tensor.is_floating_point():
            return tensor.detach()
        return tensor.detach().to(self._dtype)

    # ---- replacing the CPU's tensors by the device's ----

    def swap(self, values: Sequence[Tensor]) -> Replaced:
        """Replace the layer's tensors in the modules by `values`. Return what was replaced."""
        replaced: Replaced = []
        for reference in self.references:
            replaced.append((reference, reference.entries[reference.name]))
            reference.entries[reference.name] = values[reference.tensor_index]
        self._renew_rnn_weights()
        return replaced

    def swap_back(self, replaced: Replaced, values: Sequence[Tensor]) -> Replaced:
        """Undo `swap`. Return the references that the forward has changed, with the new values."""
        changed: Replaced = []
        for reference, tensor in replaced:
            found = reference.entries.get(reference.name)
            if found is not values[reference.tensor_index]:
                changed.append((reference, found))
            reference.entries[reference.name] = tensor
        self._renew_rnn_weights()
        return changed

    def _renew_rnn_weights(self) -> None:
        """Renew the list of weights that torch's RNN modules keep besides their parameters."""
        for reference in self.references:
            if isinstance(reference.module, nn.RNNBase):
                reference.module._flat_weights = [
                    getattr(reference.module, name, None)
                    for name in reference.module._flat_weights_names
                ]

    # ---- copying changes of a forward back ----

    def start_copying_changes_back(
        self, group: Group, offloader: Offloader, *, stays: bool
    ) -> None:
        """Start to copy back the tensors that a forward has changed on the device. Raise
        StillframeError if a changed tensor has a lower precision there.

        Args:
            group: The layer's tensors on the device.
            stays: The group stays on the device.
        """
        # Indices of changed tensors.
        with_new_version = [i for i in range(len(self.tensors)) if group.changed(i)]
        with_old_version = [  # in training mode they may be written without a new version
            index
            for index in sorted(self.written_unversioned.difference(with_new_version))
            if self._is_training(index)
        ]
        changed = with_new_version + with_old_version
        if not changed:
            return
        converted = [i for i in changed if group.tensors[i].dtype != self.tensors[i].dtype]
        if converted:
            raise StillframeError(
                f"{self.name_of(converted[0])} was changed by its module's forward, on a copy of"
                " low precision: such a layer cannot be offloaded with dtype="
            )
        tensors = [group.tensors[index] for index in changed]
        if stays:  # a repeated forward may write to the group
            tensors = [tensor.detach().clone() for tensor in tensors]
        targets = [self.tensors[index] for index in changed]
        nr_versioned = len(with_new_version)
        self._pending_writes.append(
            _PendingWrite(offloader.offload(tensors), targets, nr_versioned)
        )
        for target in targets[:nr_versioned]:
            _nr_pending_writes[target] = _nr_pending_writes.get(target, 0) + 1
        group.note_versions()  # later, only new changes are copied back

    def _is_training(self, index: int) -> bool:
        """Return whether a module that has this tensor is in training mode."""
        users = [each.module for each in self.references if each.tensor_index == index]
        return any(module.training for module in users)

    def finish_writes(self) -> None:
        """Wait until every change that forwards of any layer made on the device is copied back to
        this layer's tensors on the CPU."""
        for layer in (self, *self.shares_tensors_with):
            if layer is self or layer._has_pending_write_to(self.tensors):
                layer._finish_own_writes()

    def _has_pending_write_to(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether a pending write of this layer changes one of these tensors."""
        targets = {id(target) for write in self._pending_writes for target in write.targets}
        return bool(targets) and not targets.isdisjoint(map(id, tensors))

    def _finish_own_writes(self) -> None:
        """Copy back the pending writes of this layer's forwards."""
        while self._pending_writes:
            write = self._pending_writes.pop(0)
            for target in write.targets[: write.nr_versioned]:
                _nr_pending_writes[target] -= 1
                if not _nr_pending_writes[target]:
                    del _nr_pending_writes[target]
            write.copy_back()

    # ---- moving to the pool and back ----

    def move_tensors_to_pool(self, offloader: Offloader) -> None:
        """Move the tensors into the pool, whose pinned memory the device can read directly."""
        movable = [tensor for tensor in self.tensors if _owns_its_storage(tensor)]
        for tensor, copy in zip(movable, offloader.adopt(movable).tensors(), strict=True):
            tensor.data = copy

    def move_tensors_out_of_pool(self) -> None:
        """Move the tensors out of the pool into ordinary memory."""
        self._sources = None
        for tensor in self.tensors:
            if _owns_its_storage(tensor):
                tensor.data = tensor.detach().clone()


class LayerHook:
    """A hook of an offloaded module, which calls `function(layer, *args)`. In copies and pickles of
    the module, the hook does nothing."""

    def __init__(self, function: Any, layer: Layer) -> None:
        self._function = torch.compiler.disable(function, reason=_WHY_NOT_COMPILED)  # type: ignore[no-untyped-call]
        self._layer = layer

    def __call__(self, *args: Any) -> None:
        self._function(self._layer, *args)

    def __deepcopy__(self, memo: Any) -> Any:
        return _do_nothing

    def __reduce__(self) -> Any:
        return _make_no_op_hook, ()


class ModuleMoveGuard:
    """Replaces `_apply` of an offloaded module, so that moving the model leaves the layer alone.

    In copies and pickles of the module, `_apply` is the method of the class.
    """

    def __init__(self, layer: Layer) -> None:
        self._layer = layer

    def __call__(self, function: Any, recurse: bool = True) -> nn.Module:
        # Find out what `function` does: moving is ignored, converting is refused.
        dtype = function(torch.empty(1)).dtype
        if dtype != torch.float32:
            raise StillframeError(
                f"{self._layer.name} is offloaded: its parameters cannot be made {dtype}."
                " Convert them before, or give offload_layers a dtype"
            )
        return self._layer.module

    def __deepcopy__(self, memo: Any) -> Any:
        copy = memo[id(self._layer.module)]
        return copy.__class__._apply.__get__(copy)  # the class's method, bound to the copy

    def __reduce__(self) -> Any:
        return getattr, (self._layer.module, "_apply")


def _make_no_op_hook() -> Any:
    """Return what unpickling puts in place of a hook."""
    return _do_nothing


def _do_nothing(*args: Any) -> None:
    """Do nothing, in place of the hooks in a copy of a module."""


def _owns_its_storage(tensor: Tensor) -> bool:
    """Return whether no other tensor uses the storage, so that the storage can be replaced."""
    storage = tensor.untyped_storage()
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0 or storage.nbytes() != nbytes:
        return False
    # One reference is the tensor's, and one is that of `storage`.
    return bool(torch._C._storage_Use_Count(storage._cdata) <= 2)
