"""Checks the arguments of `offload_layers`, and finds the tensors and modules that layers share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from itertools import chain

import torch
from torch import nn

from stillframe._offload.layer import Layer
from stillframe.errors import StillframeError

offloaded: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # the modules in all offloaded layers

# torch's classes that reduce gradients when autograd adds them on the device. Gradients of
# offloaded weights are added on the CPU, so the reduction would never run.
_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


def check(modules: object, keep: object, dtype: object) -> list[nn.Module]:
    """Check the arguments, and return the modules in the order given. For the errors raised see
    `offload_layers`."""
    order = _check_and_list_modules(modules)
    if isinstance(keep, bool) or not isinstance(keep, int):
        raise TypeError(f"keep takes a number of layers, not a {type(keep).__name__}")
    if not 0 <= keep <= len(order):
        raise ValueError(f"keep is a number of the {len(order)} modules, got {keep}")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype takes a torch.dtype, not a {type(dtype).__name__}")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype is a floating-point type, got {dtype}")
    _refuse_offloaded_or_nested(list(dict.fromkeys(order)))
    return order


def _check_and_list_modules(modules: object) -> list[nn.Module]:
    if isinstance(modules, nn.Module):
        _refuse_parallel_wrapper(modules)
    if not isinstance(modules, Iterable) or isinstance(modules, nn.ModuleDict):
        raise TypeError(
            "modules takes layers in the order of forward, in a list, ModuleList or Sequential, not"
            f" one {type(modules).__name__}: give the layers in it"
        )
    order = list(modules)
    if not order:
        raise ValueError("there are no modules to offload")
    for module in order:
        if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"only modules in Python can be offloaded, got a {type(module).__name__}"
            )
    return order


def _refuse_offloaded_or_nested(unique: list[nn.Module]) -> None:
    for module in unique:
        for inner in module.modules():
            _refuse_parallel_wrapper(inner)
            if inner in offloaded:
                raise ValueError(
                    f"a {type(inner).__name__} is offloaded already: remove() that first"
                )
            if inner is not module and inner in unique:
                raise ValueError(
                    f"a {type(inner).__name__} is inside a {type(module).__name__} that is given as"
                    " well: a layer cannot be offloaded inside another one. Give one of them"
                )


def _refuse_parallel_wrapper(module: nn.Module) -> None:
    for kind in type(module).__mro__:
        if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch."):
            raise TypeError(
                f"a module of {kind.__name__} cannot be offloaded: that reduces gradients when"
                " autograd adds them on the device, but the gradients of offloaded layers are added"
                " on the CPU. Give the plain layers, and train them in one process"
            )


def refuse_inside_ddp(layer: Layer) -> None:
    """Raise StillframeError if a `DistributedDataParallel` (DDP) runs this forward. DDP would wait
    for the layer's gradients forever."""
    # torch sets this attribute while a DDP module runs its forward.
    active = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    if active is None or not torch.is_grad_enabled():
        return
    if any(parameter.requires_grad for parameter in layer.parameters()):
        raise StillframeError(
            "offloaded layers cannot be trained inside a DistributedDataParallel: it reduces"
            " gradients when autograd adds them on the device, but the gradients of offloaded"
            " layers are added on the CPU. Train the plain module, in one process"
        )


def record_layers_sharing_tensors(layers: list[Layer]) -> None:
    """Set `shares_buffers_with` and `shares_tensors_with` of each layer."""
    _set_sharing_layers(layers, _ids_of_buffers_and_modules, "shares_buffers_with")
    _set_sharing_layers(layers, lambda layer: set(map(id, layer.tensors)), "shares_tensors_with")


def _set_sharing_layers(
    layers: list[Layer], ids_of: Callable[[Layer], set[int]], attribute: str
) -> None:
    """Set an attribute of each layer to the other layers that share an object with it. `ids_of`
    returns the ids of a layer's objects."""
    layers_with: dict[int, list[Layer]] = {}  # by the id of an object
    for layer in layers:
        for object_id in ids_of(layer):
            layers_with.setdefault(object_id, []).append(layer)
    for layer in layers:
        sharing = chain(*(layers_with[object_id] for object_id in ids_of(layer)))
        each_once = dict.fromkeys(sharing)
        setattr(layer, attribute, [other for other in each_once if other is not layer])


def _ids_of_buffers_and_modules(layer: Layer) -> set[int]:
    """Return the ids of a layer's buffers, and of its modules, which may replace their buffers."""
    return {
        *map(id, layer.tensors[layer.nr_parameters :]),
        *(id(reference.module) for reference in layer.references),
    }
