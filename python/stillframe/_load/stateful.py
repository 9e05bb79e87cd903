"""Objects with a state_dict in `load(into=)`: modules, optimizers, and users' own objects.

There are three ways to fill them:

    plain module     tensors in place; extra state by `set_extra_state`
    plain optimizer  tensors in place; then `load_state_dict` gets these tensors and keeps them
    anything else    its part of the file is loaded into new memory, then `load_state_dict`

"Plain" means that `load_state_dict` would only copy tensors. Modules with hooks or own methods are
not plain, nor are optimizers without state, schedulers, scalers and users' objects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, strided
from torch.nn import Module, Parameter
from torch.optim import Optimizer

_EXTRA_STATE = "_extra_state"
_PLAIN_TENSORS = (Tensor, Parameter)
# An object with an attribute of one of these names is not plain.
_STATE_METHODS = {
    "state_dict",
    "load_state_dict",
    "_save_to_state_dict",
    "_load_from_state_dict",
}
# A module with hooks in one of these attributes is not plain.
_MODULE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
# An optimizer with hooks in one of these attributes is not plain.
_OPTIMIZER_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
)


@dataclass(frozen=True, slots=True)
class Call:
    """A call to make when all tensors are filled."""

    path: str  # of the object in the tree
    function: Callable[[Any], object]  # `load_state_dict`, or `set_extra_state`
    argument: Any
    trees: tuple[Any, ...]  # the parts of the argument that come from the file


@dataclass(frozen=True, slots=True)
class ObjectFillPlan:
    """How one object is filled, or the problems that prevent it."""

    pairs: tuple[tuple[str, Tensor, Tensor], ...] = ()  # (path, target, the file's tensor)
    calls: tuple[Call, ...] = ()
    problems: tuple[str, ...] = ()


def is_stateful(node: object) -> bool:
    """Return whether the node can return and load a state_dict."""
    return _has_method(node, "state_dict") and _has_method(node, "load_state_dict")


def missing_method(node: object) -> str:
    """Return the name of the method that a node lacks if it has only one of state_dict and
    load_state_dict. Otherwise return ""."""
    names = "state_dict", "load_state_dict"
    lacking = [name for name in names if not _has_method(node, name)]
    if len(lacking) == 1:
        return lacking[0]
    return ""


def _has_method(node: object, name: str) -> bool:
    return not isinstance(node, (type, Tensor)) and callable(getattr(node, name, None))


def filling(path: str, node: Any, file_value: Any) -> ObjectFillPlan:
    """Return how to fill a node from the file's object at the same path."""
    if not isinstance(node, (Module, Optimizer)):
        return _plan_load_state_dict_call(path, node, file_value)
    if not isinstance(file_value, dict):
        where, own_type, file_type = path or "the object itself", type(node), type(file_value)
        problem = (
            f"{where} is a {own_type.__name__}, and {file_type.__name__} in the file, not its"
            " state_dict"
        )
        return ObjectFillPlan(problems=(problem,))
    if isinstance(node, Module):
        return _plan_module_fill(path, node, file_value)
    return _plan_optimizer_fill(path, node, file_value)


def _plan_load_state_dict_call(path: str, node: Any, file_value: Any) -> ObjectFillPlan:
    """Return a filling that only calls the node's `load_state_dict`."""
    call = Call(path, node.load_state_dict, argument=file_value, trees=(file_value,))
    return ObjectFillPlan(calls=(call,))


