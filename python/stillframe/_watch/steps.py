"""Which optimizers' steps are known to call the closure first and to be the only ones that write.

Known are torch's own steps, those of classes that were vouched for with `register_optimizer`, and
those of `stillframe._watch.third_party`. A step is recognised by its function: a class that
overrides it is another matter, whatever it inherits from.
"""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any

from torch.optim import Optimizer

from stillframe._watch.third_party import PACKAGES, Package

# The code of the wrapper in which torch runs the hooks of a step.
HOOKED = Optimizer.profile_hook_step(lambda *_: None).__code__
_MAX_LAYERS = 32
_VARARGS = 0x04  # inspect.CO_VARARGS

vouched: set[Any] = set()  # the step functions of registered classes


def register_optimizer(optimizer_class: type[Optimizer]) -> None:
    """Vouches for an optimizer class, so that saves may overlap training with it.

    By this call you promise that the class's ``step`` calls the closure, if it is given one,
    before it changes anything, and that nothing outside ``step`` writes the optimizer's
    parameters and state. Subclasses count only if they inherit ``step`` unchanged.

    Args:
        optimizer_class: A subclass of ``torch.optim.Optimizer``.

    Raises:
        TypeError: It is not one.
    """
    given: object = optimizer_class
    if not (isinstance(given, type) and issubclass(given, Optimizer)):
        name = given.__name__ if isinstance(given, type) else f"an instance of {_name(given)}"
        hint = f": give the class, register_optimizer({_name(given)})"
        raise TypeError(
            f"expected a subclass of torch.optim.Optimizer, not {name}"
            + (hint if isinstance(given, Optimizer) else "")
        )
    layers = _layers(optimizer_class.step)
    if layers:
        vouched.add(layers[0])


def _name(instance: object) -> str:
    return type(instance).__name__


def _layers(step: Any) -> list[Any]:
    """The functions between a step's hooks, outermost first.

    What is wrapped around the hooks (an LR scheduler, Lightning, a compiled step) runs before or
    after the step as far as the gate is concerned, and is left out.
    """
    layers: list[Any] = []
    inside = False
    for _ in range(_MAX_LAYERS):
        if step is None:
            break
        step = getattr(step, "__func__", step)
        if not inside and getattr(step, "__code__", None) is HOOKED:
            inside = True
            layers.clear()
        else:
            layers.append(step)
        inner = getattr(step, "__wrapped__", None)
        step = inner if inner is not None else getattr(step, "_torchdynamo_orig_callable", None)
    return layers


def _module(function: Any) -> str:
    # `__module__` is copied by functools.wraps; the globals are the function's own.
    name = getattr(function, "__globals__", {}).get("__name__", "")
    return name if isinstance(name, str) else ""


def is_known(kind: type[Any], step: Any) -> bool:
    """Whether a step, of a class or of one optimizer of it, is one to rely on."""
    layers = _layers(step)
    if not layers:
        return False
    if layers[0] in vouched:
        return True
    inside = layers[:-1]
    defined_in = _module(layers[-1])
    if not all(_module(layer).startswith("torch.") for layer in inside):
        return False
    return defined_in.startswith("torch.optim.") or _is_listed(kind, defined_in, layers[0])


def _is_listed(kind: type[Any], defined_in: str, outermost: Any) -> bool:
    """Whether `kind`, or a class that it inherits all that writes from, was read and tried."""
    for each in kind.__mro__:
        package = _package_of(each)
        if package is None or each.__qualname__ not in package.classes.get(each.__module__, ()):
            continue
        return (
            defined_in.partition(".")[0] == each.__module__.partition(".")[0]
            and _layers(getattr(each, "step", None))[:1] == [outermost]
            and all(getattr(kind, name) is getattr(each, name) for name in writers(each))
            and _is_tried(package)
        )
    return False


def _package_of(kind: type[Any]) -> Package | None:
    return PACKAGES.get(kind.__module__.partition(".")[0])


def writers(kind: type[Any]) -> list[str]:
    """Names of the methods beside `step` in which a listed class writes its parameters."""
    package = _package_of(kind)
    if package is None or kind.__qualname__ not in package.classes.get(kind.__module__, ()):
        return []
    return [name for name in package.writers if callable(getattr(kind, name, None))]


@functools.cache
def _is_tried(package: Package) -> bool:
    """Whether the installed version is one of those that were read and tried."""
    try:
        version = importlib.metadata.version(package.distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return package.is_tried(version)


def closure_place(step: Any) -> int | None:
    """Where in a step's positional arguments, `self` being the first, a closure stands; None when
    it can only be a keyword."""
    layers = _layers(step)
    code = getattr(layers[-1], "__code__", None) if layers else None
    if code is None:
        return None
    named = code.co_varnames[: code.co_argcount]
    if "closure" in named:
        place: int = named.index("closure")
        return place
    return 1 if code.co_flags & _VARARGS else None


def name_of(kind: type[Any]) -> str:
    """A class's name as a user would import it."""
    return f"{kind.__module__}.{kind.__qualname__}"
