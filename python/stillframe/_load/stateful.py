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
class Filling:
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


def filling(path: str, node: Any, found: Any) -> Filling:
    """Return how to fill a node from `found`, the file's object at the same path."""
    if not isinstance(node, (Module, Optimizer)):
        return _by_load_state_dict(path, node, found)
    if not isinstance(found, dict):
        where, kind = path or "the object itself", type(node).__name__
        said = f"{where} is a {kind}, and {type(found).__name__} in the file, not its state_dict"
        return Filling(problems=(said,))
    if isinstance(node, Module):
        return _module_filling(path, node, found)
    return _optimizer_filling(path, node, found)


def _by_load_state_dict(path: str, node: Any, found: Any) -> Filling:
    """Return a filling of the third kind: a call of the node's `load_state_dict`."""
    call = Call(path, node.load_state_dict, argument=found, trees=(found,))
    return Filling(calls=(call,))


def _item_path(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


# ---- modules ----


def _module_filling(path: str, module: Module, found: dict[str, Any]) -> Filling:
    if not _is_plain(module):
        return _by_load_state_dict(path, module, found)
    live = module.state_dict()
    missing = [name for name in live if name not in found]
    unexpected = [name for name in found if name not in live]
    if missing or unexpected:
        if _takes_other_keys(module):
            return _by_load_state_dict(path, module, found)
        where = path or "the object itself"
        problems: list[str] = []
        if missing:
            problems.append(f"{where}: Missing key(s) in state_dict: {_quoted(missing)}")
        if unexpected:
            problems.append(f"{where}: Unexpected key(s) in state_dict: {_quoted(unexpected)}")
        return Filling(problems=tuple(problems))
    extra = [name for name in live if name.rpartition(".")[2] == _EXTRA_STATE]
    names = [name for name in live if name not in extra]
    pairs = [(_item_path(path, name), live[name], found[name]) for name in names]
    if not all(_is_copied(target, file_value) for _, target, file_value in pairs):
        return _by_load_state_dict(path, module, found)
    calls = (_extra_state_call(path, module, name, found[name]) for name in extra)
    return Filling(tuple(pairs), tuple(calls))


def _quoted(names: list[Any]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _extra_state_call(path: str, module: Module, name: str, value: Any) -> Call:
    owner = module.get_submodule(name.rpartition(".")[0])
    item_path = _item_path(path, name)
    return Call(item_path, owner.set_extra_state, argument=value, trees=(value,))


def _is_plain(module: Module) -> bool:
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


def _is_copied(target: Any, found: Any) -> bool:
    """Return whether the file's bytes can be copied unchanged to the target. Return True as well if
    the file's value does not fit at all, which `into.match` reports."""
    if not isinstance(target, Tensor):
        return False
    if not isinstance(found, Tensor):
        return True
    if target.shape != found.shape:
        # load_state_dict accepts a tensor of one element for a scalar, because old versions of
        # torch saved scalars in this form.
        return target.dim() > 0 or found.shape != (1,)
    are_strided = target.layout is strided and found.layout is strided
    return type(target) in _PLAIN_TENSORS and are_strided and target.dtype == found.dtype


# ---- optimizers ----


def _optimizer_filling(path: str, optimizer: Optimizer, found: dict[str, Any]) -> Filling:
    plain = (
        type(optimizer).state_dict is Optimizer.state_dict
        and type(optimizer).load_state_dict is Optimizer.load_state_dict
        and not _STATE_METHODS & vars(optimizer).keys()
        and not any(getattr(optimizer, hooks) for hooks in _OPTIMIZER_HOOKS)
    )
    if not plain:
        return _by_load_state_dict(path, optimizer, found)
    if problem := _why_groups_differ(optimizer, found):
        return Filling(problems=(f"{path or 'the object itself'}: {problem}",))
    state = _state_with_own_tensors(optimizer.state_dict()["state"], found["state"])
    if state is None:
        return _by_load_state_dict(path, optimizer, found)
    pairs = tuple(
        (_item_path(path, f"state.{number}.{name}"), value, found["state"][number][name])
        for number, entry in state.items()
        for name, value in entry.items()
        if isinstance(value, Tensor)
    )
    rest = {name: value for name, value in found.items() if name != "state"}
    argument = {**rest, "state": state}
    call = Call(path, optimizer.load_state_dict, argument, trees=(rest,))
    return Filling(pairs, (call,))


def _why_groups_differ(optimizer: Optimizer, found: dict[str, Any]) -> str:
    """Return why load_state_dict would refuse the file's parameter groups, or ""."""
    try:
        theirs = [len(group["params"]) for group in found["param_groups"]]
        if not isinstance(found["state"], dict):
            raise TypeError
    except (KeyError, TypeError):
        return "the file has no state_dict of an optimizer in its place"
    ours = [len(group["params"]) for group in optimizer.param_groups]
    if len(theirs) != len(ours):
        return "loaded state dict has a different number of parameter groups"
    if theirs != ours:
        return (
            "loaded state dict contains a parameter group that doesn't match the size of"
            " optimizer's group"
        )
    return ""


def _state_with_own_tensors(live: dict[Any, Any], found: dict[Any, Any]) -> dict[Any, Any] | None:
    """Return an optimizer's state from the file, but with the optimizer's own tensors in it. Return
    None if the optimizer has no state yet, or if the states differ in more than values."""
    if not live or live.keys() != found.keys():
        return None
    state: dict[Any, Any] = {}
    for number, entry in live.items():
        theirs = found[number]
        if not (isinstance(entry, dict) and isinstance(theirs, dict)):
            return None
        if entry.keys() != theirs.keys():
            return None
        state[number] = {}
        for name, value in entry.items():
            if not _is_alike(value, theirs[name]):
                return None
            state[number][name] = value if isinstance(value, Tensor) else theirs[name]
    return state


def _is_alike(value: Any, found: Any) -> bool:
    """Return whether both are tensors of one shape and type, or both are plain values."""
    if isinstance(value, Tensor) and isinstance(found, Tensor):
        return (
            type(value) in _PLAIN_TENSORS
            and value.shape == found.shape
            and value.dtype == found.dtype
        )
    atoms = (type(None), bool, int, float, str)
    return isinstance(value, atoms) and isinstance(found, atoms)