def _item_path(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


# ---- modules ----


def _plan_module_fill(path: str, module: Module, file_state: dict[str, Any]) -> ObjectFillPlan:
    """Return how to fill a module: its own tensors get the file's bytes, if possible."""
    if not _has_only_torch_state_methods(module):
        return _plan_load_state_dict_call(path, module, file_state)
    state = module.state_dict()
    missing = [name for name in state if name not in file_state]
    unexpected = [name for name in file_state if name not in state]
    if missing or unexpected:
        if _takes_other_keys(module):
            return _plan_load_state_dict_call(path, module, file_state)
        where = path or "the object itself"
        problems: list[str] = []
        if missing:
            problems.append(f"{where}: Missing key(s) in state_dict: {_quoted(missing)}")
        if unexpected:
            problems.append(f"{where}: Unexpected key(s) in state_dict: {_quoted(unexpected)}")
        return ObjectFillPlan(problems=tuple(problems))
    extra_names = [name for name in state if name.rpartition(".")[2] == _EXTRA_STATE]
    tensor_names = [name for name in state if name not in extra_names]
    pairs = [(_item_path(path, name), state[name], file_state[name]) for name in tensor_names]
    if not all(_can_be_copied_unchanged(target, file_value) for _, target, file_value in pairs):
        return _plan_load_state_dict_call(path, module, file_state)
    calls = (_extra_state_call(path, module, name, file_state[name]) for name in extra_names)
    return ObjectFillPlan(tuple(pairs), tuple(calls))


def _quoted(names: list[Any]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _extra_state_call(path: str, module: Module, name: str, value: Any) -> Call:
    owner = module.get_submodule(name.rpartition(".")[0])
    item_path = _item_path(path, name)
    return Call(item_path, owner.set_extra_state, argument=value, trees=(value,))


def _has_only_torch_state_methods(module: Module) -> bool:
    """Return whether a module and its submodules have only torch's own methods, and no hooks."""
    return all(
        type(each).state_dict is Module.state_dict
        and type(each).load_state_dict is Module.load_state_dict
        and type(each)._save_to_state_dict is Module._save_to_state_dict
        and type(each)._load_from_state_dict.__module__.startswith("torch.nn.modules.")
        and not any(getattr(each, hooks) for hooks in _MODULE_HOOKS)
        and not _STATE_METHODS & vars(each).keys()
        for each in module.modules()
    )


def _takes_other_keys(module: Module) -> bool:
    """Return whether some submodule may accept other keys, as BatchNorm does for older versions."""
    plain = Module._load_from_state_dict
    return any(type(each)._load_from_state_dict is not plain for each in module.modules())


def _can_be_copied_unchanged(target: Any, file_value: Any) -> bool:
    """Return whether the file's bytes can be copied unchanged to the target. Return True as well if
    the file's value does not fit at all, which `into.match` reports."""
    if not isinstance(target, Tensor):
        return False
    if not isinstance(file_value, Tensor):
        return True
    if target.shape != file_value.shape:
        # load_state_dict accepts a tensor of one element for a scalar, because old versions of
        # torch saved scalars in this form.
        return target.dim() > 0 or file_value.shape != (1,)
    are_strided = target.layout is strided and file_value.layout is strided
    return type(target) in _PLAIN_TENSORS and are_strided and target.dtype == file_value.dtype


# ---- optimizers ----


def _plan_optimizer_fill(
    path: str, optimizer: Optimizer, file_state: dict[str, Any]
) -> ObjectFillPlan:
    """Return how to fill an optimizer: its own tensors get the file's bytes, if possible."""
    has_torchs_methods = (
        type(optimizer).state_dict is Optimizer.state_dict
        and type(optimizer).load_state_dict is Optimizer.load_state_dict
        and not _STATE_METHODS & vars(optimizer).keys()
        and not any(getattr(optimizer, hooks) for hooks in _OPTIMIZER_HOOKS)
    )
    if not has_torchs_methods:
        return _plan_load_state_dict_call(path, optimizer, file_state)
    if problem := _why_groups_differ(optimizer, file_state):
        return ObjectFillPlan(problems=(f"{path or 'the object itself'}: {problem}",))
    state = _state_with_own_tensors(optimizer.state_dict()["state"], file_state["state"])
    if state is None:
        return _plan_load_state_dict_call(path, optimizer, file_state)
    pairs = tuple(
        (_item_path(path, f"state.{number}.{name}"), value, file_state["state"][number][name])
        for number, entry in state.items()
        for name, value in entry.items()
        if isinstance(value, Tensor)
    )
    rest = {name: value for name, value in file_state.items() if name != "state"}
    argument = {**rest, "state": state}
    call = Call(path, optimizer.load_state_dict, argument, trees=(rest,))
    return ObjectFillPlan(pairs, (call,))


def _why_groups_differ(optimizer: Optimizer, file_state: dict[str, Any]) -> str:
    """Return why load_state_dict would refuse the file's parameter groups, or ""."""
    try:
        file_lengths = [len(group["params"]) for group in file_state["param_groups"]]
        if not isinstance(file_state["state"], dict):
            raise TypeError
    except (KeyError, TypeError):
        return "the file has no state_dict of an optimizer in its place"
    own_lengths = [len(group["params"]) for group in optimizer.param_groups]
    if len(file_lengths) != len(own_lengths):
        return "loaded state dict has a different number of parameter groups"
    if file_lengths != own_lengths:
        return (
            "loaded state dict contains a parameter group that doesn't match the size of"
            " optimizer's group"
        )
    return ""


def _state_with_own_tensors(
    own_state: dict[Any, Any], file_state: dict[Any, Any]
) -> dict[Any, Any] | None:
    """Return an optimizer's state from the file, but with the optimizer's own tensors in it. Return
    None if the optimizer has no state yet, or if the states differ in more than values."""
    if not own_state or own_state.keys() != file_state.keys():
        return None
    state: dict[Any, Any] = {}
    for number, entry in own_state.items():
        file_entry = file_state[number]
        if not (isinstance(entry, dict) and isinstance(file_entry, dict)):
            return None
        if entry.keys() != file_entry.keys():
            return None
        state[number] = {}
        for name, value in entry.items():
            if not _is_alike(value, file_entry[name]):
                return None
            state[number][name] = value if isinstance(value, Tensor) else file_entry[name]
    return state


def _is_alike(value: Any, file_value: Any) -> bool:
    """Return whether both are tensors of one shape and type, or both are plain values."""
    if isinstance(value, Tensor) and isinstance(file_value, Tensor):
        return (
            type(value) in _PLAIN_TENSORS
            and value.shape == file_value.shape
            and value.dtype == file_value.dtype
        )
    atoms = (type(None), bool, int, float, str)
    return isinstance(value, atoms) and isinstance(file_value, atoms)
