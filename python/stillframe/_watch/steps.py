"""Optimizer steps that are known to call the closure first and to be the only code that writes.

These are torch's own steps, the steps of classes registered with `register_optimizer`, and the
steps listed in `third_party.toml`, which were read and tried. A step is recognised by its function,
so a subclass that overrides `step` is not known.
"""

from __future__ import annotations

import functools
import importlib.metadata
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

# The code of torch's wrapper that runs a step's hooks and then the step.
HOOKED = Optimizer.profile_hook_step(lambda *_: None).__code__
_MAX_WRAPPERS = 32  # wrappers around a step; more of them mean a cycle
_VARARGS = 0x04  # inspect.CO_VARARGS

registered: set[Any] = set()  # the step functions of classes given to `register_optimizer`


@dataclass(frozen=True, eq=False)
class OptimizerPackage:
    """One package whose optimizers are listed.

    Attributes:
        distribution: The name of the package on PyPI.
        versions: The versions that were read and tried; "1.4" means every 1.4.x.
        classes: Names of the classes, by module.
        writers: Methods other than `step` in which the classes write parameters or state. A class
            may lack them.
    """

    distribution: str
    versions: tuple[str, ...]
    classes: dict[str, tuple[str, ...]]
    writers: tuple[str, ...] = ()

    def is_tested_version(self, version: str) -> bool:
        """Return whether a version is one of those that were read and tried."""
        # With the dots, "1.4" matches 1.4.2 but not 1.40.
        return any(f"{version}.".startswith(f"{tried}.") for tried in self.versions)


def _load(path: Path) -> dict[str, OptimizerPackage]:
    """Return the listed packages, by the name that is imported."""
    return {
        name: OptimizerPackage(
            distribution=table["distribution"],
            versions=tuple(table["versions"]),
            classes={module: tuple(names.split()) for module, names in table["classes"].items()},
            writers=tuple(table.get("writers", ())),
        )
        for name, table in tomllib.loads(path.read_text()).items()
    }


PACKAGES = _load(Path(__file__).with_name("third_party.toml"))


def register_optimizer(optimizer_class: type[Optimizer]) -> None:
    """Vouch for an optimizer class, so that saves may overlap training with it.

    By this call you promise two things:
    - If ``step`` is given a closure, it calls the closure before it changes anything.
    - Nothing outside ``step`` writes the optimizer's parameters and state.

    Subclasses count only if they inherit ``step`` unchanged.

    Args:
        optimizer_class: A subclass of ``torch.optim.Optimizer``.

    Raises:
        TypeError: `optimizer_class` is not such a class.
    """
    given: object = optimizer_class
    if not (isinstance(given, type) and issubclass(given, Optimizer)):
        name = given.__name__ if isinstance(given, type) else f"an instance of {_name(given)}"
        hint = f": give the class, register_optimizer({_name(given)})"
        raise TypeError(
            f"expected a subclass of torch.optim.Optimizer, not {name}"
            + (hint if isinstance(given, Optimizer) else "")
        )
    functions = _wrappers_and_function_of(optimizer_class.step)
    if functions:
        registered.add(functions[0])  # the outermost wrapper, or the step itself


def _name(instance: object) -> str:
    return type(instance).__name__


def _wrappers_and_function_of(step: Any) -> list[Any]:
    """Return a step's wrappers inside torch's hooks, outermost first, and then its own function.
    Wrappers outside the hooks run before the pre-hook or after the post-hook, and are left out."""
    functions: list[Any] = []
    is_inside_hooks = False
    for _ in range(_MAX_WRAPPERS):
        if step is None:
            break
        step = getattr(step, "__func__", step)  # the function of a bound method
        if not is_inside_hooks and getattr(step, "__code__", None) is HOOKED:
            is_inside_hooks = True
            functions.clear()  # the functions so far are wrappers outside the hooks
        else:
            functions.append(step)
        wrapped = getattr(step, "__wrapped__", None)
        if wrapped is None:  # perhaps a compiled step
            wrapped = getattr(step, "_torchdynamo_orig_callable", None)
        step = wrapped
    return functions


def _module_of(function: Any) -> str:
    """Return the name of the module that defines a function; "" if it is unknown."""
    # A wrapper's own module is in its globals: functools.wraps copies `__module__`.
    name = getattr(function, "__globals__", {}).get("__name__", "")
    return name if isinstance(name, str) else ""


def is_known(kind: type[Any], step: Any) -> bool:
    """Return whether `step` is known to call the closure first and to be the only code that writes.

    Args:
        kind: The class of the optimizer.
        step: The step function of the class or of one optimizer.
    """
    functions = _wrappers_and_function_of(step)
    if not functions:
        return False
    outermost, wrappers, function = functions[0], functions[:-1], functions[-1]
    if outermost in registered:
        return True
    if not all(_module_of(wrapper).startswith("torch.") for wrapper in wrappers):
        return False
    defined_in = _module_of(function)
    return defined_in.startswith("torch.optim.") or _is_listed(kind, defined_in, outermost)


def _is_listed(kind: type[Any], defined_in: str, outermost: Any) -> bool:
    """Return whether `kind` is a listed class, or inherits all methods that write from one.

    Args:
        defined_in: The module of the step's function.
        outermost: The step with its wrappers.
    """
    for each in kind.__mro__:
        package = _package_of(each)
        if package is None or each.__qualname__ not in package.classes.get(each.__module__, ()):
            continue
        same_package = defined_in.partition(".")[0] == each.__module__.partition(".")[0]
        functions = _wrappers_and_function_of(getattr(each, "step", None))
        same_step = bool(functions) and functions[0] == outermost
        same_writers = all(getattr(kind, name) is getattr(each, name) for name in writers(each))
        return same_package and same_step and same_writers and _is_installed_version_tested(package)
    return False


def _package_of(kind: type[Any]) -> OptimizerPackage | None:
    return PACKAGES.get(kind.__module__.partition(".")[0])


def writers(kind: type[Any]) -> list[str]:
    """Return the names of the methods other than `step` in which a class that `third_party.toml`
    lists writes. Return [] for other classes."""
    package = _package_of(kind)
    if package is None or kind.__qualname__ not in package.classes.get(kind.__module__, ()):
        return []
    return [name for name in package.writers if callable(getattr(kind, name, None))]


@functools.cache
def _is_installed_version_tested(package: OptimizerPackage) -> bool:
    """Return whether the installed version is one of those that were read and tried."""
    try:
        version = importlib.metadata.version(package.distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return package.is_tested_version(version)


def closure_index(step: Any) -> int | None:
    """Return the index of the closure among a step's positional arguments, where `self` has index
    0. Return None if the closure can only be passed by keyword."""
    functions = _wrappers_and_function_of(step)
    if not functions:
        return None
    code = getattr(functions[-1], "__code__", None)  # of the step's own function
    if code is None:
        return None
    named = code.co_varnames[: code.co_argcount]
    if "closure" in named:
        index: int = named.index("closure")
        return index
    return 1 if code.co_flags & _VARARGS else None  # the first of `*args`


def name_of(kind: type[Any]) -> str:
    """Return a class's name as a user would import it."""
    return f"{kind.__module__}.{kind.__qualname__}"
